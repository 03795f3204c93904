"""LLM: a model to ask. Names and result shapes are vLLM's, so that a user of it changes one import."""

import dataclasses
import functools
import itertools
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from jaxpaged import vllm_options
from jaxpaged.chat import Message, check_messages
from jaxpaged.checks import InputError, check, checked_bool, checked_choice, is_int, shown
from jaxpaged.config import EngineConfig
from jaxpaged.engine import gpu_flags, machine
from jaxpaged.engine.adapters import Adapters
from jaxpaged.engine.blocks import Blocks
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.handle import Handle, Item, collect, or_raise
from jaxpaged.engine.outputs import BeamSearchOutput, RequestOutput, beam_search_output, request_output
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.texts import texts
from jaxpaged.lora import LoRARequest
from jaxpaged.models import loading
from jaxpaged.parallel.processes import join
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from pallas_kernels import native

Group = tuple[str | None, list[Handle]]  # a prompt, where it came as text, and a handle for each answer
# One for all prompts, or a list with one each.
Loras = LoRARequest | None | Sequence[LoRARequest | None]
Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]

LONG_TEXT = 50_000  # characters, from which on it matters how a text is cut into tokens
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class LLM:
    """Loads a model once and generates for batches of prompts.

    `model`: "smollm2", a directory with a Hugging Face config and safetensors, a .gguf file, or a hub id (of
    which `revision` is one). `tokenizer`: a directory or hub id with another tokenizer than the model's;
    `skip_tokenizer_init`: have none, for token ids only. `generation_config`: "auto" takes the model's own
    sampling defaults, "vllm" `SamplingParams`'. `record_trace`: a file to write what is asked to, without any
    text, as a trace for `jaxpaged lab` (see `engine.recording`). `options`: the fields of `EngineConfig`, and
    those of vLLM's options that change nothing. With `num_processes`, every process makes the same: process 0
    has the model to ask, the others work for it and raise `SystemExit` when it ends. Raises `InputError`, a
    `ValueError`, for a user's mistake.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = loading.SMOLLM2,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        generation_config: str | None = "auto",
        record_trace: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self.config = engine_config(options)
        checked_bool("skip_tokenizer_init", skip_tokenizer_init)
        source = checked_choice("generation_config", generation_config or "auto", ("auto", "vllm"))
        gpu_flags.set_defaults(self.config)
        c = self.config
        processes = None
        if c.distributed_init is not None:
            processes = join(c.distributed_init, c.num_processes, c.process_id)
        native.prepare(machine.resolve_dtype(c))
        checkpoint = loading.open_checkpoint(model, revision=revision, tokenizer=tokenizer)
        try:
            self._default_params = SamplingParams(**checkpoint.sampling_defaults if source == "auto" else {})
        except InputError as error:
            raise InputError(f"model={str(checkpoint.path)!r}: generation_config.json: {error}") from error
        machine.keep_on_disk()
        self.tokenizer = None if skip_tokenizer_init else checkpoint.tokenizer
        kept_as: Any = {"quantization": c.quantization, "loop_over_layers": c.loop_over_layers}
        self.engine = Engine(
            self.config,
            checkpoint.config,
            functools.partial(checkpoint.model, **kept_as),
            self.tokenizer,
            record_trace=record_trace,
            shapes=functools.partial(checkpoint.abstract, **kept_as),
            adapter_names=checkpoint.module_names,
            processes=processes,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` take where no parameters are given."""
        return self._default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt, in order.

        A prompt is a string, a list or array of token ids, or a mapping with "prompt" or "prompt_token_ids",
        and with a "cache_salt" if only prompts of the same salt may share its blocks. `sampling_params` is
        one for all prompts or a list with one each, and so is `lora_request`, None for the model alone;
        `priority` one int a prompt, lower first, with `scheduling_policy="priority"`. Nothing runs unless all
        are valid. May be called from several threads, which then share the engine.
        """
        return list(
            self.generate_each(
                prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority
            )
        )

    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but each result as soon as it and all before it are there.

        Requests are checked and queued at once. Leaving the iteration gives up what is left.
        """
        many = self._as_many(prompts)
        params = _one_each("sampling_params", self._params(sampling_params), len(many))
        priorities = [0] * len(many) if priority is None else _one_each("priority", priority, len(many))
        adapters = _one_each("lora_request", lora_request, len(many))
        asked = [
            _naming_prompt(
                i,
                len(many),
                self.read_prompt,
                prompt,
                functools.partial(self.engine.door.admit, params=its, priority=urgency, lora_request=adapter),
            )
            for i, (prompt, its, urgency, adapter) in enumerate(
                zip(many, params, priorities, adapters, strict=True)
            )
        ]
        outputs = self._gather(*self._submit(asked), use_tqdm, self._output)
        next(outputs)  # into its `try`: from here on it gives up what is left, whatever happens
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"}, by the chat template."""
        check("messages", messages, "a list of messages, or of such lists", isinstance(messages, Sequence))
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if one else messages)
        prompts = [self.render_chat(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        lora_request: Loras = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to each prompt, as far as a search of so many beams finds them.

        `params` is one for all prompts, `lora_request` as in `generate`. Nothing runs unless all are valid.
        """
        many = self._as_many(prompts)
        admit = functools.partial(self.engine.door.admit_search, params=params)
        adapters = _one_each("lora_request", lora_request, len(many))
        asked = [
            _naming_prompt(
                i, len(many), self.read_prompt, prompt, functools.partial(admit, lora_request=adapter)
            )
            for i, (prompt, adapter) in enumerate(zip(many, adapters, strict=True))
        ]
        outputs = self._gather(*self._submit(asked), use_tqdm, self._beam_search_output)
        return list(itertools.islice(outputs, 1, None))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now, not when it is first asked for; `InputError` if it is not for the model."""
        self._adapters.get(lora_request)
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; False if it is not there. Requests under way keep it to their end."""
        return self._adapters.remove(lora_int_id)

    def list_loras(self) -> set[int]:
        """The ids of those in the host's memory."""
        return self._adapters.ids()

    @property
    def _adapters(self) -> Adapters:
        adapters = self.engine.door.adapters
        check("enable_lora", self.config.enable_lora, "True for adapters", adapters is not None)
        assert adapters is not None
        return adapters

    def reset_prefix_cache(self) -> bool:
        """Forget the prefixes of former requests; False, and nothing happens, while any is unfinished."""
        return self.engine.reset_prefix_cache()

    def export_blocks(self, prompt: Prompt) -> Blocks:
        """The K and V that the cache has of a prompt, from its beginning on: see `Engine.export_blocks`.

        Answer it with `max_tokens=1` before, to have all of it.
        """
        return self.read_prompt(prompt, self.engine.export_blocks)[1]

    def adopt_blocks(self, blocks: Blocks) -> int:
        """Let prompts find what another engine has computed: see `Engine.adopt_blocks`."""
        return self.engine.adopt_blocks(blocks)

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
        return {"prompt": text, "prompt_token_ids": self.encode(text, add_special_tokens=False)}

    def _submit(
        self, asked: Sequence[tuple[str | None, list[Request]]]
    ) -> "tuple[list[Group], queue.SimpleQueue[Item]]":
        """Queue all requests at once: for each prompt a group; and where their answers come."""
        items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        handles = iter(self.engine.submit_all([r for _, requests in asked for r in requests], items.put))
        return [(text, list(itertools.islice(handles, len(requests)))) for text, requests in asked], items

    def _gather(
        self,
        groups: Sequence[Group],
        items: "queue.SimpleQueue[Item]",
        use_tqdm: bool | Callable[..., Any],
        output: Callable[[Sequence[Handle], str | None, Sequence[Delta]], Any],
    ) -> Iterator[Any]:
        """First None, then what `output` makes of each group's answers; with a bar that shows both speeds."""
        handles = [handle for _, group in groups for handle in group]
        deltas: dict[int, list[Delta]] = {handle.request_id: [] for handle in handles}
        progress = _Progress(
            {group[0].request_id: len(group[0].request.prompt_token_ids) for _, group in groups}
        )
        bar_of = use_tqdm if callable(use_tqdm) else tqdm
        try:
            yield None
            with bar_of(total=len(handles), desc="answers", unit="req", disable=not use_tqdm) as bar:
                for prompt, group in groups:
                    for handle in group:
                        while not (its := deltas[handle.request_id]) or not its[-1].finish_reason:
                            delta = or_raise(items.get())
                            deltas[delta.request_id].append(delta)
                            bar.set_postfix_str(progress.after(delta), refresh=False)
                            if delta.finish_reason:
                                bar.update()
                    answers = [collect(deltas.pop(handle.request_id)) for handle in group]
                    yield output(group, prompt, answers)
        finally:  # the user's Ctrl-C, for one: what is left should not run on unseen
            self.engine.abort([handle for handle in handles if handle.request_id in deltas])

    def _output(self, group: Sequence[Handle], prompt: str | None, answers: Sequence[Delta]) -> RequestOutput:
        request = group[0].request
        answers = [a if a.text is not None else texts(self.tokenizer, request.params)(a) for a in answers]
        metrics = [handle.metrics for handle in group]
        return request_output(request, prompt, answers, metrics, self.tokenizer, finished=True)

    def _beam_search_output(
        self, group: Sequence[Handle], _prompt: str | None, found: Sequence[Delta]
    ) -> BeamSearchOutput:
        return beam_search_output(group[0].request, found, self.tokenizer)

    def _params(self, params: Any) -> Any:
        if params is None:
            return self._default_params
        ok = isinstance(params, SamplingParams) or _is_list(params)
        check("sampling_params", params, "a SamplingParams or a list of them", ok)
        return params

    def _as_many(self, prompts: Any) -> Sequence[Any]:
        """The prompts as a sequence, whether one was given or several."""
        if isinstance(prompts, str | bytes | Mapping):
            return [prompts]
        rule = "a prompt or a list of prompts"
        check("prompts", prompts, rule, _is_list(prompts))
        is_one = len(prompts) > 0 and (
            is_int(prompts[0]) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1)
        )
        return [prompts] if is_one else prompts

    def read_prompt[T](self, prompt: Any, admit: Callable[..., T]) -> tuple[str | None, T]:
        """A prompt's text, where it was given as text, and what is made of its token ids and its salt."""
        text, token_ids, salt = prompt, None, None
        if isinstance(prompt, Mapping):
            for key in prompt:
                check("key of a prompt", key, f"one of {', '.join(PROMPT_KEYS)}", key in PROMPT_KEYS)
            text, token_ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        elif _is_list(prompt):
            text, token_ids = None, prompt
        if not isinstance(text, str) and not (text is None and token_ids is not None):
            raise InputError(
                f"prompt={shown(prompt)} must be a string, a list of token ids, or a mapping with 'prompt' "
                "or 'prompt_token_ids'"
            )
        if token_ids is None:
            token_ids = self.encode(str(text))
        return text, admit(token_ids, cache_salt=salt)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt.

        One too long for any model's context is refused without being read whole.
        """
        if not text:
            raise InputError("prompt='' must not be empty")
        if self.tokenizer is None:
            raise InputError("prompt must be token ids: the model has no tokenizer")
        max_model_len = self.engine.door.max_model_len
        if len(text) > max_model_len and len(text) > max_model_len * self._longest_token:
            raise InputError(
                f"the prompt has {len(text)} characters, more than max_model_len={max_model_len} tokens hold"
            )
        try:
            text.encode()
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            if backend is not None and len(text) > LONG_TEXT:
                return _encoded(backend, text, add_special_tokens)
            token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except UnicodeEncodeError as error:
            raise InputError(
                f"prompt={shown(text)} must be Unicode text, without half a surrogate pair"
            ) from error
        return token_ids

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters that a token can stand for at most."""
        return max(map(len, self.tokenizer.get_vocab() if self.tokenizer else [""]))


@dataclasses.dataclass
class _Progress:
    """How a call of `generate` goes; both speeds are over its whole time."""

    prompt_lens: dict[int, int]  # of requests without an answer so far
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    start: float = dataclasses.field(default_factory=time.perf_counter)

    def after(self, delta: Delta) -> str:
        self.num_prompt_tokens += self.prompt_lens.pop(delta.request_id, 0)
        self.num_new_tokens += len(delta.token_ids)
        return speeds(time.perf_counter() - self.start, self.num_prompt_tokens, self.num_new_tokens)


def speeds(seconds: float, num_prompt_tokens: int, num_new_tokens: int) -> str:
    prompt, new = (n / (seconds or 1) for n in (num_prompt_tokens, num_new_tokens))
    return f"prompt {prompt:.0f} tok/s, generated {new:.0f} tok/s"


def _encoded(backend: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Return what a transformers tokenizer's `encode` does, made by its backend.

    Other threads run meanwhile. The tokenizer would make several lists of all tokens, and keep others from
    running for most of a second where there are millions.
    """
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    token_ids: list[int] = encoding.ids
    return token_ids


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The config of `LLM`'s options. Raises `InputError`."""
    return EngineConfig(**vllm_options.translated(options, tuple(EngineConfig.__dataclass_fields__)))


def _is_list(value: Any) -> bool:
    """Whether it has members that count: of an array, a dimension; a text is one thing."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _one_each(name: str, value: Any, num_prompts: int) -> list[Any]:
    """A list with one for each prompt; one value that is no list is everybody's."""
    if not _is_list(value):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InputError(f"{name} has {len(value)} entries, must have one for each of {num_prompts} prompts")
    return list(value)


def _naming_prompt[T](i: int, num_prompts: int, read: Callable[..., T], *args: Any) -> T:
    """What `read` gives; its `InputError` says which prompt is at fault, where there are several."""
    try:
        return read(*args)
    except InputError as error:
        raise error if num_prompts == 1 else InputError(f"prompt {i}: {error}") from error
