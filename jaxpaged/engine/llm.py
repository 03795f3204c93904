"""LLM: a model to ask. Names and result shapes are vLLM's, so that a user of it changes one import."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
from tqdm import tqdm

from jaxpaged.config import EngineConfig, InputError, SamplingParams
from jaxpaged.engine.engine import Answer, Engine
from jaxpaged.engine.outputs import CompletionOutput, RequestOutput
from jaxpaged.models import loading

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, str]


class LLM:
    """Loads a model once and generates for batches of prompts.

    `model`: "smollm2", a directory with a Hugging Face config and safetensors, a .gguf file, or a hub id.
    `options`: the fields of `EngineConfig`. Raises `InputError`, a `ValueError`, for a user's mistake.
    """

    def __init__(self, model: str | os.PathLike[str] = loading.SMOLLM2, **options: Any) -> None:
        self.config = engine_config(options)
        checkpoint = loading.open_checkpoint(model)
        self.tokenizer = checkpoint.tokenizer
        keep_compiled_programs()
        self.engine = Engine(self.config, checkpoint.config, checkpoint.load_weights())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer each prompt, in order.

        A prompt is a string, a list of token ids, or `{"prompt": str}` or `{"prompt_token_ids": [...]}`.
        `sampling_params` is one for all prompts or a list with one each. Nothing runs unless all are valid.
        """
        texts, token_ids = self._read_prompts(prompts)
        params = _one_each(sampling_params, len(token_ids))
        for i, (prompt, p) in enumerate(zip(token_ids, params, strict=True)):
            try:
                self.engine.check_request(prompt, p)
            except InputError as error:
                raise InputError(f"prompt {i}: {error}") from error
        ids = [self.engine.add_request(prompt, p) for prompt, p in zip(token_ids, params, strict=True)]
        answers = self._run(len(ids), sum(map(len, token_ids)), use_tqdm)
        return [
            RequestOutput(
                request_id=str(request_id),
                prompt=text,
                prompt_token_ids=prompt,
                outputs=[self._completion(answers[request_id])],
            )
            for request_id, text, prompt in zip(ids, texts, token_ids, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"}, by the chat template."""
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.render_chat(conversation) for conversation in conversations]
        # The template writes the special tokens itself: none are added.
        token_ids = [
            {"prompt": prompt, "prompt_token_ids": self.tokenizer.encode(prompt, add_special_tokens=False)}
            for prompt in prompts
        ]
        return self.generate(token_ids, sampling_params, use_tqdm=use_tqdm)

    def render_chat(self, conversation: Sequence[Message]) -> str:
        """The text that the chat template makes of a conversation, ready for the model's answer."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise InputError("chat: the model must have a chat template")
        check_messages(conversation)
        try:
            return self.tokenizer.apply_chat_template(
                list(conversation), tokenize=False, add_generation_prompt=True
            )
        except (
            Exception
        ) as error:  # templates raise errors of their own, for example about the order of roles
            raise InputError(f"chat: the model's chat template refuses these messages: {error}") from error

    def _run(self, num_requests: int, num_prompt_tokens: int, use_tqdm: bool) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        start = time.perf_counter()
        before = None
        with tqdm(
            total=num_requests, desc="requests", unit="req", disable=not use_tqdm, dynamic_ncols=True
        ) as bar:
            while self.engine.has_work:
                progress = self.engine.run()
                answers |= {answer.request_id: answer for answer in progress.answers}
                before = before or progress
                bar.update(len(progress.answers))
                seconds = time.perf_counter() - start
                bar.set_postfix_str(f"{progress.num_new_tokens / seconds:.1f} tok/s")
        return answers

    def _completion(self, answer: Answer) -> CompletionOutput:
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        return CompletionOutput(
            index=0,
            text=text,
            token_ids=answer.token_ids,
            finish_reason="stop" if answer.finish_reason.name == "STOP" else "length",
        )

    def _read_prompts(self, prompts: Prompt | Sequence[Prompt]) -> tuple[list[str | None], list[list[int]]]:
        """Every prompt as text (where it was one) and as token ids."""
        if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
            return self._read_prompts([cast(Prompt, prompts)])
        if not prompts:
            raise InputError("prompts must have at least one prompt")
        read = [self._read_prompt(i, prompt) for i, prompt in enumerate(prompts)]
        return [text for text, _ in read], [token_ids for _, token_ids in read]

    def _read_prompt(self, i: int, prompt: Any) -> tuple[str | None, list[int]]:
        text = prompt
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            text = prompt.get("prompt")
        elif isinstance(prompt, Sequence) and not isinstance(prompt, str):
            return None, list(prompt)
        if not isinstance(text, str):
            raise InputError(
                f"prompt {i}: {prompt!r} must be a string, a list of token ids, or a mapping with "
                "'prompt' or 'prompt_token_ids'"
            )
        if not text:
            raise InputError(f"prompt {i}: '' must not be empty")
        if self.tokenizer is None:
            raise InputError(f"prompt {i}: must be token ids: the model has no tokenizer")
        return text, self.tokenizer.encode(text)


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    known = set(EngineConfig.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise InputError(f"option {name!r} must be one of {', '.join(sorted(known))}")
    return EngineConfig(**options)


def check_messages(messages: Sequence[Message]) -> None:
    """Raise `InputError` unless `messages` is a non-empty list of {"role": str, "content": str}."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(f"messages={messages!r} must be a list with at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(k), str) for k in ("role", "content")
        ):
            raise InputError(f"message {message!r} must have a 'role' and a 'content', both strings")


def keep_compiled_programs() -> None:
    """Let JAX keep compiled programs on disk, so that a second start does not compile again.

    The directory is that of `JAX_COMPILATION_CACHE_DIR` if it is set, else jaxpaged's in the user's cache.
    """
    if jax.config.jax_compilation_cache_dir is None:
        cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(cache_home) / "jaxpaged"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    params = list(params)
    if len(params) != num_prompts:
        raise InputError(
            f"sampling_params has {len(params)} entries, must have one for each of {num_prompts} prompts"
        )
    return params
