"""LLM: a model to ask. Names and result shapes are vLLM's, so that a user of it changes one import."""

import functools
import itertools
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from jaxpaged.api import tokens
from jaxpaged.api.arg_utils import EngineArgs
from jaxpaged.api.gather import Finished, Group, ToOutput, in_order
from jaxpaged.api.outputs import BeamSearchOutput, RequestOutput, beam_search_output, request_output
from jaxpaged.api.prompts import (
    Loras,
    Priority,
    as_many,
    is_list,
    naming_prompt,
    of_prompt,
    one_each,
    split_prompt,
    template_text,
    tokenization,
    with_cut,
)
from jaxpaged.api.prompts import Prompt as Prompt
from jaxpaged.checks import InputError, check, checked_bool, checked_choice, checked_int
from jaxpaged.config import EngineConfig
from jaxpaged.engine import gpu_flags, machine
from jaxpaged.engine.adapters import Adapters
from jaxpaged.engine.driver import CALL_CLASSES
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.handle import Handle, Item
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.setup import resolve_dtype
from jaxpaged.engine.texts import texts
from jaxpaged.handover.blocks import Blocks
from jaxpaged.lora import LoRARequest
from jaxpaged.models import loading
from jaxpaged.parallel.processes import join
from jaxpaged.pooling.head import is_for_pooling
from jaxpaged.pooling.head import read as read_head
from jaxpaged.pooling.llm import Pooling, PoolingMethods
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.text import templates
from jaxpaged.text.conversations import Message
from jaxpaged.vllm_names import options as vllm_options
from pallas_kernels import native

if TYPE_CHECKING:
    from jaxpaged.api.llm_engine import LLMEngine


