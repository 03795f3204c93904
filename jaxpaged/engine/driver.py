"""The driver: fills rows, dispatches runs of the loop, reads their reports. For one thread only.

It has a `Device`, which owns the state; the requests that wait for a row, and in `HostRows` those that have
one; and services, which do what options ask for at fixed moments of its turns.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx

from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity, drafted, start
from jaxpaged.engine.adapters import beside
from jaxpaged.engine.device import Device
from jaxpaged.engine.door import Door
from jaxpaged.engine.drafted import Draft, shapes_beside
from jaxpaged.engine.host_rows import HostRows
from jaxpaged.engine.late_arena import LateArena
from jaxpaged.engine.occupancy import Occupancy, occupancy
from jaxpaged.engine.replicas import Replicas
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.request_queue import RequestQueue
from jaxpaged.engine.row_filler import RowFiller
from jaxpaged.engine.run_length import RunLengthController
from jaxpaged.engine.services.adapter_slots import AdapterSlots
from jaxpaged.engine.services.block_exchange import BlockExchange
from jaxpaged.engine.services.events import Events
from jaxpaged.engine.services.grammars import DeviceGrammars
from jaxpaged.engine.services.lifecycle import Lifecycle
from jaxpaged.engine.services.offloading import Offloading
from jaxpaged.engine.services.service import Service
from jaxpaged.engine.setup import Setup
from jaxpaged.engine.snapshot import Snapshot, check_snapshot
from jaxpaged.engine.start import Shapes
from jaxpaged.engine.stats import Stats
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.names import Names
from jaxpaged.models.quantised import codes as quantised
from jaxpaged.parallel.processes import Leader, Processes
from jaxpaged.status import raise_if_error
from jaxpaged.step import loop, recent
from jaxpaged.step.channels import by_position
from jaxpaged.step.report import Report
from jaxpaged.step.state import Counter, EngineState, without_kv


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was dispatched and whose report is unread."""

    report: Report
    stays: np.ndarray  # `HostRows.stays` when it was dispatched
    began: float  # when it was dispatched, by `time.perf_counter`


