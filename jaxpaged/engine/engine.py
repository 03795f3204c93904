"""The engine: requests in, tokens out, from any thread. One thread of its own drives the compiled loop."""

import atexit
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self, Unpack

import numpy as np
from absl import logging

from jaxpaged.checks import check
from jaxpaged.config import EngineConfig
from jaxpaged.engine.door import RequestOptions
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.grammars import grammars_of
from jaxpaged.engine.handle import EngineDeadError, Handle, Sink, or_raise
from jaxpaged.engine.occupancy import Occupancy
from jaxpaged.engine.recording import Recorder
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.rest import Rest
from jaxpaged.engine.snapshot import Snapshot
from jaxpaged.engine.start import Shapes
from jaxpaged.engine.stats import Stats
from jaxpaged.engine.texts import TextError
from jaxpaged.handover.blocks import Blocks
from jaxpaged.handover.exchange import Chunk
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.names import Names
from jaxpaged.parallel.processes import Follower, Processes
from jaxpaged.sampling_params import SamplingParams


class Engine(Rest):
    """An engine that serves a model. `with` closes it; so does forgetting it, and the end of the program.

    load_model: returns the model in the form asked for; called when the options are known to be good.
    tokenizer: one of transformers', for the text of deltas.
    record_trace: as in `LLM`.
    shapes: returns the model with shapes for arrays, where weights are quantised.
    adapter_names: names of the model's weights in Hugging Face's model: for adapters, and for new weights.
    processes: those that `parallel.processes.join` has met, for `num_processes`. In all but process 0 the
        constructor raises `SystemExit` when process 0 ends.
    draft: the model that drafts, for `speculative_config`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        load_model: Callable[[LoadAs], Decoder],
        tokenizer: Any = None,
        record_trace: str | os.PathLike[str] | None = None,
        shapes: Shapes | None = None,
        adapter_names: Names | None = None,
        processes: Processes | None = None,
        draft: Draft | None = None,
    ) -> None:
        # Before anything heavy: the file may be one that cannot be written.
        self.recorder = None if record_trace is None else Recorder(record_trace, config.block_size)
        self._driver = Driver(config, model_config, load_model, shapes, adapter_names, processes, draft)
        if isinstance(processes, Follower):
            processes.follow(self._driver.follow)
        self.config, self.cache_size = config, self._driver.cache_size
        door = self._driver.door
        grammars = grammars_of(config, door.model_config, tokenizer)
        self.door = dataclasses.replace(door, tokenizer=tokenizer, grammars=grammars)
        self.tokenizer = tokenizer
        self._worker = _Worker(self._driver)
        self._close = weakref.finalize(self, self._worker.stop)
        atexit.register(self._close)  # before what JAX does then, and before other finalizers

    @property
    def stats(self) -> Stats:
        return self._driver.stats

    @property
    def stopped(self) -> EngineDeadError | None:
        """Error by which the engine has stopped; None while it lives."""
        return self._worker.stopped

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished, and the device has no work left."""
        return self._worker.is_idle

    def submit(
        self,
        prompt_token_ids: Sequence[int] | np.ndarray,
        params: SamplingParams,
        *,
        sink: Sink | None = None,
        **options: Unpack[RequestOptions],
    ) -> Handle:
        """Queue a request for one answer (`params.n` is 1) and return at once.

        Requests share cached blocks only if their salts are equal. `sink` gets what the handle gets, without
        text, in the engine's thread, and must not block. If it raises, that is logged, and the request is
        given up. Raises `InputError`, and changes nothing, for a request that could never run.
        """
        requests = self.door.admit(prompt_token_ids, params, **options)
        check("n", params.n, "1: for several, give `submit_all` what `door.admit` makes", len(requests) == 1)
        [handle] = self.submit_all(requests, sink)
        return handle

    def submit_all(self, requests: Sequence[Request], sink: Sink | None = None) -> list[Handle]:
        """Queue requests of `door.admit` together: no step is made between the first and the last.

        All answers to a prompt come together, in their order.
        """

        def queue(sink: Sink | None) -> list[Handle]:
            return self._worker.submit(lambda request: Handle(self, request, sink), requests)

        return queue(sink) if self.recorder is None else self.recorder.record(requests, sink, queue)

    def abort(self, handles: Sequence[Handle]) -> None:
        """Give requests up; those that have finished stay as they are."""
        self._worker.abort([handle.request_id for handle in handles])

    def snapshot(self) -> Snapshot:
        """Return the state after the run under way, or of a stopped engine: see `research.replay.report`."""
        self.refuse_here("ask for a snapshot")
        return self._worker.ask(Driver.snapshot)

    def occupancy(self) -> Occupancy:
        """Return which request holds which blocks, and how far each is, after the run under way."""
        self.refuse_here("ask for the occupancy")
        return self._worker.ask(Driver.occupancy)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. If any request is unfinished, change nothing and return False."""
        self.refuse_here("reset the prefix cache")
        return self._worker.ask(Driver.reset_prefix_cache)

    def export_blocks(
        self, prompt_token_ids: Sequence[int] | np.ndarray, cache_salt: str | None = None
    ) -> Blocks:
        """Return the full blocks that are cached of a prompt, from its beginning on, in the host's memory.

        They come from requests that run and from former ones, for another engine or for this one later.
        Blocks that were computed with an adapter are left out: another engine could not know that its adapter
        is the same. The export takes place between two runs and delays the second. Raises `InputError` where
        there is no prefix cache, or its scales are measured.
        """
        self.refuse_here("export blocks")
        prompt = self.door.checked_prompt(prompt_token_ids, cache_salt)
        return self._worker.ask(lambda driver: driver.export_blocks(prompt, cache_salt))

    def adopt_blocks(self, blocks: Blocks) -> int:
        """Cache blocks of another engine, as if a request here had computed them and had finished.

        They go to free blocks; those in use stay as they are. Returns how many of the blocks can be found
        then, with those that were there before: all, or 0 if they do not fit. Raises `InputError`, and
        changes nothing, for blocks of another model, layout, dtype, size or groups of layers.
        """
        self.refuse_here("adopt blocks")
        check("blocks", blocks, "a Blocks", isinstance(blocks, Blocks))
        return self._worker.ask(lambda driver: driver.adopt_blocks(blocks)) if blocks.num_blocks else 0

    def hand_over(
        self,
        to: "Engine",
        prompt_token_ids: Sequence[int] | np.ndarray,
        cache_salt: str | None = None,
    ) -> int:
        """Export blocks to another engine, from device to device, without a copy in the host's memory.

        Meanwhile both devices need memory for the blocks once more. Returns what `to.adopt_blocks` would.
        """
        for engine in (self, to):
            engine.refuse_here("hand over blocks")
        prompt = self.door.checked_prompt(prompt_token_ids, cache_salt)

        def take(driver: Driver) -> tuple[Blocks, list[Chunk]]:
            block_format, chain = driver.block_format, driver.locate(prompt, cache_salt)
            named = Blocks(block_format, chain.token_ids, chain.present, cache_salt, {})
            return named, driver.chunks(chain)

        named, chunks = self._worker.ask(take)

        def put(driver: Driver) -> int:
            driver.block_format.require(named)
            return driver.adopt(named, iter(chunks))

        return to._worker.ask(put) if chunks else 0

    def refuse_here(self, what: str) -> None:
        """Raise `RuntimeError` in the engine's own thread, which a sink runs in: it would wait for itself."""
        if self._worker.is_here:
            raise RuntimeError(f"a sink must not {what}: it runs in the engine's thread, which answers")

    def close(self) -> None:
        """Stop, and end what is in flight with `EngineDeadError`. May be called again."""
        self._close()
        self._driver.close()
        if self.door.grammars is not None:
            self.door.grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """The engine's thread, and what it shares with other threads, under a lock."""

    def __init__(self, driver: Driver) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._driver = driver
        self._pid = os.getpid()
        self._last_request_id = 0
        self._in_flight: dict[int, Handle] = {}
        self._submitted: list[Request] = []
        self._held: list[Request] = []  # which came while nothing new may run
        self._aborted: list[int] = []
        self._questions: list[Callable[[], None]] = []  # of `ask`
        self._stopped: EngineDeadError | None = None
        self.is_paused = self.is_asleep = False
        self._drained: Future[None] | None = None  # who waits for the end of all that is in flight
        self._thread = threading.Thread(target=self._serve, name="jaxpaged-engine", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> EngineDeadError | None:
        return self._stopped

    @property
    def is_idle(self) -> bool:
        return not (self._in_flight or self._submitted or self._aborted or self._driver.has_work)

    @property
    def is_here(self) -> bool:
        """Whether the thread that asks is the engine's."""
        return threading.current_thread() is self._thread

    def submit(self, handle_of: Callable[[Request], Handle], requests: Sequence[Request]) -> list[Handle]:
        """Number the requests and queue them."""
        self._check_process()
        with self._lock:
            if self._stopped is not None:
                or_raise(self._stopped)
            handles = []
            for request in requests:
                self._last_request_id += 1
                handles.append(handle_of(dataclasses.replace(request, request_id=self._last_request_id)))
            inbox = self._held if self.is_paused or self._drained is not None else self._submitted
            inbox += [handle.request for handle in handles]
            self._in_flight |= {handle.request_id: handle for handle in handles}
            self._changed.notify()
        return handles

    def abort(self, request_ids: Sequence[int]) -> None:
        self._check_process()
        with self._lock:
            self._aborted += [i for i in request_ids if i in self._in_flight]
            self._changed.notify()

    def ask[T](self, question: Callable[[Driver], T]) -> T:
        """Put a question to the driver between two runs, in its thread; once that has ended, in another."""
        self._check_process()
        answer: Future[T] = Future()

        def put() -> None:
            try:
                answer.set_result(question(self._driver))
            except BaseException as error:  # raised again where the answer is read
                answer.set_exception(error)

        with self._lock:
            lives = self._stopped is None
            if lives:
                self._questions.append(put)
                self._changed.notify()
        if not lives:
            self._thread.join()
            put()
        return answer.result()

    def act[T](self, action: Callable[[Driver], tuple[list[Delta], T]]) -> T:
        """Let the driver do something between two runs, and deliver the deltas that come of it."""

        def done(driver: Driver) -> T:
            deltas, result = action(driver)
            self._deliver_all(deltas)
            return result

        return self.ask(done)

    def drain(self) -> None:
        """Wait for all that is in flight, kept or not, and let nothing run from then on."""
        with self._lock:
            if self._stopped is not None:
                or_raise(self._stopped)
            drained = self._drained = self._drained or Future()
            self.is_paused = False
            self._changed.notify()
        drained.result()

    def pause(self, *, aborts: bool) -> None:
        """Let nothing run from now on; what is in flight is aborted, or kept as it is."""

        def pause(driver: Driver) -> tuple[list[Delta], None]:
            deltas = driver.settle()
            if aborts:
                with self._lock:
                    wanted = list(self._in_flight.keys() - {new.request_id for new in self._submitted})
                    gone, self._held = self._held, []
                deltas += [*self._ended_now(wanted), *map(Delta.aborted, gone)]
            self.is_paused = True
            return deltas, None

        self.act(pause)

    def resume(self) -> None:
        """Let requests run again."""
        with self._lock:
            self.is_paused = False
            if self._drained is None:
                self._submitted += self._held
                self._held = []
            self._changed.notify()

    def _ended_now(self, request_ids: Sequence[int]) -> list[Delta]:
        """Abort requests, and return their last deltas, without a step for any other."""
        deltas = self._driver.abort(request_ids)
        while self._driver.rows.has_aborted:
            deltas += self._driver.turn(max_steps=0)
        return deltas

    def stop(self, error: EngineDeadError | None = None) -> None:
        """Let the thread end after its turn, and send the error to everyone who waits."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._stopped = self._stopped or error or EngineDeadError("the engine was closed")
            left, self._in_flight = self._in_flight, {}
            drained, self._drained = self._drained, None
            self._changed.notify()
        if drained is not None:
            drained.set_exception(self._stopped)
        for handle in left.values():
            handle.put(self._stopped)
        if not self.is_here:
            self._thread.join()

    def _check_process(self) -> None:
        """Raise `RuntimeError` in a forked child: it has a copy of everything but the thread."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the engine belongs to the process that made it: a forked child must make its own"
            )

    def _serve(self) -> None:
        run_began = time.time()  # of the run whose report the next turn reads
        try:
            while self._take_inbox():
                self._take_questions()
                if self.is_paused:
                    continue
                next_began = time.time()
                deltas = self._driver.turn()
                self._note_scheduled(run_began)
                run_began = next_began
                self._deliver_all(deltas)
        except BaseException as error:
            logging.exception("the engine stops; research.replay.report(engine, path) still writes its state")
            dead = EngineDeadError(f"the engine stopped by {type(error).__name__}: {error}")
            dead.__cause__ = error
            self.stop(dead)
        finally:
            self._take_questions()

    def _take_inbox(self) -> bool:
        """Wait for work, and hand new requests and aborts to the driver; False when stopped."""
        with self._lock:
            while not (self._stopped or self._has_mail or self._runs):
                self._end_drain()
                if not self._has_mail:  # which came while it drained
                    self._changed.wait()
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, []
            gone = [held for held in self._held if held.request_id in aborted]
            self._held = [held for held in self._held if held not in gone]
        for request in submitted:
            self._driver.add(request)
        self._deliver_all([Delta.aborted(request) for request in gone])
        if aborted:
            end = self._ended_now if self.is_paused else self._driver.abort
            self._deliver_all(end(aborted))
        return self._stopped is None

    @property
    def _runs(self) -> bool:
        return self._driver.has_work and not self.is_paused

    def _end_drain(self) -> None:
        """Pause if that was to be when nothing is left in flight, and nothing is."""
        if (drained := self._drained) is not None:
            self.is_paused, self._drained = True, None
            drained.set_result(None)

    @property
    def _has_mail(self) -> bool:
        return bool(self._submitted or self._aborted or self._questions)

    def _take_questions(self) -> None:
        with self._lock:
            questions, self._questions = self._questions, []
        for put in questions:
            put()

    def _note_scheduled(self, run_began: float) -> None:
        """Note the time for requests that ran for the first time, by the report just read."""
        with self._lock:
            began = [self._in_flight[i] for i in self._driver.first_run if i in self._in_flight]
        for handle in began:
            handle.note_scheduled(run_began)

    def _deliver_all(self, deltas: Sequence[Delta]) -> None:
        with self._lock:
            handles = [self._in_flight.get(delta.request_id) for delta in deltas]
        told: list[tuple[Handle, Delta | TextError]] = []
        # Those stopped here, not on the device: their rows go on, and nobody waits for them.
        ended, stopped = list[int](), list[int]()
        for handle, delta in zip(handles, deltas, strict=True):
            if handle is not None:
                item = handle.told(delta)
                told.append((handle, item))
                if isinstance(item, TextError) or item.finish_reason:
                    ended.append(delta.request_id)
                    if not delta.finish_reason:
                        stopped.append(delta.request_id)
        with self._lock:
            for request_id in ended:
                self._in_flight.pop(request_id, None)
        if stopped:
            self._driver.abort(stopped)
        for handle, item in told:
            handle.put(item)
