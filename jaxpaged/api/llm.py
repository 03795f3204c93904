"""LLM: a model to ask. Names and result shapes are vLLM's, so that a user of it changes one import."""

import dataclasses
import functools
import itertools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from jaxpaged.api.gather import Finished, Group, ToOutput, in_order
from jaxpaged.api.llm_engine import LLMEngine, ModelConfig
from jaxpaged.api.model import LoadedModel
from jaxpaged.api.outputs import BeamSearchOutput, RequestOutput, beam_search_output, request_output
from jaxpaged.api.prompts import (
    Loras,
    Priority,
    as_many,
    is_list,
    naming_prompt,
    of_prompt,
    one_each,
    with_cut,
)
from jaxpaged.api.prompts import Prompt as Prompt
from jaxpaged.api.scoring import scored
from jaxpaged.checks import InputError, check, checked_int
from jaxpaged.engine.handle import Handle, Item
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.texts import texts
from jaxpaged.pooling.llm import Pooling
from jaxpaged.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
)
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.text.conversations import Message
from jaxpaged.vllm_names.methods import VllmClass, check_arguments


class LLM(LoadedModel, metaclass=VllmClass):
    """Model that generates for batches of prompts, or pools them. `LoadedModel` says how it is loaded."""

    @functools.cached_property
    def llm_engine(self) -> LLMEngine:
        """`LLMEngine` over this model, to step by hand."""
        return LLMEngine.of(self)

    @property
    def model_config(self) -> ModelConfig:
        """Length and vocabulary of the model: see `LLMEngine.model_config`."""
        return self.llm_engine.model_config

    @property
    def runner_type(self) -> str:
        """Return "generate", or "pooling" for a model that pools."""
        return "generate" if self.pooling is None else "pooling"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Loras = None,
        priority: Priority = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer each prompt, in order.

        A prompt is a string, a list or array of token ids, or a mapping with "prompt" or "prompt_token_ids"
        (`TextPrompt`, `TokensPrompt`), and with a "cache_salt" if only prompts of the same salt may share its
        blocks. With "continue_from", the first tokens of an answer, that answer goes on, and the output has
        its new tokens. With n answers it is a list with the tokens of each, None for one that has ended.
        `sampling_params` is one for all prompts or a list with one each, and so are `lora_request`, None for
        the model alone, and `priority`, lower first, with `scheduling_policy="priority"`.
        `tokenization_kwargs` may say whether texts get special tokens ({"add_special_tokens": False}), and
        how long prompts are cut ({"truncate_prompt_tokens": 100}, as `SamplingParams` may). Nothing runs
        unless all are valid. May be called from several threads, which then share the engine.
        `others`: vLLM's further arguments, which must ask for nothing.
        """
        check_arguments("LLM.generate", others)
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
        """Answer as `generate` does, but yield each prompt's index and result as soon as the prompt is
        finished.

        Requests are checked and queued at once. Leaving the iteration gives up what is left; its `stop` lets
        it end after what has finished. `on_error` is called with the place of a prompt that is refused, and
        why: then all others are answered. Without it the error is raised, and nothing runs.
        """
        many = as_many(prompts)
        params = one_each("sampling_params", self._params(sampling_params), len(many))
        priorities = one_each("priority", 0 if priority is None else priority, len(many))
        adapters = one_each("lora_request", lora_request, len(many))
        asked = []
        for i, (prompt, own_params, urgency, adapter) in enumerate(
            zip(many, params, priorities, adapters, strict=True)
        ):
            try:
                own_params = with_cut(own_params, tokenization_kwargs)
                admit = functools.partial(
                    self.engine.door.admit, params=own_params, priority=urgency, lora_request=adapter
                )
                cuts = getattr(own_params, "cuts", None)
                read = functools.partial(self.read_prompt, cuts=cuts, without=())
                asked.append((i, *read(prompt, admit, tokenization_kwargs=tokenization_kwargs)))
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
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"}, by the chat template.

        A content is a text or a list of parts that are texts, {"type": "text", "text": ...}. The template
        gets it as one text, or as parts with `chat_template_content_format="openai"`; "auto" takes what suits
        the template. `chat_template` stands in place of the model's own, `tools` are those that the model may
        call, `chat_template_kwargs` are variables of the template. `continue_final_message` lets the answer
        go on where the last message ends; `add_generation_prompt` must then be False. Others: as `generate`.
        """
        check_arguments("LLM.chat", others)
        prompts = self._rendered(
            messages,
            sampling_params,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=chat_template_kwargs,
        )
        return self.generate(
            prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request, priority=priority
        )

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Loras = None,
        priority: Priority = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[str]:
        """Queue prompts as `generate` does, and return their requests' ids at once.

        `wait_for_completion` has the answers. `use_tqdm` changes nothing: nothing is waited for.
        """
        check_arguments("LLM.enqueue", others)
        finished = self.generate_as_finished(
            prompts,
            sampling_params,
            use_tqdm=False,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )
        self._enqueued.append(finished)
        return [str(group.handles[0].request_id) for group in finished.groups]

    def enqueue_chat(
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
        **others: Any,
    ) -> list[str]:
        """Queue conversations, as `chat` takes them, and return their requests' ids: see `enqueue`."""
        check_arguments("LLM.enqueue_chat", others)
        prompts = self._rendered(
            messages,
            sampling_params,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=chat_template_kwargs,
        )
        return self.enqueue(prompts, sampling_params, lora_request, priority)

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Return the answers to all that was queued by `enqueue`, in order, when they are there.

        `output_type` is None or `RequestOutput`; `use_tqdm` changes nothing. Raises `InputError`.
        """
        rule = "None or RequestOutput"
        types = output_type if isinstance(output_type, tuple) else (output_type,)
        check("output_type", output_type, rule, all(each in (None, RequestOutput) for each in types))
        enqueued, self._enqueued = self._enqueued, []
        return [output for each in enqueued for output in in_order(each, (g.place for g in each.groups))]

    @functools.cached_property
    def _enqueued(self) -> list[Finished]:
        return []

    def _rendered(self, messages: Any, sampling_params: Any, **options: Any) -> list[dict[str, Any]]:
        """Return the prompts that the template makes of one conversation or several."""
        check("messages", messages, "a list of messages, or of such lists", isinstance(messages, Sequence))
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], [messages] if one else messages)
        params = one_each("sampling_params", self._params(sampling_params), len(conversations))
        return [
            self.render_chat(conversation, cuts=getattr(own_params, "cuts", None), **options)
            for conversation, own_params in zip(conversations, params, strict=True)
        ]

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the pooled output of each text: see `Pooling.encode`. `others`: as in `generate`.

        `pooling_task`: None is "embed".
        """
        check_arguments("LLM.encode", others)
        task = "embed" if pooling_task is None else pooling_task
        return self._pooling().encode(prompts, pooling_params, pooling_task=task)

    def embed(
        self, prompts: Any, *, use_tqdm: bool = True, pooling_params: Any = None, **others: Any
    ) -> list[EmbeddingRequestOutput]:
        """Return each text's vector. `others`: as in `generate`."""
        check_arguments("LLM.embed", others)
        return self._pooling().embed(prompts, pooling_params)

    def classify(
        self, prompts: Any, *, use_tqdm: bool = True, pooling_params: Any = None, **others: Any
    ) -> list[ClassificationRequestOutput]:
        """Return the chances of each text's classes. `others`: as in `generate`."""
        check_arguments("LLM.classify", others)
        return self._pooling().classify(prompts, pooling_params)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        *,
        use_tqdm: bool = True,
        pooling_params: Any = None,
        lora_request: Loras = None,
        chat_template: str | None = None,
        **others: Any,
    ) -> Any:
        """Score pairs of texts by a pooling model (`Pooling.score`), or completions by one that answers.

        The latter are a prompt or several, and a completion for each: texts, or token ids. Returns a
        `CompletionScore` for each, with the log-probabilities of the completion's tokens: the model's own,
        in the bits of a prompt's (docs/guides/rollouts.md says where the sampler's are the same). Prompt and
        completion together must be shorter than `max_model_len`. Raises `InputError`.
        """
        check_arguments("LLM.score", others)
        if self.pooling is not None:
            return self.pooling.score(data_1, data_2, pooling_params, chat_template)
        check("chat_template", chat_template, "None unless runner is 'pooling'", chat_template is None)
        check("pooling_params", pooling_params, "None unless runner is 'pooling'", pooling_params is None)
        generate = functools.partial(self.generate, use_tqdm=use_tqdm, lora_request=lora_request)
        return scored(data_1, data_2, self.tokenize, generate)

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
                    functools.partial(self.read_prompt, without=("continue_from",)),
                    prompt,
                    functools.partial(admit, lora_request=adapter, priority=urgency),
                ),
            )
            for i, (prompt, adapter, urgency) in enumerate(zip(many, adapters, priorities, strict=True))
        ]
        outputs: list[BeamSearchOutput] = []
        for some in itertools.batched(asked, concurrency_limit or len(asked) or 1):
            finished = self._gather(some, use_tqdm, self._beam_search_output)
            outputs += in_order(finished, [place for place, *_ in some])
        return outputs

    def _gather(
        self,
        asked: Sequence[tuple[int, str | None, list[Request]]],
        use_tqdm: bool | Callable[..., Any],
        output: ToOutput,
    ) -> Finished:
        """Queue all requests at once; prompts have their places, and their texts where they came as texts."""
        items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        every = [dataclasses.replace(r, is_read_whole=True) for *_, requests in asked for r in requests]
        handles = iter(self.engine.submit_all(every, items.put))
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
        self, group: Sequence[Handle], _prompt: str | None, beams: Sequence[Delta]
    ) -> BeamSearchOutput:
        return beam_search_output(group[0].request, beams, self.tokenizer)

    def _pooling(self) -> Pooling:
        if self.pooling is None:
            raise InputError("runner='generate' must be 'pooling' for vectors, classes and scores")
        return self.pooling

    def _params(self, params: Any) -> Any:
        if params is None:
            return self._default_params
        ok = isinstance(params, SamplingParams) or is_list(params)
        check("sampling_params", params, "a SamplingParams or a list of them", ok)
        return params
