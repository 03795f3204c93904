"""The driver: fills rows, dispatches runs of the loop, reads their reports. For one thread only.

It is the only object that holds variables: the current `EngineState`, the requests that wait for a row, and
in `HostRows` those that have one.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx

from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity, drafted, machine, start
from jaxpaged.engine.adapters import beside
from jaxpaged.engine.arena_writer import ArenaWriter
from jaxpaged.engine.candidates import candidates_of
from jaxpaged.engine.continued import with_replayed
from jaxpaged.engine.door import Door, filled
from jaxpaged.engine.drafted import Draft, shapes_beside
from jaxpaged.engine.driver_calls import CALLS
from jaxpaged.engine.events import Events
from jaxpaged.engine.host_rows import HostRow, HostRows
from jaxpaged.engine.occupancy import Occupancy, occupancy
from jaxpaged.engine.offloading import Offloading
from jaxpaged.engine.pace import Pace
from jaxpaged.engine.replicas import Replicas
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.request_queue import Queued, RequestQueue
from jaxpaged.engine.rooms import WRITTEN_BLOCKS, InUse, Rooms
from jaxpaged.engine.routed import RoutedReader
from jaxpaged.engine.setup import Setup
from jaxpaged.engine.snapshot import Snapshot, check_snapshot
from jaxpaged.engine.start import Shapes
from jaxpaged.engine.stats import Stats
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.layers import AdapterParam
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.lora import Arrays
from jaxpaged.models.names import Names
from jaxpaged.models.quantised import codes as quantised
from jaxpaged.parallel.calls import SendCall
from jaxpaged.parallel.mesh import BY_SHARD, from_host
from jaxpaged.parallel.processes import Leader, Processes
from jaxpaged.status import raise_if_error
from jaxpaged.step import loop, recent
from jaxpaged.step.automata import BLOCK_WORDS
from jaxpaged.step.report import Report
from jaxpaged.step.state import Counter, EngineState, Rows, empty_rows, without_kv

# Requests submitted in one dispatch, and tokens written in one.
SUBMIT_LINES = 8
SUBMIT_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was dispatched and whose report is unread."""

    report: Report
    stays: np.ndarray  # `HostRows.stays` when it was dispatched
    began: float  # when it was dispatched, by `time.perf_counter`