class LLM(PoolingMethods):
    """Loads a model once and generates for batches of prompts, or pools them.

    `model`: "smollm2", a directory with a Hugging Face config and safetensors, a .gguf file, or a hub id (of
    which `revision` is one). `tokenizer`: a directory or hub id with another tokenizer than the model's;
    `skip_tokenizer_init`: have none, for token ids only. `generation_config`: "auto" takes the model's own
    sampling defaults, "vllm" `SamplingParams`'. `chat_template`: a file, or a text, in place of the model's.
    `record_trace`: a file to write what is asked to, without any
    text, as a trace for `jaxpaged lab` (see `engine.recording`). `runner`: "generate", "pooling" for vectors,
    classes and scores in place of answers, or "auto": what the model's files are made for; `pooler_config`
    and `hf_overrides` say how, where the files do not (see `engine.pooling.head`). `options`: the fields of
    `EngineConfig`, and those of vLLM's options that change nothing. With `num_processes`, every process makes
    the same: process 0 has the model to ask, the others work for it and raise `SystemExit` when it ends.
    Raises `InputError`, a `ValueError`, for a user's mistake.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = loading.SMOLLM2,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        generation_config: str | None = "auto",
        chat_template: str | os.PathLike[str] | None = None,
        record_trace: str | os.PathLike[str] | None = None,
        runner: str | None = "auto",
        pooler_config: Any = None,
        hf_overrides: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.config = engine_config(options)
        runner = checked_choice("runner", runner or "auto", ("auto", "generate", "pooling"))
        checked_bool("skip_tokenizer_init", skip_tokenizer_init)
        source = checked_choice("generation_config", generation_config or "auto", ("auto", "vllm"))
        self.chat_template = None if chat_template is None else template_text(chat_template)
        gpu_flags.set_defaults(self.config)
        c = self.config
        processes = None
        if c.distributed_init is not None:
            processes = join(c.distributed_init, c.num_processes, c.process_id, CALL_CLASSES)
        native.prepare(resolve_dtype(c))
        checkpoint = loading.open_checkpoint(model, revision=revision, tokenizer=tokenizer)
        if runner == "pooling" or (runner == "auto" and is_for_pooling(checkpoint.path)):
            machine.keep_on_disk(c.keep_programs)
            self.tokenizer = checkpoint.tokenizer
            self.pooling = Pooling(c, checkpoint, read_head(checkpoint, pooler_config, hf_overrides))
            return
        for name, value in (("pooler_config", pooler_config), ("hf_overrides", hf_overrides)):
            check(name, value, "None unless runner is 'pooling'", not value)
        try:
            self._default_params = SamplingParams(**checkpoint.sampling_defaults if source == "auto" else {})
        except InputError as error:
            raise InputError(f"model={str(checkpoint.path)!r}: generation_config.json: {error}") from error
        machine.keep_on_disk(c.keep_programs)
        self.tokenizer = None if skip_tokenizer_init else checkpoint.tokenizer
        self.engine = Engine(
            self.config,
            checkpoint.config,
            checkpoint.model,
            self.tokenizer,
            record_trace=record_trace,
            shapes=checkpoint.abstract,
            adapter_names=checkpoint.module_names,
            processes=processes,
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model of `EngineArgs`. Raises `InputError`."""
        check("engine_args", engine_args, "an EngineArgs", isinstance(engine_args, EngineArgs))
        return cls(**engine_args.options())

    @functools.cached_property
    def llm_engine(self) -> "LLMEngine":
        """`LLMEngine` over this model, to step by hand."""
        from jaxpaged.api.llm_engine import LLMEngine

        return LLMEngine.of(self)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, one of transformers'. Raises `InputError` where there is none."""
        check("tokenizer", self.tokenizer, "there: the model has none", self.tokenizer is not None)
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generate` and `chat` take where no parameters are given: a copy, to be changed."""
        return self._default_params.clone()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        priority: Priority = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer each prompt, in order.

        A prompt is a string, a list or array of token ids, or a mapping with "prompt" or "prompt_token_ids"
        (`TextPrompt`, `TokensPrompt`), and with a "cache_salt" if only prompts of the same salt may share its
        blocks. `sampling_params` is one for all prompts or a list with one each, and so are `lora_request`,
        None for the model alone, and `priority`, lower first, with `scheduling_policy="priority"`.
        `tokenization_kwargs` may say whether texts get special tokens ({"add_special_tokens": False}), and
        how long prompts are cut ({"truncate_prompt_tokens": 100}, as `SamplingParams` may). Nothing runs
        unless all are valid. May be called from several threads, which then share the engine.
        """
        return list(
            self.generate_each(
                prompts,
                sampling_params,
                use_tqdm=use_tqdm,
                lora_request=lora_request,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs,
            )
        )

    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: Callable[[int, InputError], None] | None = None,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """Answer as `generate` does, but give each result as soon as it and all before it are there.

        Further options are those of `generate_as_finished`, and so are checks and errors. Leaving the
        iteration gives up what is left.
        """
        many, refused = as_many(prompts), set()

        def refuse(i: int, error: InputError) -> None:
            refused.add(i)
            if on_error is None:
                raise of_prompt(i, len(many), error) from error
            on_error(i, error)

        finished = self.generate_as_finished(many, sampling_params, on_error=refuse, **options)
        return in_order(finished, (i for i in range(len(many)) if i not in refused))

    def generate_as_finished(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        priority: Priority = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: Callable[[int, InputError], None] | None = None,
    ) -> Finished:
        """Answer as `generate` does, but give each prompt's place and its result as soon as it is there.

        Requests are checked and queued at once. Leaving the iteration gives up what is left; its `stop` lets
        it end after what has finished. `on_error` is called with the place of a prompt that is refused, and
        why: then all others are answered. Without it the error is raised, and nothing runs.
        """
        many = as_many(prompts)
        params = one_each("sampling_params", self._params(sampling_params), len(many))
        priorities = one_each("priority", 0 if priority is None else priority, len(many))
        adapters = one_each("lora_request", lora_request, len(many))
        asked = []
        for i, (prompt, its, urgency, adapter) in enumerate(
            zip(many, params, priorities, adapters, strict=True)
        ):
            try:
                its = with_cut(its, tokenization_kwargs)
                admit = functools.partial(
                    self.engine.door.admit, params=its, priority=urgency, lora_request=adapter
                )
                cuts = getattr(its, "cuts", None)
                asked.append(
                    (i, *self.read_prompt(prompt, admit, tokenization_kwargs=tokenization_kwargs, cuts=cuts))
                )
            except InputError as error:
                if on_error is None:
                    raise of_prompt(i, len(many), error) from error
                on_error(i, error)
        return self._gather(asked, use_tqdm, self._output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        priority: Priority = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"}, by the chat template.

        A content is a text or a list of parts that are texts, {"type": "text", "text": ...}. The template
        gets it as one text, or as parts with `chat_template_content_format="openai"`; "auto" takes what suits
        the template. `chat_template` stands in place of the model's own, `tools` are those that the model may
        call, `chat_template_kwargs` are variables of the template. `continue_final_message` lets the answer
        go on where the last message ends; `add_generation_prompt` must then be False. Others: as `generate`.
        """
        check("messages", messages, "a list of messages, or of such lists", isinstance(messages, Sequence))
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if one else messages)
        params = one_each("sampling_params", self._params(sampling_params), len(conversations))
        render = functools.partial(
            self.render_chat,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=chat_template_kwargs,
        )
        prompts = [
            render(conversation, cuts=getattr(its, "cuts", None))
            for conversation, its in zip(conversations, params, strict=True)
        ]
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Loras = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
        priority: Priority = None,
    ) -> list[BeamSearchOutput]:
        """Return the likeliest answers to each prompt, as far as a search of so many beams finds them.

        `params` is one for all prompts, `lora_request` and `priority` as in `generate`. At most
        `concurrency_limit` prompts are searched at a time; None sets no limit. Nothing runs unless all are
        valid.
        """
        many = as_many(prompts)
        if concurrency_limit is not None:
            concurrency_limit = checked_int("concurrency_limit", concurrency_limit, "None or an int >= 1", 1)
        admit = functools.partial(self.engine.door.admit_search, params=params)
        adapters = one_each("lora_request", lora_request, len(many))
        priorities = one_each("priority", 0 if priority is None else priority, len(many))
        asked = [
            (
                i,
                *naming_prompt(
                    i,
                    len(many),
                    self.read_prompt,
                    prompt,
                    functools.partial(admit, lora_request=adapter, priority=urgency),
                ),
            )
            for i, (prompt, adapter, urgency) in enumerate(zip(many, adapters, priorities, strict=True))
        ]
        found: list[BeamSearchOutput] = []
        for some in itertools.batched(asked, concurrency_limit or len(asked) or 1):
            finished = self._gather(some, use_tqdm, self._beam_search_output)
            found += in_order(finished, [place for place, *_ in some])
        return found

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now, not when it is first asked for; `InputError` if it is not for the model."""
        self._adapters.get(lora_request)
        return True

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; False if it is not there. Requests under way keep it to their end."""
        return self._adapters.remove(lora_int_id)

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters in the host's memory."""
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
        """Return K and V that are cached of a prompt, from its beginning on: see `Engine.export_blocks`.

        Answer the prompt with `max_tokens=1` before, to have all of it.
        """
        return self.read_prompt(prompt, self.engine.export_blocks)[1]

    def adopt_blocks(self, blocks: Blocks) -> int:
        """Let prompts find what another engine has computed: see `Engine.adopt_blocks`."""
        return self.engine.adopt_blocks(blocks)

    def render_chat(
        self,
        conversation: Sequence[Message],
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        cuts: str | None = None,
    ) -> dict[str, Any]:
        """Return the prompt, as text and as token ids, that the chat template makes of a conversation.

        Options are those of `chat`; `cuts`: as `tokenize` takes it. Raises `InputError`.
        """
        text = templates.render(
            self.tokenizer,
            conversation,
            chat_template=self.chat_template if chat_template is None else chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=content_format,
            kwargs=kwargs,
        )
        # The template writes the special tokens itself: none are added.
        return {"prompt": text, "prompt_token_ids": self.tokenize(text, add_special_tokens=False, cuts=cuts)}

    def _gather(
        self,
        asked: Sequence[tuple[int, str | None, list[Request]]],
        use_tqdm: bool | Callable[..., Any],
        output: ToOutput,
    ) -> Finished:
        """Queue all requests at once; prompts have their places, and their texts where they came as texts."""
        items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        handles = iter(self.engine.submit_all([r for *_, requests in asked for r in requests], items.put))
        groups = [
            Group(place, text, list(itertools.islice(handles, len(requests))))
            for place, text, requests in asked
        ]
        return Finished(self.engine, groups, items, use_tqdm, output)

    def _output(self, group: Sequence[Handle], prompt: str | None, answers: Sequence[Delta]) -> RequestOutput:
        request = group[0].request
        answers = [a if a.text is not None else texts(self.tokenizer, request)(a) for a in answers]
        metrics = [handle.metrics for handle in group]
        return request_output(request, prompt, answers, metrics, self.tokenizer, finished=True)

    def _beam_search_output(
        self, group: Sequence[Handle], _prompt: str | None, found: Sequence[Delta]
    ) -> BeamSearchOutput:
        return beam_search_output(group[0].request, found, self.tokenizer)

    def _params(self, params: Any) -> Any:
        if params is None:
            return self._default_params
        ok = isinstance(params, SamplingParams) or is_list(params)
        check("sampling_params", params, "a SamplingParams or a list of them", ok)
        return params

    def read_prompt[T](
        self,
        prompt: Any,
        admit: Callable[..., T],
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        cuts: str | None = None,
    ) -> tuple[str | None, T]:
        """Return a prompt's text, where it was given as text, and what `admit` makes of its token ids and its
        salt. `cuts`: as `tokenize` takes it. Raises `InputError`.
        """
        text, token_ids, salt = split_prompt(prompt)
        if token_ids is None:
            token_ids = self.tokenize(str(text), cuts=cuts, **tokenization(tokenization_kwargs))
        return text, admit(token_ids, cache_salt=salt)

    def tokenize(self, text: str, *, add_special_tokens: bool = True, cuts: str | None = None) -> list[int]:
        """Return the token ids of a prompt. Raises `InputError`.

        A text too long for any model's context is refused without being read whole. With `cuts`, "left" or
        "right", so much is cut off at that end that the rest surely has as many tokens as the context.
        """
        most = self.engine.door.max_model_len
        return tokens.encode(self.tokenizer, text, most, add_special_tokens=add_special_tokens, cuts=cuts)


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the config of `LLM`'s options. Raises `InputError`."""
    return EngineConfig(**vllm_options.translated(options, tuple(EngineConfig.__dataclass_fields__)))
