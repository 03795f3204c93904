"""Service that all routes share: the model, its queue, and what ends a request early."""

import asyncio
import dataclasses
import hashlib
import itertools
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request

from jaxpaged.api.async_llm import Admitted, AsyncLLM
from jaxpaged.api.outputs import CompletionOutput, RequestOutput
from jaxpaged.api.prompts import Prompt
from jaxpaged.checks import check_salt, shown
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.engine.texts import TextError
from jaxpaged.lora import LoRARequest
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serve.chat_prompts import ChatPrompts
from jaxpaged.serve.metrics import Metrics, Times
from jaxpaged.serve.opening import Opening, Openings
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.pins import PinCollector, Pins, Span, num_keepable
from jaxpaged.serve.replies import ApiError, EventStream, event, unless_gone
from jaxpaged.serve.schemas import QueuedRequest
from jaxpaged.serve.turns import TurnCollector, Turns
from jaxpaged.serve.versions import VersionSpans
from jaxpaged.step import channels

log = logging.getLogger("jaxpaged.serve")
ADAPTER_IDS = itertools.count(1)


class Service:
    """For one event loop."""

    def __init__(self, llm: AsyncLLM, model_name: str, options: ServerOptions) -> None:
        self.llm, self.options = llm, options
        self.model_names = options.served_model_names or (model_name,)
        self.root = model_name
        self.created = int(time.time())
        self.adapters: dict[str, LoRARequest] = {}  # by the names by which they are asked for
        for module in options.lora_modules:
            name, _, path = module.partition("=")
            self.adapters[name] = LoRARequest(name, self._unused_id(), path)
            llm.llm.add_lora(self.adapters[name])
        self.defaults = llm.llm.get_default_sampling_params()
        self.max_model_len = llm.engine.door.max_model_len
        self.chat_prompts = ChatPrompts(llm, options)
        self.metrics = Metrics(self.model_names[0], llm.engine)
        max_tokens, block_size = num_keepable(llm.engine), llm.engine.config.block_size
        if options.max_pinned_tokens is not None:
            max_tokens = min(max_tokens, options.max_pinned_tokens)
        self.pins, self.turns = Pins(max_tokens, block_size), Turns()
        self._pinned_version = llm.weight_version
        labels = self.model_names[0], "0"
        for collector in (PinCollector(self.pins, labels), TurnCollector(self.turns, labels)):
            self.metrics.registry.register(collector)
        self.open_runs: set[Run] = set()
        self.is_stopping = asyncio.Event()
        self.num_open = 0  # answers that have been asked for and have not ended
        self._openings = Openings(options.max_queue)
        self._numbers = itertools.count(1)

    def check_model(self, name: str | None) -> str:
        """Return the model's name to answer with. Raises `ApiError` for a model that is not here."""
        if name and name not in (*self.model_names, *self.adapters):
            raise ApiError(404, f"the model {shown(name)} does not exist", param="model")
        return name or self.model_names[0]

    async def load_adapter(self, name: str, path: str, *, anew: bool = False) -> None:
        """Let clients ask for an adapter by its name. Raises `InputError`, or `ApiError` for a taken name.

        anew: read one that is loaded once more, perhaps from elsewhere.
        """
        if anew and (known := self.adapters.get(name)) is not None:
            request = LoRARequest(name, known.lora_int_id, path, load_inplace=True)
            await self.llm.add_lora(request)
            if name in self.adapters:
                self.adapters[name] = request
            else:  # unloaded meanwhile
                await self.llm.remove_lora(request.lora_int_id)
            return
        self._check_is_free(name)
        request = LoRARequest(name, self._unused_id(), path)
        await self.llm.add_lora(request)
        try:
            self._check_is_free(name)  # another client may have been faster
        except ApiError:
            await self.llm.remove_lora(request.lora_int_id)
            raise
        self.adapters[name] = request

    def _unused_id(self) -> int:
        """Return an adapter id that was never used: two adapters may be loading at a time, and callers give
        ids too.
        """
        return next(i for i in ADAPTER_IDS if i not in self.llm.llm.list_loras())

    def _check_is_free(self, name: str) -> None:
        if name in (*self.model_names, *self.adapters):
            raise ApiError(
                400, f"lora_name={shown(name)} must be a name that is not in use", param="lora_name"
            )

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter.

        New requests cannot name it; those under way are answered to their end. Raises `ApiError`.
        """
        if name not in self.adapters:
            raise ApiError(404, f"the adapter {shown(name)} does not exist", param="lora_name")
        await self.llm.remove_lora(self.adapters.pop(name).lora_int_id)

    async def start(
        self,
        request: Request,
        body: QueuedRequest,
        prefix: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        spans: Sequence[Span] = (),
    ) -> "Run":
        """Check prompts and take them in; `body.model` may be an adapter's name.

        spans: beginnings of the prompts for the tiers to keep, beside what `body.kv_cache_ttl` asks for.

        Raises `InputError`, or `ApiError` where there is no room.
        """
        num_answers = len(prompts) * params.n
        self.check_num_answers(num_answers)
        if self.llm.engine.stopped is not None:
            raise dead(self.llm.engine.stopped)
        self._check_room(num_answers)
        client = self._client(request)
        opening = Opening(client, compiles=self.llm.engine.door.must_compile(params))
        if opening.compiles:
            self._openings.check(client)
        adapter = self.adapters.get(self.check_model(body.model))
        its_salt = self._salt(request, body.cache_salt)
        salt = {} if its_salt is None else {"cache_salt": its_salt}
        admitted, pinned = list[Admitted](), list[Span]()

        async def admit_all() -> None:
            for each in prompts:
                prompt, order = _mapping(each) | salt | {"kv_cache_ttl": body.kv_cache_ttl}, body.priority
                admit = self.llm.admit(prompt, params, priority=order, lora_request=adapter, client=client)
                admitted.append(await self._pinned(client, await admit, spans, pinned))
                await asyncio.sleep(0)  # others need not wait until all of many prompts are read

        began = time.monotonic()
        self.num_open += num_answers
        try:
            await self._openings.wait(request, opening, admit_all(), self.options.request_timeout_s)
        finally:
            self.num_open -= num_answers
        response_id = f"{prefix}-{request.state.request_id}"
        run = Run(self, response_id, f"{response_id}-{next(self._numbers)}", admitted, params)
        run.route, run.pinned = request.url.path, pinned
        run.times.arrived = request.state.began
        run.open(time.monotonic() - began)
        return run

    async def _pinned(
        self, client: Hashable, admitted: Admitted, spans: Sequence[Span], pinned: list[Span]
    ) -> Admitted:
        """Return a prompt whose blocks are kept as far as there is room, and add what is to `pinned`."""
        asked = [*spans, *(Span(*span) for span in admitted.requests[0].kv_cache_ttl or ())]
        if not asked:
            return admitted
        keys = await asyncio.to_thread(self.pins.keys_of, admitted, asked)
        if self.llm.weight_version != self._pinned_version:  # tiers have nothing of older weights
            self.pins.clear()
            self._pinned_version = self.llm.weight_version
        admitted, granted = self.pins.pin(client, admitted, asked, keys)
        pinned += granted
        return admitted

    def _client(self, request: Request) -> Hashable:
        """Return the client of a request: its API key if there are several, else its address."""
        if len(self.options.api_keys) > 1:
            return request.state.key
        return None if request.client is None else request.client.host

    @property
    def max_open(self) -> int:
        """Number of answers that may run and wait."""
        config = self.llm.engine.config
        return config.max_num_seqs * config.data_parallel_size + self.options.max_queue

    def check_num_answers(self, num_answers: int) -> None:
        """Check that one request asks for no more than there is ever room for. Raises `ApiError`."""
        max_answers = self.max_open
        if num_answers > max_answers:
            message = f"the request asks for {num_answers} answers, must ask for at most {max_answers}"
            raise ApiError(400, message, param="n")

    def scope(self, request: Request, cache_salt: str | None) -> str:
        """Return within which bounds requests know each other's sessions: a client, and a salt.

        Raises `InputError` for a salt that is none.
        """
        return repr((self._client(request), self._salt(request, cache_salt)))

    def _salt(self, request: Request, given: str | None) -> str | None:
        """Return the salt of the prefix cache for a request; with several API keys, each key has its own
        salts.

        Raises `InputError` for a salt that is none.
        """
        check_salt("cache_salt", given)
        if len(self.options.api_keys) < 2:
            return given
        key = hashlib.sha256(f"{request.state.key}={given or ''}".encode("utf-8", "surrogatepass"))
        return f"key {request.state.key}: {key.hexdigest()}"

    def _check_room(self, num_answers: int) -> None:
        max_answers = self.max_open
        if self.num_open + num_answers > max_answers:
            message = (
                f"{self.num_open} answers are open, and with {num_answers} more there would be over "
                f"{max_answers}"
            )
            self.metrics.refused.inc()
            raise ApiError(429, message, headers={"retry-after": "1"})

    def give_up(self, error: ApiError) -> None:
        """End all that runs, or waits to be taken in, with this error."""
        self._openings.give_up(error)
        for run in [*self.open_runs]:
            run.give_up(error)

    def stream(
        self,
        run: "Run",
        events: AsyncGenerator[bytes],
        error_event: Callable[[ApiError], bytes] = lambda error: event(error.body),
    ) -> EventStream:
        """Return the response that streams a run's events; `error_event` tells an error of the server's."""
        slow = ApiError(408, f"over {self.options.max_unread_bytes} bytes of the stream were not read")
        return EventStream(
            _to_the_end(events, error_event),
            max_unread_bytes=self.options.max_unread_bytes,
            slow=lambda: run.give_up(slow, "slow_reader"),
            closed=run.close,
        )

    async def whole(self, request: Request, run: "Run") -> list["Choice"]:
        """Return all answers of a run in their order.

        The run is aborted when the client closes the connection.
        """
        try:
            return await unless_gone(request, _choices(run))
        finally:
            run.close()


class Run:
    """One HTTP request's answers, from the queue to the last token; asked for their outputs once."""

    def __init__(
        self,
        service: Service,
        response_id: str,
        engine_id: str,
        prompts: Sequence[Admitted],
        params: SamplingParams,
    ) -> None:
        self.id, self._engine_id = response_id, engine_id
        self.prompts, self.params = prompts, params
        self.created = int(time.time())
        self.route = ""
        self.pinned: list[Span] = []  # beginnings of its prompts that the tiers keep
        self.log_fields: dict[str, Any] = {}  # further fields of its line in the log
        self.times = Times(time.time(), len(prompts) * params.n)
        self.num_cached_tokens = 0
        self.num_prompt_tokens = sum(len(each.prompt_token_ids) for each in prompts)
        self.num_completion_tokens = 0
        self.versions: defaultdict[int, VersionSpans] = defaultdict(VersionSpans)  # by choice
        # Values of channels that servers give, likewise: those of consecutive outputs.
        self.channels: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._service = service
        self._error: ApiError | None = None
        self._why: str | None = None
        self._reasons: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def open(self, waited_s: float = 0.0) -> None:
        """Count the run as open until `choices` ends. Its request has waited so long before."""
        service, limit_s = self._service, self._service.options.request_timeout_s
        service.open_runs.add(self)
        service.num_open += len(self.prompts) * self.params.n
        late = ApiError(504, f"the answer was not complete within {limit_s:g} s")
        left_s = max(limit_s - waited_s, 0.0)
        self._timer = asyncio.get_running_loop().call_later(left_s, self.give_up, late, "timeout")

    def give_up(self, error: ApiError, why: str = "shutdown") -> None:
        """End with this error as soon as the engine has let go."""
        if self._error is None:
            self._error, self._why = error, why
            self._service.llm.abort_now(self._engine_id)

    async def choices(self) -> AsyncGenerator["Choice"]:
        """Yield the new part of each choice as it comes. Raises `ApiError`.

        Answer j of prompt i is choice i * n + j.
        """
        metrics = self._service.metrics
        try:
            stream = self._service.llm.stream(self.prompts, self._engine_id)
            async with aclosing(stream):
                async for i, output in stream:
                    [answer] = output.outputs
                    self.num_completion_tokens += len(answer.token_ids)
                    self.num_cached_tokens += metrics.note(self.times, i, output, answer)
                    if answer.finish_reason:
                        self._reasons[answer.finish_reason] += 1
                        metrics.note_end(self.times, i, output, answer, self.params)
                    if self._error is not None:
                        raise self._error
                    index = i * self.params.n + answer.index
                    self.versions[index].add(answer.weight_versions or ())
                    if values := channels.for_servers(answer):
                        self.channels[index].append(values)
                    yield Choice.of(index, output, answer)
        except EngineDeadError as error:
            self._why = "engine_dead"
            raise dead(error) from error
        except TextError as error:
            self._why = "text"
            raise ApiError(500, str(error)) from error
        finally:
            self.close()

    @property
    def num_written_tokens(self) -> int:
        """Tokens of the prompt whose blocks the prefix cache did not have, and has now."""
        config = self._service.llm.engine.config
        whole = self.num_prompt_tokens // config.block_size * config.block_size
        return max(0, whole - self.num_cached_tokens) if config.enable_prefix_caching else 0

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "completion_tokens": self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def close(self) -> None:
        """Make room for others, and log what became of it; may be called again."""
        service = self._service
        if self not in service.open_runs:
            return
        service.open_runs.remove(self)
        service.num_open -= len(self.prompts) * self.params.n
        if self._timer is not None:
            self._timer.cancel()
        num_gone = len(self.prompts) * self.params.n - sum(self._reasons.values())
        if num_gone:
            service.metrics.note_gone(num_gone)
            self._reasons["abort"] += num_gone
        self._log(self._why or ("disconnect" if num_gone else None))

    def _log(self, why: str | None) -> None:
        """Log a line about the request: a JSON object, for programs to read."""
        if not log.isEnabledFor(logging.INFO):
            return
        times, now = self.times, time.time()
        line = {
            "id": self.id,
            "route": self.route,
            "answers": self.times.num_answers,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "completion_tokens": self.num_completion_tokens,
            "queue_s": _seconds(times.scheduled, times.arrived),
            "ttft_s": _seconds(times.first_token, times.arrived),
            "e2e_s": _seconds(now, times.arrived),
            "finished": dict(self._reasons),
            "given_up": why,
            **self.log_fields,
        }
        log.info("request", extra={"fields": line})


