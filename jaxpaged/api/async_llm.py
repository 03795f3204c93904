"""AsyncLLM: a model to await. Name and signatures are those of vLLM's engine for asyncio."""

import asyncio
import dataclasses
import functools
import os
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Self

import numpy as np

from jaxpaged.api import streams
from jaxpaged.api.arg_utils import EngineArgs
from jaxpaged.api.llm import LLM
from jaxpaged.api.llm_engine import ModelConfig
from jaxpaged.api.outputs import RequestOutput
from jaxpaged.api.prompts import Prompt, with_cut
from jaxpaged.checks import InputError, check
from jaxpaged.engine.handle import EngineDeadError, Handle
from jaxpaged.engine.request import Request
from jaxpaged.lora import LoRARequest
from jaxpaged.models import loading
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.vllm_names.methods import VllmClass, check_arguments, missing, not_from_config

# Text is cut into tokens at some two million characters a second: more than this in another thread.
TOKENIZED_HERE = 4_000
NUM_READERS = 4  # threads that do it
NUM_COMPILERS = 4  # threads that bring automata into the arena's form
NUM_CONTROLS = 8  # threads that wait for the engine's pauses, its sleep and new weights


@dataclasses.dataclass(frozen=True)
class Admitted:
    """Prompt that has been checked and encoded, so that nothing done with it later can fail."""

    prompt: str | None  # None where it came as token ids
    requests: Sequence[Request]  # one for each answer

    @property
    def prompt_token_ids(self) -> np.ndarray:
        return self.requests[0].prompt_token_ids