class Driver(Offloading, ArenaWriter, RoutedReader):
    """The owner of model and state. One `turn` dispatches the next run and reads the one before."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        load_model: Callable[[LoadAs], Decoder],
        shapes: Shapes | None = None,
        adapter_names: Names | None = None,
        processes: Processes | None = None,
        draft: Draft | None = None,
    ) -> None:
        self._processes = processes
        of_draft = () if draft is None else (draft.config, draft.cost)
        self.setup = setup = Setup(config, model_config, *of_draft)
        load_model, shapes = drafted.beside(draft, setup, load_model), shapes_beside(draft, setup, shapes)
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
        self._load_model, self._names, self._draft = load_model, adapter_names, draft
        for implementation, count in quantised.implementations(nnx.state(model)).items():
            logging.info("products with quantised weights: %s for %d of them", implementation, count)
        adapters = beside(model, adapter_names, setup)
        self._rooms = Rooms(config, self._put_adapter, self.write_automaton)
        self.graphdef, self.params = nnx.split(model)
        self.kept_run: Callable[..., tuple[EngineState, Report]] | None = None
        if size is None:
            size, self.kept_run = start.fitted(setup, model)
        if max_len is None:
            max_len = capacity.served_len(setup, size)
        logging.info("cache: %s", size)
        self.cache_size = size
        self.step_config = setup.step_config(size.num_blocks)
        self.door = Door(config, setup.model_config, max_len, size, self.step_config, adapters=adapters)
        self._replicas = Replicas(config, size.num_blocks)
        num_blocks, num_rows = (n * self._replicas.size for n in (size.num_blocks - 1, config.num_rows))
        self.stats = Stats(num_blocks=num_blocks, num_free_blocks=num_blocks)
        self._state = start.create_state(setup, model, size.num_blocks)
        self._counters: Any = np.zeros(len(Counter) + config.most_drafts, np.int32)
        self.queue = RequestQueue()
        self.rows = HostRows(num_rows)
        # What submitted requests are filled into, a line each.
        sizes = SUBMIT_LINES, 0, setup.model_config.vocab_size
        more = {"lora": config.enable_lora, "grammars": config.arena_words > 0}
        more["replays"] = config.enable_trace_replay
        drafts, most = config.most_drafts, config.max_prompt_logprob_token_ids
        self._empty_lines = empty_rows(*sizes, **more, most_drafts=drafts, candidates=most)
        self.first_run: list[int] = []  # requests that the last report was the first to see run
        self._unread: Run | None = None
        self.pace = Pace()
        self._last_read = -np.inf  # when the last report was read, by `time.perf_counter`
        self.compile()
        if config.kv_events_config is not None:
            its = self.step_config.grouping.specs, self._state, self._replicas.follow
            self.events = Events(config, *its, self.look, self._mesh)
        self.open_tiers()
        if isinstance(processes, Leader):
            self.send_call = processes.tell

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self.queue) or self._unread is not None or self.rows.has_any or self.moves_blocks

    @property
    def state(self) -> EngineState:
        """State after all runs that were dispatched: arrays on the device, valid until the next turn."""
        return self._state

    @property
    def counters(self) -> np.ndarray:
        """`EngineState.counters` as last reported: int32 [counters], or [replicas, counters]."""
        return np.asarray(self._counters)

    def add(self, request: Request, answer: Sequence[int] | None = None) -> None:
        """Queue a request that came through the door, with what is known of its answer."""
        known = request.continues if answer is None else answer
        if not self.arrives(request, known):
            self.queue.add(request, known)

    def abort(self, request_ids: Sequence[int]) -> list[Delta]:
        """End these requests. Return the last deltas of those without a row; the others' come with turns."""
        wanted = set(request_ids)
        gone = self.queue.remove(wanted) + self.drop_arrivals(wanted)
        in_rows = [entry for _, entry in self.rows.taken() if entry.request.request_id in wanted]
        for entry in in_rows:
            entry.is_aborted = True
        self._abort_rows(in_rows)
        return self.keep([Delta.aborted(request) for request in gone])

    def turn(self, max_steps: int | None = None) -> list[Delta]:
        """Dispatch the next run if there is anything to run, then read the report of the run before.

        So the device has work while the host reads. `max_steps` is at most `loop.MAX_STEPS`; None lets `Pace`
        choose.
        """
        self.first_run = []
        # Before others take the blocks of a prompt; and where rows rest until the host has read their tokens.
        deltas = self.settle() if self.must_keep or self.rows.has_followed else []
        self.move_blocks(is_idle=not (self.queue or self.rows.has_any or self._unread))
        self._recall_less_urgent()
        self.fill_rows()
        self.write_masks()
        dispatched = None
        if self.rows.has_any:
            began, stays = time.perf_counter(), self.rows.stays
            dispatched = Run(self._run(max_steps), stays, began)
        deltas += [] if self._unread is None else self._read(self._unread)
        self._unread = dispatched if self.rows.has_any else None
        if self.events is not None and dispatched is not None and self._unread is None:
            self.events.read()  # nobody ran in it
        return deltas

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. If any request is unfinished, change nothing and return False."""
        self.finish_departures()
        if self.has_work:
            return False
        self.forget_tiers()
        self._forget_prefixes()
        return True

    def follow(self, name: str, arrays: Sequence[Any]) -> None:
        """Make a call that process 0 makes to its devices. Raises `InputError` for any other name."""
        CALLS.make(self, name, arrays)

    @CALLS.shared
    def _forget_prefixes(self) -> None:
        self._state = loop.reset_prefix_cache(self._state, mesh=self._mesh)
        self._replicas.forget()
        if self.events is not None:
            self.events.forget(self._state)

    def close(self) -> None:
        """Finish what tiers are to keep, and close what the engine talks by."""
        self.close_tiers()
        if self.events is not None:
            self.events.close()

    def snapshot(self) -> Snapshot:
        """Copy the state of this engine to the host, and change nothing. Waits for the run under way.

        Raises `InputError` with several replicas, and with what a snapshot lacks: drafts, structured outputs.
        """
        check_snapshot(self.config)
        values = jax.device_get(without_kv(self._state))
        queue = tuple(self.queue)
        return Snapshot(values, self.step_config, self.door.model_config.vocab_size, queue)

    def occupancy(self) -> Occupancy:
        """Return which request holds which blocks, and change nothing. Waits for the run under way."""
        requests = {row: entry.request for row, entry in self.rows.taken()}
        return occupancy(self._state, requests, len(self.queue))

    def _abort_rows(self, entries: Sequence[HostRow]) -> None:
        if entries:
            arrivals = np.zeros(len(self.rows), np.int32)  # 0: no request
            arrivals[: len(entries)] = [entry.arrival for entry in entries]
            self._abort_arrivals(arrivals)

    @CALLS.shared
    def _abort_arrivals(self, arrivals: np.ndarray) -> None:
        self._state = loop.abort(self._state, arrivals, mesh=self._mesh)

    def compile(self) -> None:
        """Compile the loop, or read it from disk, and run none of its steps, so that all is ready.

        Where a GPU fails to run the loop as one program, the host launches each step, if the options allow
        it.
        """
        began = time.perf_counter()
        loaded = self.setup, self.graphdef, self.params
        by_host = self.config.loop == "host"
        if self.kept_run is None:
            self.kept_run = start.run_of(*loaded, self._state, by_host=by_host)
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
            model = nnx.merge(self.graphdef, self.params)
            size = self.cache_size.num_blocks
            self._state = start.create_state(self.setup, model, size)
            self.kept_run = start.run_of(*loaded, self._state, by_host=True)
            self._run_nothing()
        place = "the host, a step at a time" if by_host else "the device"
        logging.info("compiled in %.1f s; the loop runs on %s", time.perf_counter() - began, place)

    def _run_nothing(self) -> None:
        if self.door.adapters is not None:
            self._put_adapter(self.door.adapters.nothing, 1)
        if self.config.arena_words:
            self.write_automaton(np.zeros((WRITTEN_BLOCKS, BLOCK_WORDS), np.uint32), 0, 0)
            self.send_masks([])
        self._submit([])
        self._abort_arrivals(np.zeros(len(self.rows), np.int32))
        if self._state.routed is not None:
            self.routed_of(0)
        scores = recent.scores(self._state, mesh=self._mesh)
        jax.block_until_ready((self._run(max_steps=0), scores))

    def _run(self, max_steps: int | None = None) -> Report:
        if max_steps is None:
            pace = self.pace
            most = pace.max_steps_while_nobody_reads if self.rows.are_read_whole else pace.max_steps
            if self.rows.has_followed or self.is_fetching:
                most = pace.max_steps_while_others_wait
            limits = loop.limits(most, pace.max_passes)
        else:
            limits = loop.limits(max_steps)
        return self._dispatch(limits, self.queue.wants_a_row, self.rows.wants_scores)

    @CALLS.shared
    def _dispatch(self, limits: np.ndarray, wants_a_row: bool, wants_scores: bool) -> Report:
        arrays = self.params, self._state, limits, np.bool_(wants_a_row)
        if self.kept_run is not None:
            self._state, report = self.kept_run(*arrays)
        else:
            config, mesh = self.step_config, self._mesh
            self._state, report = loop.run(self.graphdef, *arrays, config=config, mesh=mesh)
        if self.events is not None:
            self.events.look(self._state)
        asked = wants_scores, self.config.return_sampling_mask
        return recent.told_beside(report, self._state, *asked, mesh=self._mesh)

    def _recall_less_urgent(self) -> None:
        """Put requests that wait in rows, new or preempted, back where more urgent ones could have their
        rows.

        A recalled request may have run in the run whose report is unread. Then it runs again, to the same
        answer.
        """
        if not self.queue:
            return
        waiting = sorted(self.rows.waiting(), reverse=True)
        if not waiting:
            return
        if self.queue.first.order > waiting[0][0]:
            return  # always so under first come, first served
        num_free = max(len(self.rows.free_rows) - self.num_held_rows, 0)
        giving_way = {row for _, row in waiting}
        staying = InUse.of(entry.request for row, entry in self.rows.taken() if row not in giving_way)
        would_run = self.queue.with_room(lambda request: self._rooms.has_room(request, staying))
        urgent = itertools.islice(would_run, num_free, None)
        pairs = zip(waiting, urgent, strict=False)
        self.recall([row for (order, row), queued in pairs if queued.request.order < order])

    def recall(self, rows: Sequence[int]) -> None:
        """Put the requests in these rows back into the queue, with what is known of their answers."""
        recalled = []
        for row in rows:
            entry = self.rows[row]
            assert entry is not None
            recalled.append(entry)
            self.rows.leave(row)
        self._abort_rows(recalled)
        for entry in recalled:
            self.queue.add(entry.request, entry.answer)

    def fill_rows(self) -> None:
        """Give rows to the first requests in the queue; those that come together get theirs at once."""
        if not self.queue:
            return
        free_rows = self._replicas.split(self.rows.free_rows)
        if self.num_held_rows:
            del free_rows[0][-self.num_held_rows :]
        in_use = InUse.of(entry.request for _, entry in self.rows.taken())
        filled_rows: list[tuple[int, int, Queued]] = []
        taken = self.queue.take(
            most=lambda: max(map(len, free_rows)),
            has_room=lambda request: self._rooms.put(request, in_use),
        )
        for together in taken:
            first = together[0]
            if self.events is not None:
                self.events.note(first.request)
            if self.begins_fetch(together):
                del free_rows[0][-len(together) :]
                continue
            in_use.add(first.request)
            its_rows = free_rows[self._replicas.choose(first.request, first.token_ids, free_rows)]
            head = its_rows[0]
            filled_rows += [(its_rows.pop(0), head, queued) for queued in together]
        for batch in itertools.batched(filled_rows, SUBMIT_LINES):
            self._submit(batch)

    @CALLS.shared
    def _put_adapter(self, arrays: Arrays, number: int) -> None:
        if self._mesh is not None:
            arrays = from_host(self._mesh, BY_SHARD, arrays)
        adapters, weights = nnx.split_state(self.params, AdapterParam, ...)
        place = np.int32(number - 1)
        written = loop.put_adapter(self.graphdef, adapters, weights, arrays, place, mesh=self._mesh)
        self.params = nnx.merge_state(weights, written)

    def _submit(self, batch: Sequence[tuple[int, int, Queued]]) -> None:
        """Put requests, each with its row and the first row of those that come with it, into the state."""
        rows = np.full(SUBMIT_LINES, len(self.rows), np.int32)  # beyond all: none
        tokens = [np.zeros((3, 0), np.int32)]  # row, position and id of each token
        lines = []
        for line, (row, head, queued) in enumerate(batch):
            token_ids, num_tokens = with_replayed(queued), len(queued.token_ids)
            positions = np.arange(len(token_ids), dtype=np.int32)
            tokens.append(np.stack([np.full_like(token_ids, row), positions, token_ids]))
            rows[line] = row
            self.rows.take(row, queued.request, queued.answer)
            values = self.door.row_values(queued.request, num_tokens)
            values["beams"]["head"] = head % self.config.num_rows  # a row of its replica
            lines.append(values | self._rooms.row_values(queued))
        self._in_chunks(np.concatenate(tokens, axis=1), self._write_chunk)
        if most := self.config.max_prompt_logprob_token_ids:
            given = candidates_of(((row, queued.request) for row, _, queued in batch), most)
            self._in_chunks(given, self._write_candidates)
        self._place(filled(self._empty_lines, lines), self._replicas.local(rows))

    @CALLS.shared
    def _place(self, requests: Rows, rows: np.ndarray) -> None:
        self._state = loop.submit(self._state, requests, rows, mesh=self._mesh)

    def _in_chunks(self, tokens: np.ndarray, write: Callable[[np.ndarray], None]) -> None:
        """Write tokens, each under its row and position, in chunks of one size: so nothing is compiled
        anew.
        """
        for first in range(0, max(tokens.shape[1], 1), SUBMIT_TOKENS):
            chunk = tokens[:, first : first + SUBMIT_TOKENS]
            padding = ((0, 0), (0, SUBMIT_TOKENS - chunk.shape[1]))
            chunk = np.pad(chunk, padding, constant_values=len(self.rows))  # beyond all rows: none
            write(self._replicas.with_rows(chunk))

    @CALLS.shared
    def _write_chunk(self, chunk: np.ndarray) -> None:
        rows = self._state.rows
        token_ids = loop.write_tokens(rows.token_ids, chunk, mesh=self._mesh)
        self._state = dataclasses.replace(self._state, rows=dataclasses.replace(rows, token_ids=token_ids))

    @CALLS.shared
    def _write_candidates(self, chunk: np.ndarray) -> None:
        rows = self._state.rows
        found = loop.write_candidates(rows.candidates, chunk, mesh=self._mesh)
        self._state = dataclasses.replace(self._state, rows=dataclasses.replace(rows, candidates=found))

    def _read(self, run: Run) -> list[Delta]:
        report = self._replicas.merged(jax.device_get(dataclasses.replace(run.report, prompt_scores=None)))
        raise_if_error(int(report.status))
        prompts = None
        if self.rows.wants_prompt_scores:
            prompts = self._replicas.merged_prompts(jax.device_get(run.report.prompt_scores))
        # The version rises when no run is under way, so it is that of the weights that computed this one.
        versions = run.stays, self.weight_version
        deltas, self.first_run = self.rows.read(report, prompts, *versions, self.routed_of)
        self._note(report, run.began)
        if self.events is not None:
            self.events.read()
        return self.keep(deltas)

    def _note(self, report: Report, dispatched: float) -> None:
        """Update the statistics, and the estimate of how long steps take."""
        by_replica = (report.counters - self._counters).reshape(-1, report.counters.shape[-1])
        self._counters = report.counters
        # The device began with it when it had done what was dispatched before, or at once if it was idle.
        now, began = time.perf_counter(), max(dispatched, self._last_read)
        most = by_replica.max(0).tolist()
        self.pace.note(most[Counter.NUM_STEPS], most[Counter.NUM_PROMPT_PASSES], now - began)
        self._last_read = now
        num_waiting = len(self.queue) + self.rows.num_waiting
        self.stats = self.stats.after(report, by_replica.sum(0).tolist(), num_waiting)
