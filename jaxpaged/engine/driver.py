"""The driver: fills rows, dispatches runs of the loop, reads their reports. For one thread only.

The only object that holds a variable: the current `EngineState`, who waits for a row, and in `Places` who has
one.
"""

import dataclasses
import functools
import heapq
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx

from jaxpaged.checks import check
from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity, machine, start
from jaxpaged.engine.adapters import Adapter, OnDevice, beside
from jaxpaged.engine.groups import Groups
from jaxpaged.engine.occupancy import Occupancy, occupancy
from jaxpaged.engine.pace import Pace
from jaxpaged.engine.places import Place, Places
from jaxpaged.engine.request import Delta, Door, Request
from jaxpaged.engine.setup import Setup
from jaxpaged.engine.start import Shapes
from jaxpaged.handover import exchange
from jaxpaged.handover.blocks import Blocks, Kind
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.layers import AdapterParam
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.lora import Arrays
from jaxpaged.models.names import Names
from jaxpaged.models.quantised import codes as quantised
from jaxpaged.parallel.calls import SendCall, SharedCalls
from jaxpaged.parallel.mesh import BY_SHARD, from_host
from jaxpaged.parallel.processes import Leader, Processes
from jaxpaged.sampling_state import LogitRules, SamplingState
from jaxpaged.status import raise_if_error
from jaxpaged.step import loop
from jaxpaged.step.config import StepConfig
from jaxpaged.step.report import Report
from jaxpaged.step.state import Beams, Counter, EngineState, FinishReason, Phase, Rows, empty_rows, without_kv

# Requests submitted in one dispatch, and tokens written in one.
SUBMIT_LINES = 8
SUBMIT_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Stats:
    """What the engine has done since it was made, and how it stands."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed in prompt tiles
    num_decode_tokens: int = 0  # computed one a row and step
    num_new_tokens: int = 0  # of answers
    num_preemptions: int = 0
    num_lookup_tokens: int = 0  # looked up in the prefix cache
    num_hit_tokens: int = 0  # found there
    num_prompt_passes: int = 0  # of the model over prompt tiles
    num_running: int = 0
    num_waiting: int = 0  # on the device or on the host, preempted ones included
    num_blocks: int = 0  # of the pool, the null block left out
    num_free_blocks: int = 0
    num_cached_blocks: int = 0  # free ones whose content can still be found


@dataclasses.dataclass(frozen=True)
class Queued:
    """A request without a row: new, or recalled from one."""

    request: Request
    answer: list[int]  # what is known of it

    @property
    def token_ids(self) -> np.ndarray:
        """The prompt's, and the answer's."""
        return np.concatenate([self.request.prompt_token_ids, np.array(self.answer, np.int32)])

    def __lt__(self, other: "Queued") -> bool:
        return self.request.order < other.request.order


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """An engine between two runs, as values of the host: what `jaxpaged.replay` writes to a file."""

    state: EngineState  # NumPy arrays; of K and V only shapes and types
    step_config: StepConfig
    vocab_size: int
    queue: tuple[Queued, ...]  # those who have no row, in their order


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was dispatched, until its report is read."""

    report: Report
    stays: np.ndarray  # of `Places`, when it was dispatched
    began: float  # when it was dispatched, by `time.perf_counter`


# The dataclasses that calls to other processes have among their arrays.
CALL_CLASSES = Rows, SamplingState, LogitRules, Beams
# The driver's calls to its devices, of host arrays, which all processes of a model make.
CALLS = SharedCalls(
    "_forget_prefixes", "_abort_arrivals", "_dispatch", "_put_adapter", "_place", "_write_piece"
)