class AsyncLLM(metaclass=VllmClass):
    """A model that answers any number of coroutines of one event loop.

    Options are those of `LLM`. Raises `InputError` for a user's mistake.
    """

    max_read_s = 30.0  # to cut a long prompt into tokens, with the wait for others' before it

    def __init__(self, model: str | os.PathLike[str] = loading.SMOLLM2, **options: Any) -> None:
        self._take(LLM(model, **options))

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> Self:
        """Load the model of `AsyncEngineArgs`. vLLM's other arguments change nothing here.

        Raises `InputError`.
        """
        return cls.of(LLM.from_engine_args(engine_args))

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Return an `AsyncLLM` over a model that is loaded already, and that others may go on to use."""
        made = cls.__new__(cls)
        made._take(llm)
        return made

    def _take(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine
        self._handles: dict[str, list[Handle]] = {}
        self._readers = ThreadPoolExecutor(NUM_READERS, "jaxpaged-reader")
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "jaxpaged-grammar")
        self._controls = ThreadPoolExecutor(NUM_CONTROLS, "jaxpaged-control")

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs of a prompt as they come, by `sampling_params.output_kind`; the last is
        `finished`.

        prompt: as `LLM.generate` takes one.
        sampling_params: None for the model's own.
        request_id: the caller's; it must not be that of a request under way.
        trace_headers: they change nothing.
        others: vLLM's further arguments, such as `session_id`, which must ask for nothing that is not there.

        Leaving the iteration, or cancelling the task, aborts the request. Raises `InputError` for a request
        that could never run, `EngineDeadError` if the engine stops, `TextError` if the tokenizer fails on the
        answer's tokens.
        """
        check_arguments("AsyncLLM.generate", others)
        admitted = await self.admit(
            prompt,
            sampling_params,
            priority=priority,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        async with aclosing(self.stream([admitted], request_id)) as outputs:
            async for _, output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Give requests up: their streams end with the reason "abort", and their ids are free at once.

        Others' ids change nothing, and nor does `internal`.
        """
        for each in [request_id] if isinstance(request_id, str) else request_id:
            self.abort_now(each)

    def abort_now(self, request_id: str) -> None:
        """Give up one request, as `abort` does, from a callback."""
        self.engine.abort(self._handles.pop(request_id, []))

    async def admit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        client: Hashable = None,
    ) -> Admitted:
        """Check a prompt, and cut it into tokens; `InputError` if it could never run.

        client: who asks: the time in which constraints are compiled is shared evenly. Cancelling the task
            gives up a constraint that nobody else waits for.
        """
        params = self.llm.get_default_sampling_params() if sampling_params is None else sampling_params
        params = with_cut(params, tokenization_kwargs)
        if self.engine.door.must_read(lora_request):
            await self.add_lora(lora_request)  # in another thread
        door, grammar = self.engine.door, None
        if door.must_compile(params):
            grammars, asked = door.checked_grammars(params), params.structured_outputs
            made = await asyncio.wrap_future(grammars.ask(asked, client))
            event_loop = asyncio.get_running_loop()
            grammar = await event_loop.run_in_executor(self._compilers, grammars.take, asked, made)
        admit = functools.partial(
            self.engine.door.admit, params=params, priority=priority, lora_request=lora_request
        )
        read = functools.partial(
            self.llm.read_prompt,
            tokenization_kwargs=tokenization_kwargs,
            cuts=getattr(params, "cuts", None),
            without=(),
        )
        is_long = _is_long(prompt) or _work_of(params) > streams.CHECKED_HERE
        admitted = Admitted(*await self._read(is_long, read, prompt, admit))
        del grammar  # which was there until the request had it
        return admitted

    async def stream(
        self, prompts: Sequence[Admitted], request_id: str
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield the outputs of admitted prompts, all under one id, each with the index of its prompt; see
        `generate`.
        """
        rule = "a string that no request under way has"
        check("request_id", request_id, rule, isinstance(request_id, str) and request_id not in self._handles)
        handles = self._handles[request_id] = []
        outputs = streams.outputs(self.engine, [each.requests for each in prompts], handles.extend)
        try:
            async with aclosing(outputs):
                async for i, output in outputs:
                    yield i, dataclasses.replace(output, request_id=request_id, prompt=prompts[i].prompt)
        finally:
            if self._handles.get(request_id) is handles:  # not another's that was asked after an abort
                del self._handles[request_id]

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, cuts: str | None = None
    ) -> list[int]:
        """Return the token ids of a text, as `LLM.tokenize` does. Raises `InputError`."""
        read = functools.partial(self.llm.tokenize, text, add_special_tokens=add_special_tokens, cuts=cuts)
        return await self._read(_is_long(text), read)

    async def _read[T](self, is_long: bool, read: Callable[..., T], *args: Any) -> T:
        """Return the result of `read`; a long call runs in one of a few threads, with a time limit.

        A thread cannot be stopped: one that is late goes on to its end, which the size of what it reads
        bounds, and others wait for it. Who else needs a thread has others. Raises `InputError` if it is late.
        """
        if not is_long:
            return read(*args)
        try:
            async with asyncio.timeout(self.max_read_s):
                return await asyncio.get_running_loop().run_in_executor(self._readers, read, *args)
        except TimeoutError:
            raise InputError(
                f"the prompt was not cut into tokens within {self.max_read_s:g} s: it must be shorter, "
                "or come when there are fewer"
            ) from None

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    async def get_tokenizer(self) -> Any:
        return self.llm.tokenizer

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now: see `LLM.add_lora`."""
        return await asyncio.to_thread(self.llm.add_lora, lora_request)

    async def update_lora(self, lora_request: LoRARequest, adapter: Any) -> None:
        """Put a trained adapter in the place of one: see `LLM.update_lora`."""
        await asyncio.to_thread(self.llm.update_lora, lora_request, adapter)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter: see `LLM.remove_lora`."""
        return self.llm.remove_lora(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the ids of adapters in the host's memory."""
        return self.llm.list_loras()

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes: see `LLM.reset_prefix_cache`."""
        return await asyncio.to_thread(self.llm.reset_prefix_cache, reset_running_requests, reset_connector)

    async def reset_mm_cache(self) -> None:
        """Do nothing: see `LLM.reset_mm_cache`."""

    async def reset_encoder_cache(self) -> None:
        """Do nothing: see `LLM.reset_encoder_cache`."""

    async def do_log_stats(self) -> None:
        """Do nothing: `LLM.get_metrics` has the numbers."""

    async def is_tracing_enabled(self) -> bool:
        """Return False: there are no traces of requests."""
        return False

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the tasks of the model: see `LLM.get_supported_tasks`."""
        return self.llm.get_supported_tasks()

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests are under way."""
        return len(self._handles)

    async def start_profile(self, profile_prefix: str | None = None, **others: Any) -> None:
        """Begin a trace: see `LLM.start_profile`."""
        await self._control(self.llm.start_profile, profile_prefix, **others)

    async def stop_profile(self) -> None:
        """End the trace, and write it: see `LLM.stop_profile`."""
        await self._control(self.llm.stop_profile)

    async def start_weight_update(self) -> None:
        """Begin an update of weights: see `LLM.start_weight_update`."""
        self.llm.start_weight_update()

    async def finish_weight_update(self, weight_version: int | None = None) -> None:
        """End an update of weights: see `LLM.finish_weight_update`."""
        await self._control(self.llm.finish_weight_update, weight_version)

    async def update_weight_version(self, new_version: int) -> None:
        """Set the version of the weights: see `LLM.update_weight_version`."""
        await self._control(self.llm.update_weight_version, new_version)

    async def get_weight_version(self) -> int:
        """Return the version of the weights: see `LLM.weight_version`."""
        return self.engine.weight_version

    @property
    def weight_version(self) -> int:
        """Version of the weights: see `LLM.weight_version`."""
        return self.engine.weight_version

    async def update_weights(self, weights: Any = None, *, version: int | None = None, **others: Any) -> int:
        """Put new weights in the place of old ones: see `LLM.update_weights`."""
        return await self._control(self.llm.update_weights, weights, version=version, **others)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Pause all requests until `resume_generation`: see `LLM.pause_generation`."""
        await self._control(self.engine.pause, mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Resume paused requests: see `LLM.resume_generation`."""
        await self._control(self.engine.resume)

    async def is_paused(self) -> bool:
        """Return whether requests wait for `resume_generation`."""
        return self.engine.is_paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause generation, and give memory back: see `LLM.sleep`."""
        await self._control(self.engine.sleep, level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the engine's memory again and resume: see `LLM.wake_up`."""
        await self._control(self.engine.wake_up, tags)

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return self.engine.is_sleeping

    async def release_kv_cache_memory(self) -> None:
        """Give back the memory of K and V: see `LLM.release_kv_cache_memory`."""
        await self._control(self.engine.release_kv_cache)

    async def _control[T](self, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a call that may wait long in a thread of its own kind, which requests never use."""
        wait = functools.partial(call, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._controls, wait)

    @property
    def model_config(self) -> ModelConfig:
        """Length, vocabulary and config.json of the model: see `LLMEngine.model_config`."""
        return self.llm.model_config

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` that names a replacement for a method of vLLM's."""
        raise missing("AsyncLLM", name)

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, *args: Any, **options: Any) -> Self:
        """Raise `InputError`: there is no `VllmConfig`."""
        raise not_from_config(cls.__name__)

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has stopped, and answers no further request."""
        return self.engine.stopped is not None

    @property
    def is_running(self) -> bool:
        return self.engine.stopped is None

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped by an error."""
        return self.engine.stopped is not None and self.engine.stopped.__cause__ is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self.engine.stopped

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine answers nothing more."""
        if self.engine.stopped is not None:
            raise self.engine.stopped

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine, and end requests in flight with `EngineDeadError`; `timeout` changes nothing."""
        self.engine.close()


def _is_long(prompt: Any) -> bool:
    """Return whether to read a prompt takes so long that the event loop must not wait for it."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    ids: Any = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    has_many = hasattr(ids, "__len__") and not isinstance(ids, str) and len(ids) > streams.CHECKED_HERE
    return has_many or (isinstance(text, str) and len(text) > TOKENIZED_HERE)


def _work_of(params: Any) -> int:
    """Return about how many token ids could be checked in the time that it takes to check these options."""
    if not isinstance(params, SamplingParams):
        return 0
    ids = (params.stop_token_ids, params.allowed_token_ids, params.logit_bias)
    words = params.bad_words or ()
    return sum(len(each or ()) for each in ids) + 200 * params.n + 500 * len(words) + sum(map(len, words))