async def _to_the_end(
    events: AsyncGenerator[bytes], error_event: Callable[[ApiError], bytes]
) -> AsyncGenerator[bytes]:
    """Yield the events; an error of the server's own is the last of them, not a connection that breaks."""
    try:
        async with aclosing(events):
            async for each in events:
                yield each
    except Exception as error:
        log.exception("a stream ends by an error")
        yield error_event(ApiError(500, f"{type(error).__name__}: the server's log says more"))


def dead(error: EngineDeadError) -> ApiError:
    return ApiError(500, f"the engine answers nothing more: {error}")


def _mapping(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": prompt}


def _seconds(end: float | None, start: float) -> float | None:
    return None if end is None else round(end - start, 4)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@dataclasses.dataclass
class Choice:
    """Answer of a request, or what is new of one."""

    index: int
    texts: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell: its tokens are part of a character that is not whole yet."""
        return not (self.text or self.logprobs or self.finish_reason)

    @classmethod
    def of(cls, index: int, output: RequestOutput, answer: CompletionOutput) -> "Choice":
        """Return the choice that one output of the engine brings."""
        return cls(
            index,
            [answer.text],
            [*answer.token_ids],
            answer.logprobs or [],
            output.prompt_logprobs,
            answer.finish_reason,
            answer.stop_reason,
        )

    def add(self, new: "Choice") -> None:
        """Append what is new of this choice."""
        self.texts += new.texts
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs
        self.prompt_logprobs = self.prompt_logprobs or new.prompt_logprobs
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason


async def _choices(run: Run) -> list[Choice]:
    """Return all choices of a run in their order."""
    choices = [Choice(i) for i in range(run.times.num_answers)]
    async with aclosing(run.choices()) as news:
        async for new in news:
            choices[new.index].add(new)
    return choices