class Driver:
    """Owns the model and the state. `turn` is one beat: dispatch the next run, read the one before."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        load_model: Callable[[LoadAs], Decoder],
        shapes: Shapes | None = None,
        adapter_names: Names | None = None,
        processes: Processes | None = None,
    ) -> None:
        self._processes = processes
        self.setup = setup = Setup(config, model_config)
        if processes is not None:  # before anything heavy
            processes.agree(setup.description())
        self.send_call: SendCall | None = None  # to other processes; all make the calls of `__init__`
        setup.check()
        self.config, self._mesh = config, setup.mesh
        size = start.known_size(setup, shapes)
        # A cache that is too small is refused before anything is loaded.
        max_len = None if size is None else capacity.served_len(setup, size)
        logging.info("attention: %s (%s)", setup.attention, setup.attention_reason)
        model = start.load(setup, load_model)
        for implementation, count in quantised.implementations(nnx.state(model)).items():
            logging.info("products with quantised weights: %s for %d of them", implementation, count)
        adapters = beside(model, adapter_names, setup)
        self._on_device = OnDevice(config.max_loras)
        self._waits_for_adapter = False  # the first in the queue, while others' are on the device
        self._graphdef, self._params = nnx.split(model)
        self._kept_run: Callable[..., tuple[EngineState, Report]] | None = None
        if size is None:
            size, self._kept_run = start.fitted(setup, model)
        if max_len is None:
            max_len = capacity.served_len(setup, size)
        logging.info("cache: %s", size)
        self.cache_size = size
        self.step_config = setup.step_config(size.num_blocks)
        self.door = Door(config, setup.model_config, max_len, size, self.step_config, adapters=adapters)
        self._groups = Groups(config, size.num_blocks)
        num_blocks, num_rows = (n * self._groups.size for n in (size.num_blocks - 1, config.num_rows))
        self.stats = Stats(num_blocks=num_blocks, num_free_blocks=num_blocks)
        self._state = start.create_state(setup, model, size.num_blocks)
        self._counters: Any = np.zeros(len(Counter), np.int32)
        self._queue: list[Queued] = []  # a heap of those without a row
        self._places = Places(num_rows)
        self.first_run: list[int] = []  # requests that the last report was the first to see run
        self._unread: Run | None = None
        self._pace = Pace()
        self._last_read = -np.inf  # when the last report was read, by `time.perf_counter`
        self._compile()
        if isinstance(processes, Leader):
            self.send_call = processes.tell

    @property
    def has_work(self) -> bool:
        return bool(self._queue) or self._unread is not None or self._places.has_any

    @property
    def _wants_a_row(self) -> bool:
        """Whether the next without a row would take one as soon as it is free."""
        if self._waits_for_adapter:
            return False
        return bool(self._queue) and self._queue[0].request.group_size == 1

    def add(self, request: Request, answer: Sequence[int] = ()) -> None:
        """Queue a request that came through the door, with what is known of its answer."""
        heapq.heappush(self._queue, Queued(request, list(answer)))

    def abort(self, request_ids: Sequence[int]) -> list[Delta]:
        """End these requests; who has no row yet ends at once, of the others the next turns tell."""
        wanted = set(request_ids)
        gone = [queued.request for queued in self._queue if queued.request.request_id in wanted]
        if gone:
            self._queue = [queued for queued in self._queue if queued.request.request_id not in wanted]
            heapq.heapify(self._queue)
        in_rows = [place for _, place in self._places.taken() if place.request.request_id in wanted]
        for place in in_rows:
            place.is_aborted = True
        self._abort_rows(in_rows)
        return [
            Delta(
                r.request_id,
                [],
                None if r.params.logprobs is None else [],
                0,
                FinishReason.ABORT,
                index=r.index,
            )
            for r in gone
        ]

    def turn(self, max_steps: int | None = None) -> list[Delta]:
        """Dispatch the next run if there is anything to run, then read the report of the one before.

        So the device has work while the host reads. `max_steps` is at most `loop.MAX_STEPS`; without it the
        run does as much as makes a short while (`Pace`).
        """
        self._recall_less_urgent()
        self._fill_rows()
        dispatched = None
        if self._places.has_any:
            began, stays = time.perf_counter(), self._places.stays
            dispatched = Run(self._run(max_steps), stays, began)
        self.first_run = []
        deltas = [] if self._unread is None else self._read(self._unread)
        self._unread = dispatched if self._places.has_any else None
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Forget what can be found of former requests; False, and nothing changes, if any is unfinished."""
        if self.has_work:
            return False
        self._forget_prefixes()
        self._groups.forget()
        return True

    def follow(self, name: str, arrays: Sequence[Any]) -> None:
        """Make a call to the devices that process 0 makes. Raises `InputError` for any other name."""
        CALLS.make(self, name, arrays)

    @CALLS.shared
    def _forget_prefixes(self) -> None:
        self._state = loop.reset_prefix_cache(self._state, mesh=self._mesh)

    @functools.cached_property
    def kind(self) -> Kind:
        """Of its blocks. The first time it reads all weights. Raises `InputError` if they do not travel."""
        return exchange.kind(self.config, self.door.model_config, self._params, self._state.kv_cache)

    def export_blocks(self, prompt: np.ndarray, cache_salt: str | None) -> Blocks:
        """The blocks that can be found of a prompt, in the host's memory. Waits for the run under way."""
        kind, chain = self.kind, self.locate(prompt, cache_salt)
        return Blocks(kind, chain.token_ids, cache_salt, exchange.on_host(self._state, chain, self._mesh))

    def locate(self, prompt: np.ndarray, cache_salt: str | None) -> exchange.Chain:
        return exchange.locate(self._state, prompt, self.door.salts.number(cache_salt), self._mesh)

    def pieces(self, chain: exchange.Chain) -> list[exchange.Piece]:
        """K and V of what `locate` has just found, on the device."""
        return list(exchange.pieces(self._state, chain, self._mesh))

    def adopt_blocks(self, blocks: Blocks) -> int:
        """Make blocks findable, all of them; how many, 0 if there is no room. Raises `InputError`."""
        self.kind.require(blocks)
        its_pieces = exchange.cut(blocks.arrays, blocks.num_blocks, self._state.kv_cache, self._mesh)
        return self.adopt(blocks.token_ids, blocks.cache_salt, its_pieces)

    def adopt(
        self, token_ids: np.ndarray, cache_salt: str | None, its_pieces: Iterator[exchange.Piece]
    ) -> int:
        room = exchange.make_room(self._state, token_ids, self.door.salts.number(cache_salt), self._mesh)
        if room is None:
            return 0
        for state in exchange.fill(self._state, room, its_pieces, self._mesh):
            self._state = state
        return len(token_ids)

    def snapshot(self) -> Snapshot:
        """Waits for the run under way, and disturbs nothing. Raises `InputError` with several groups."""
        check("data_parallel_size", self._groups.size, "1 for a snapshot", self._groups.size == 1)
        values = jax.device_get(without_kv(self._state))
        queue = tuple(sorted(self._queue))
        return Snapshot(values, self.step_config, self.door.model_config.vocab_size, queue)

    def occupancy(self) -> Occupancy:
        """Waits for the run under way, and disturbs nothing."""
        requests = {row: place.request for row, place in self._places.taken()}
        return occupancy(self._state, requests, len(self._queue))

    def _abort_rows(self, places: Sequence[Place]) -> None:
        if places:
            arrivals = np.zeros(len(self._places), np.int32)  # 0: nobody's
            arrivals[: len(places)] = [place.arrival for place in places]
            self._abort_arrivals(arrivals)

    @CALLS.shared
    def _abort_arrivals(self, arrivals: np.ndarray) -> None:
        self._state = loop.abort(self._state, arrivals, mesh=self._mesh)

    def _compile(self) -> None:
        """Compile the loop, or read it from disk; then run none of its steps, so that all is ready.

        Where a GPU fails to run the loop as one program the host turns it, unless it is not to.
        """
        began = time.perf_counter()
        loaded = self.setup, self._graphdef, self._params
        by_host = self.config.loop == "host"
        if self._kept_run is None:
            self._kept_run = start.run_of(*loaded, self._state, by_host=by_host)
        if self._processes is not None:  # none may wait in a collective while another still compiles
            self._processes.agree({"num_blocks": str(self.cache_size.num_blocks)})
        try:
            self._run_nothing()
        except jax.errors.JaxRuntimeError as error:
            if self.config.loop != "auto" or not machine.may_fail_to_launch(error):
                raise
            logging.warning("this device does not run the serving loop as one program: %s", error)
            by_host = True
            del self._state  # it was donated, and two would not fit
            model = nnx.merge(self._graphdef, self._params)
            size = self.cache_size.num_blocks
            self._state = start.create_state(self.setup, model, size)
            self._kept_run = start.run_of(*loaded, self._state, by_host=True)
            self._run_nothing()
        who = "the host, a step at a time" if by_host else "the device"
        logging.info("compiled in %.1f s; the loop is turned by %s", time.perf_counter() - began, who)

    def _run_nothing(self) -> None:
        if self.door.adapters is not None:
            self._put_adapter(self.door.adapters.nothing, 1)
        self._submit([])
        self._abort_arrivals(np.zeros(len(self._places), np.int32))
        scores = loop.recent_scores(self._state, mesh=self._mesh)
        jax.block_until_ready((self._run(max_steps=0), scores))

    def _run(self, max_steps: int | None = None) -> Report:
        pace = self._pace
        limits = loop.limits(pace.max_steps, pace.max_passes) if max_steps is None else loop.limits(max_steps)
        return self._dispatch(limits, self._wants_a_row, self._places.wants_scores)

    @CALLS.shared
    def _dispatch(self, limits: np.ndarray, wants_a_row: bool, wants_scores: bool) -> Report:
        arrays = self._params, self._state, limits, np.bool_(wants_a_row)
        if self._kept_run is not None:
            self._state, report = self._kept_run(*arrays)
        else:
            config, mesh = self.step_config, self._mesh
            self._state, report = loop.run(self._graphdef, *arrays, config=config, mesh=mesh)
        if wants_scores:
            report = dataclasses.replace(report, new_scores=loop.recent_scores(self._state, mesh=self._mesh))
        return report

    def _recall_less_urgent(self) -> None:
        """Take back who waits in a row, new or preempted, if someone more urgent has none and could have one.

        In the run whose report is unread it may have gone on to run: then it does so again, to the same
        answer.
        """
        if not self._queue:
            return
        waiting = sorted(self._places.waiting(), reverse=True)
        if not waiting:
            return
        if self._queue[0].request.order > waiting[0][0]:
            return  # always so where the first to come is the first served
        num_free = len(self._places.free_rows)
        urgent = itertools.islice(self._placeable({row for _, row in waiting}), num_free, None)
        pairs = zip(waiting, urgent, strict=False)
        self._recall([row for (order, row), queued in pairs if queued.request.order < order])

    def _placeable(self, giving_way: Collection[int]) -> Iterator[Queued]:
        """Tell who would get a row next, in order, were there enough rows and did these give way: not who has
        to wait for room for an adapter.
        """
        staying = {place.request.adapter for row, place in self._places.taken() if row not in giving_way}
        waits_for_adapter = False
        for queued in sorted(self._queue):
            adapter = queued.request.adapter
            if adapter is not None:
                waits_for_adapter |= not self._on_device.has_room(adapter, staying)
            if adapter is None or not waits_for_adapter:
                yield queued

    def _recall(self, rows: Sequence[int]) -> None:
        """Take back the requests in these rows, with what has been told of their answers."""
        recalled = []
        for row in rows:
            place = self._places[row]
            assert place is not None
            recalled.append(place)
            self._places.leave(row)
        self._abort_rows(recalled)
        for place in recalled:
            self.add(place.request, place.answer)

    def _fill_rows(self) -> None:
        """Give rows to the first in the queue; to those of a group all at once, when there are so many.

        Who waits for room for an adapter is overtaken by those that have none, and by nobody else.
        """
        if not self._queue:
            self._waits_for_adapter = False
            return
        free_rows = self._groups.split(self._places.free_rows)
        placed: list[tuple[int, int, Queued]] = []
        in_use = {place.request.adapter for _, place in self._places.taken()}
        wait: list[Queued] = []
        while self._queue and self._queue[0].request.group_size <= max(map(len, free_rows)):
            adapter = self._queue[0].request.adapter
            if adapter is not None and not self._has_room_for(adapter, in_use):
                wait = [queued for queued in self._queue if queued.request.adapter is not None]
                self._queue = [queued for queued in self._queue if queued.request.adapter is None]
                heapq.heapify(self._queue)
                continue
            in_use.add(adapter)
            first = self._queue[0]
            its_rows = free_rows[self._groups.choose(first.request, first.token_ids, free_rows)]
            head = its_rows[0]
            for _ in range(first.request.group_size):
                placed.append((its_rows.pop(0), head, heapq.heappop(self._queue)))
        self._waits_for_adapter = bool(wait)
        if wait:
            self._queue += wait
            heapq.heapify(self._queue)
        for batch in itertools.batched(placed, SUBMIT_LINES):
            self._submit(batch)

    def _has_room_for(self, adapter: Adapter, in_use: Collection[Adapter | None]) -> bool:
        """Whether an adapter is on the device, or is now: no request with one that had its room has a row."""
        number, is_new = self._on_device.find(adapter, in_use)
        if number is not None and is_new:
            self._put_adapter(adapter.arrays, number)
        return number is not None

    @CALLS.shared
    def _put_adapter(self, arrays: Arrays, number: int) -> None:
        if self._mesh is not None:
            arrays = from_host(self._mesh, BY_SHARD, arrays)
        adapters, weights = nnx.split_state(self._params, AdapterParam, ...)
        place = np.int32(number - 1)
        written = loop.put_adapter(self._graphdef, adapters, weights, arrays, place, mesh=self._mesh)
        self._params = nnx.merge_state(weights, written)

    def _submit(self, batch: Sequence[tuple[int, int, Queued]]) -> None:
        """Put requests, each with its row and the first one of its group, into the state."""
        sizes = SUBMIT_LINES, 0, self.door.model_config.vocab_size
        requests = empty_rows(*sizes, lora=self.config.enable_lora)
        rows = np.full(SUBMIT_LINES, len(self._places), np.int32)  # beyond all: none
        tokens = [np.zeros((3, 0), np.int32)]  # each with its row and its position
        for line, (row, head, queued) in enumerate(batch):
            token_ids = queued.token_ids
            positions = np.arange(len(token_ids), dtype=np.int32)
            tokens.append(np.stack([np.full_like(token_ids, row), positions, token_ids]))
            rows[line] = row
            self._places.take(row, queued.request, queued.answer)
            np.asarray(requests.beams.head)[line] = head % self.config.num_rows  # by its group's numbers
            if requests.lora is not None:
                np.asarray(requests.lora)[line] = self._on_device.number_of(queued.request.adapter)
            self.door.write(requests, line, queued.request, len(token_ids))
        self._write_tokens(np.concatenate(tokens, axis=1))
        self._place(requests, self._groups.local(rows))

    @CALLS.shared
    def _place(self, requests: Rows, rows: np.ndarray) -> None:
        self._state = loop.submit(self._state, requests, rows, mesh=self._mesh)

    def _write_tokens(self, tokens: np.ndarray) -> None:
        """Write tokens, each under its row and position, in pieces of one size: nothing is compiled anew."""
        for first in range(0, max(tokens.shape[1], 1), SUBMIT_TOKENS):
            piece = tokens[:, first : first + SUBMIT_TOKENS]
            padding = ((0, 0), (0, SUBMIT_TOKENS - piece.shape[1]))
            piece = np.pad(piece, padding, constant_values=len(self._places))  # beyond all rows: none
            self._write_piece(self._groups.with_rows(piece))

    @CALLS.shared
    def _write_piece(self, piece: np.ndarray) -> None:
        rows = self._state.rows
        token_ids = loop.write_tokens(rows.token_ids, piece, mesh=self._mesh)
        self._state = dataclasses.replace(self._state, rows=dataclasses.replace(rows, token_ids=token_ids))

    def _read(self, run: Run) -> list[Delta]:
        report = self._groups.merged(jax.device_get(dataclasses.replace(run.report, prompt_scores=None)))
        raise_if_error(int(report.status))
        prompts = None
        if self._places.wants_prompt_scores:
            prompts = self._groups.merged_prompts(jax.device_get(run.report.prompt_scores))
        deltas, self.first_run = self._places.read(report, prompts, run.stays)
        self._note(report, run.began)
        return deltas

    def _note(self, report: Report, dispatched: float) -> None:
        """Bring the statistics up to date, and what is known of how long steps take."""
        by_group = (report.counters - self._counters).reshape(-1, len(Counter))
        done = dict(zip(Counter, by_group.sum(0).tolist(), strict=True))
        self._counters = report.counters
        # The device began with it when it had done what was dispatched before, or at once if it was idle.
        now, began = time.perf_counter(), max(dispatched, self._last_read)
        most = by_group.max(0).tolist()
        self._pace.note(most[Counter.NUM_STEPS], most[Counter.NUM_PROMPT_PASSES], now - began)
        self._last_read = now
        num_running = int(np.count_nonzero(report.phase == Phase.RUNNING))
        self.stats = dataclasses.replace(
            self.stats,
            **{c.name.lower(): getattr(self.stats, c.name.lower()) + more for c, more in done.items()},
            num_running=num_running,
            num_waiting=len(self._queue) + self._places.num_waiting,
            num_free_blocks=int(report.num_free_blocks),
            num_cached_blocks=int(report.num_cached_blocks),
        )