class Driver:
    """Maker of turns: each dispatches the next run of the loop, and reads the report of the one before.

    device: model and state. rows, queue: the requests that have a row, and those that wait for one.
    services: what acts in turns. exchange, lifecycle: what acts between two of them.
    """

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
        self.config, self._processes = config, processes
        self.setup = setup = Setup(
            config,
            model_config,
            draft=None if draft is None else draft.config,
            draft_cost=None if draft is None else draft.cost,
        )
        load_model, shapes = drafted.beside(draft, setup, load_model), shapes_beside(draft, setup, shapes)
        if processes is not None:  # before anything heavy
            processes.agree(setup.description())
        setup.check()
        size = start.known_size(setup, shapes)
        # A cache that is too small is refused before anything is loaded.
        max_len = None if size is None else capacity.served_len(setup, size)
        logging.info("attention: %s (%s)", setup.attention, setup.attention_reason)
        model = start.load(setup, load_model)
        for implementation, count in quantised.implementations(nnx.state(model)).items():
            logging.info("products with quantised weights: %s for %d of them", implementation, count)
        adapters = beside(model, adapter_names, setup)
        kept_run = None
        if size is None:
            size, kept_run = start.fitted(setup, model)
        if max_len is None:
            max_len = capacity.served_len(setup, size)
        logging.info("cache: %s", size)
        self.cache_size = size
        self.device = Device(
            setup, model, size.num_blocks, load_model, names=adapter_names, kept_run=kept_run, draft=draft
        )
        del model  # the device has its arrays
        self.step_config = self.device.step_config
        self.door = Door(config, setup.model_config, max_len, size, self.step_config, adapters=adapters)
        self._replicas = Replicas(config, size.num_blocks)
        num_usable = sum(number - 1 for number in size.blocks_by_class)
        num_blocks, num_rows = (n * self._replicas.size for n in (num_usable, config.num_rows))
        self.stats = Stats(num_blocks=num_blocks, num_free_blocks=num_blocks)
        self._counters: Any = np.zeros(len(Counter) + config.most_drafts, np.int32)
        self.queue = RequestQueue()
        self.rows = HostRows(num_rows)
        self.first_run: list[int] = []  # requests that the last report was the first to see run
        self._unread: Run | None = None
        self.run_length = RunLengthController()
        self._last_read = -np.inf  # when the last report was read, by `time.perf_counter`
        self.services: list[Service] = []
        if adapters is not None:
            self.services.append(AdapterSlots(self.device, config.max_loras, adapters.nothing))
        self.late_arena = LateArena(self.device)
        if config.arena_words:
            self.services.append(DeviceGrammars(self.device, self.rows, self._replicas))
        self._filler = RowFiller(self.device, self.rows, self.queue, self._replicas, self.services)
        self.compile()
        self.events = self._open_events()
        self.exchange = BlockExchange(self.device, self.door.salts, self.events)
        self.offloading = self._open_offloading()
        self.lifecycle = Lifecycle(self.device, self.rows, self)
        if isinstance(processes, Leader):  # all have made the same calls until here
            self.device.send_call = processes.tell

    def _open_events(self) -> Events | None:
        if self.config.kv_events_config is None:
            return None
        device = self.device
        events = Events(
            self.config,
            self.step_config.grouping.specs,
            device.state,
            listen=self._replicas.follow,
            look=device.look,
            mesh=device.mesh,
        )
        device.observer = events
        self.services.append(events)
        return events

    def _open_offloading(self) -> Offloading | None:
        if self.config.kv_offloading_size is None:
            return None
        offloading = Offloading(
            self.device,
            self.exchange,
            self.queue,
            self.run_length,
            num_free_blocks=lambda: self.stats.num_free_blocks,
            events=self.events,
        )
        self.stats = dataclasses.replace(self.stats, tiers=offloading.tiers.counts)
        self.services.append(offloading)
        return offloading

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        is_busy = bool(self.queue) or self._unread is not None or self.rows.has_any
        return is_busy or any(service.has_work for service in self.services)

    @property
    def state(self) -> EngineState:
        """State after all runs that were dispatched: arrays on the device, valid until the next turn."""
        return self.device.state

    @property
    def counters(self) -> np.ndarray:
        """`EngineState.counters` as last reported: int32 [counters], or [replicas, counters]."""
        return np.asarray(self._counters)

    def add(self, request: Request, answer: Sequence[int] | None = None) -> None:
        """Queue a request that came through the door, with what is known of its answer."""
        self.late_arena.is_due |= request.grammar is not None
        known = request.continues if answer is None else answer
        if not any(service.takes_new(request, known) for service in self.services):
            self.queue.add(request, known)

    def abort(self, request_ids: Sequence[int]) -> list[Delta]:
        """End these requests. Return the last deltas of those without a row; the others' come with turns."""
        wanted = set(request_ids)
        gone = self.queue.remove(wanted)
        for service in self.services:
            gone += service.drop(wanted)
        in_rows = [entry for _, entry in self.rows.taken() if entry.request.request_id in wanted]
        for entry in in_rows:
            entry.is_aborted = True
        self._filler.abort(in_rows)
        return self._noted([Delta.aborted(request) for request in gone])

    def turn(self, max_steps: int | None = None) -> list[Delta]:
        """Dispatch the next run if there is anything to run, then read the report of the run before.

        So the device has work while the host reads. `max_steps` is at most `loop.MAX_STEPS`; None lets the
        `RunLengthController` choose.
        """
        self.first_run = []
        begun = self._take_arena() if self.late_arena.must_open else []
        must_read_first = any(service.must_read_first for service in self.services)
        deltas = begun + (self.settle() if must_read_first else [])
        is_idle = not (self.queue or self.rows.has_any or self._unread)
        for service in self.services:
            service.before_fill(is_idle=is_idle)
        self._filler.recall_less_urgent()
        self.fill_rows()
        for service in self.services:
            service.before_run()
        dispatched = None
        if self.rows.has_any:
            began, stays = time.perf_counter(), self.rows.stays
            dispatched = Run(self._run(max_steps), stays, began)
        deltas += [] if self._unread is None else self._read(self._unread)
        self._unread = dispatched if self.rows.has_any else None
        if dispatched is not None and self._unread is None:  # nobody ran in it
            self._after_report()
        return deltas

    def settle(self) -> list[Delta]:
        """Read the report of the run under way, so that the device has no work left."""
        unread, self._unread = self._unread, None
        return [] if unread is None else self._read(unread)

    def _take_arena(self) -> list[Delta]:
        """Let requests have grammars from now on. Those in rows stay there. Waits for the run under way."""
        began = time.perf_counter()
        deltas = self.settle()
        self.late_arena.open()
        grammars = DeviceGrammars(self.device, self.rows, self._replicas)
        place = sum(isinstance(service, AdapterSlots) for service in self.services)
        self.services.insert(place, grammars)
        grammars.warm_up()
        self._filler.warm_up()
        jax.block_until_ready(self._run(max_steps=0))
        logging.info("structured outputs are ready after %.1f s without a step", time.perf_counter() - began)
        return deltas

    def fill_rows(self) -> None:
        """Give rows to the first requests in the queue."""
        self._filler.fill()

    def recall(self, rows: Sequence[int]) -> None:
        """Put the requests in these rows back into the queue, with what is known of their answers."""
        self._filler.recall(rows)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. If any request is unfinished, change nothing and return False."""
        for service in self.services:
            service.finish()
        if self.has_work:
            return False
        for service in self.services:
            service.forget()
        self.forget_prefixes()
        return True

    def forget_prefixes(self) -> None:
        """Forget which prefixes are cached, on the device and of each replica. No run is under way."""
        self._replicas.forget()
        self.device.forget_prefixes()

    def close(self) -> None:
        """Finish what services were to do, and close what they talk by. There is no turn after this."""
        for service in self.services:
            service.close()
        self.services.clear()

    def snapshot(self) -> Snapshot:
        """Copy the state of this engine to the host, and change nothing. Waits for the run under way.

        Raises `InputError` with several replicas, and with what a snapshot lacks: drafts, structured outputs.
        """
        check_snapshot(self.device.setup.config)
        values = jax.device_get(without_kv(self.state))
        queue = tuple(self.queue)
        return Snapshot(values, self.step_config, self.door.model_config.vocab_size, queue)

    def occupancy(self) -> Occupancy:
        """Return which request holds which blocks, and change nothing. Waits for the run under way."""
        requests = {row: entry.request for row, entry in self.rows.taken()}
        return occupancy(self.state, requests, len(self.queue))

    def compile(self) -> None:
        """Compile the loop, or read it from disk, and run none of its steps, so that all is ready."""
        self.device.compile(self._run_nothing, self._processes)

    def _run_nothing(self) -> None:
        for service in self.services:
            service.warm_up()
        self._filler.warm_up()
        for name in by_position(self.state.channels):
            self._values_of(name, 0)
        scores = recent.scores(self.state, mesh=self.device.mesh)
        jax.block_until_ready((self._run(max_steps=0), scores))

    def _run(self, max_steps: int | None = None) -> Report:
        if max_steps is None:
            length = self.run_length
            limit = length.max_steps_while_nobody_reads if self.rows.are_read_whole else length.max_steps
            if any(service.waits_for_run for service in self.services):
                limit = length.max_steps_while_others_wait
            limits = loop.limits(limit, length.max_passes)
        else:
            limits = loop.limits(max_steps)
        return self.device.run(limits, self.queue.wants_a_row, self.rows.wants_scores)

    def _read(self, run: Run) -> list[Delta]:
        report = self._replicas.merged(jax.device_get(dataclasses.replace(run.report, prompt_scores=None)))
        raise_if_error(int(report.status))
        prompts = None
        if self.rows.wants_prompt_scores:
            prompts = self._replicas.merged_prompts(jax.device_get(run.report.prompt_scores))
        deltas, self.first_run = self.rows.read(
            report,
            prompts,
            run.stays,
            # It rises when no run is under way, so it is that of the weights that computed this one.
            weight_version=self.device.weight_version,
            values_of=self._values_of,
        )
        self._note(report, run.began)
        self._after_report()
        return self._noted(deltas)

    def _after_report(self) -> None:
        for service in self.services:
            service.after_report()

    def _noted(self, deltas: list[Delta]) -> list[Delta]:
        """Return deltas as services deliver them."""
        for service in self.services:
            deltas = service.on_deltas(deltas)
        return deltas

    def _values_of(self, channel: str, row: int) -> np.ndarray:
        """Return a channel's values of all positions of a row, after all dispatched runs. Waits for them."""
        replicas = self._replicas
        rows = replicas.local(np.array([row], np.int32))
        values = jax.device_get(self.device.read_values(channel, rows))
        return np.asarray(values[row // replicas.num_rows, 0] if replicas.size > 1 else values[0])

    def _note(self, report: Report, dispatched: float) -> None:
        """Update the statistics, and the estimate of how long steps take."""
        by_replica = (report.counters - self._counters).reshape(-1, report.counters.shape[-1])
        self._counters = report.counters
        # The device began with it when it had done what was dispatched before, or at once if it was idle.
        now, began = time.perf_counter(), max(dispatched, self._last_read)
        largest = by_replica.max(0).tolist()
        self.run_length.note(largest[Counter.NUM_STEPS], largest[Counter.NUM_PROMPT_PASSES], now - began)
        self._last_read = now
        num_waiting = len(self.queue) + self.rows.num_waiting
        self.stats = self.stats.after(report, by_replica.sum(0).tolist(), num_waiting)
