"""LLM: a model to ask. Names and result shapes are vLLM's, so that a user of it changes one import."""

import dataclasses
import os
import queue
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from tqdm import tqdm

from jaxpaged.chat import Message, check_messages
from jaxpaged.config import EngineConfig, InputError, SamplingParams, check
from jaxpaged.engine import gpu_flags, plan
from jaxpaged.engine.engine import Answer, Engine, Handle, Item, Submission, collect, or_raise
from jaxpaged.engine.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.engine.request import Delta
from jaxpaged.engine.state import FinishReason
from jaxpaged.models import loading

Prompt = str | Sequence[int] | Mapping[str, Any]

FINISH_REASONS: dict[FinishReason, Literal["stop", "length", "abort"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


@dataclasses.dataclass(frozen=True)
class GenerationStats:
    """How one call of `LLM.generate` went; both speeds are over its whole time."""

    seconds: float = 0.0
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompts' tokens, found in the prefix cache

    def __str__(self) -> str:
        prompt, new = (n / (self.seconds or 1) for n in (self.num_prompt_tokens, self.num_new_tokens))
        return f"prompt {prompt:.0f} tok/s, generated {new:.0f} tok/s"


class LLM:
    """Loads a model once and generates for batches of prompts.

    `model`: "smollm2", a directory with a Hugging Face config and safetensors, a .gguf file, or a hub id.
    `options`: the fields of `EngineConfig`. Raises `InputError`, a `ValueError`, for a user's mistake.
    """

    def __init__(self, model: str | os.PathLike[str] = loading.SMOLLM2, **options: Any) -> None:
        self.config = _engine_config(options)
        gpu_flags.set_defaults()
        checkpoint = loading.open_checkpoint(model)
        plan.keep_compiled_programs()
        self.tokenizer = checkpoint.tokenizer
        self.engine = Engine(self.config, checkpoint.config, checkpoint.load_weights())
        self.stats = GenerationStats()  # of the call of `generate` that got tokens last

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt, in order.

        A prompt is a string, a list of token ids, or `{"prompt": str}` or `{"prompt_token_ids": [...]}`.
        `sampling_params` is one for all prompts or a list with one each; `priority` one int a prompt, lower
        first, with `scheduling_policy="priority"`. Nothing runs unless all are valid. May be called from
        several threads, which then share the engine.
        """
        texts, token_ids = self._read_prompts(prompts)
        params = _one_each(sampling_params, len(token_ids))
        priorities = [0] * len(token_ids) if priority is None else list(priority)
        if len(priorities) != len(token_ids):
            raise InputError(
                f"priority has {len(priorities)} entries, must have one for each of {len(token_ids)} prompts"
            )
        submissions = [
            Submission(prompt, p, urgency)
            for prompt, p, urgency in zip(token_ids, params, priorities, strict=True)
        ]
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        handles = self.engine.submit_all(submissions, items.put)
        try:
            answers = self._gather(handles, items, use_tqdm)
        except BaseException:  # the user's Ctrl-C, for one: what is left should not run on unseen
            self.engine.abort(handles)
            raise
        return [
            RequestOutput(
                request_id=str(answer.request_id),
                prompt=text,
                prompt_token_ids=prompt,
                outputs=[self._completion(answer)],
                num_cached_tokens=answer.num_hit_tokens,
            )
            for answer, text, prompt in zip(answers, texts, token_ids, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"}, by the chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if one else messages)
        prompts = [self.render_chat(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def reset_prefix_cache(self) -> bool:
        """Forget the prefixes of former requests; False, and nothing happens, while any is unfinished."""
        return self.engine.reset_prefix_cache()

    def render_chat(self, conversation: Sequence[Message]) -> dict[str, Any]:
        """The prompt, as text and as token ids, that the chat template makes of a conversation."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise InputError("chat: the model must have a chat template")
        check_messages(conversation)
        try:
            text = self.tokenizer.apply_chat_template(
                list(conversation), tokenize=False, add_generation_prompt=True
            )
        except (
            Exception
        ) as error:  # templates raise errors of their own, for example about the order of roles
            raise InputError(f"chat: the model's chat template refuses these messages: {error}") from error
        # The template writes the special tokens itself: none are added.
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def _gather(
        self, handles: Sequence[Handle], items: "queue.SimpleQueue[Item]", use_tqdm: bool
    ) -> list[Answer]:
        """All answers, in the handles' order, with a bar that shows both speeds."""
        deltas: dict[int, list[Delta]] = {handle.request_id: [] for handle in handles}
        prompt_lens = {h.request_id: len(h.request.prompt_token_ids) for h in handles}
        start = time.perf_counter()
        stats = GenerationStats()  # of this call: another thread's may run at the same time
        unfinished = len(handles)
        with tqdm(total=unfinished, desc="answers", unit="req", disable=not use_tqdm) as bar:
            while unfinished:
                delta = or_raise(items.get())
                is_first = not deltas[delta.request_id]
                deltas[delta.request_id].append(delta)
                stats = self.stats = GenerationStats(
                    seconds=time.perf_counter() - start,
                    num_prompt_tokens=stats.num_prompt_tokens + is_first * prompt_lens[delta.request_id],
                    num_new_tokens=stats.num_new_tokens + len(delta.token_ids),
                    num_cached_tokens=stats.num_cached_tokens + is_first * delta.num_hit_tokens,
                )
                bar.set_postfix_str(str(stats), refresh=False)
                if delta.finish_reason:
                    unfinished -= 1
                    bar.update()
        return [collect(deltas[handle.request_id]) for handle in handles]

    def _completion(self, answer: Answer) -> CompletionOutput:
        logprobs = None
        if answer.logprobs is not None:
            logprobs = [
                {token: Logprob(logprob, self._decode([token], skip_special_tokens=False))}
                for token, logprob in zip(answer.token_ids, answer.logprobs, strict=True)
            ]
        return CompletionOutput(
            index=0,
            text=self._decode(answer.token_ids) or "",
            token_ids=answer.token_ids,
            finish_reason=FINISH_REASONS[answer.finish_reason],
            cumulative_logprob=None if answer.logprobs is None else sum(answer.logprobs),
            logprobs=logprobs,
        )

    def _decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _read_prompts(
        self, prompts: Prompt | Sequence[Prompt]
    ) -> tuple[tuple[str | None, ...], tuple[list[int], ...]]:
        """Every prompt as text (where it was one) and as token ids."""
        if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
            prompts = cast(Sequence[Prompt], [prompts])
        if not prompts:
            raise InputError("prompts must have at least one prompt")
        texts, token_ids = zip(*map(self._read_prompt, range(len(prompts)), prompts), strict=True)
        return texts, token_ids

    def _read_prompt(self, i: int, prompt: Any) -> tuple[str | None, list[int]]:
        text = prompt
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                token_ids = prompt["prompt_token_ids"]
                if isinstance(token_ids, str) or not isinstance(token_ids, Sequence):
                    what = f"prompt {i}: prompt_token_ids={token_ids!r}"
                    raise InputError(f"{what} must be a list of token ids")
                return prompt.get("prompt"), list(token_ids)
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


def _engine_config(options: Mapping[str, Any]) -> EngineConfig:
    known = sorted(EngineConfig.__dataclass_fields__)
    for name in options:
        if name not in known:
            raise InputError(f"option {name!r} must be one of {', '.join(known)}")
    return EngineConfig(**options)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    rule = "a SamplingParams or a list of them"
    check("sampling_params", params, rule, isinstance(params, Sequence) and not isinstance(params, str))
    params = list(params)
    if len(params) != num_prompts:
        raise InputError(
            f"sampling_params has {len(params)} entries, must have one for each of {num_prompts} prompts"
        )
    return params
