"""The thread of an engine, which alone calls its driver, and what it shares with other threads."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from absl import logging

from jaxpaged.engine.driver import Driver
from jaxpaged.engine.handle import EngineDeadError, Handle, or_raise
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.stats import DraftTotals
from jaxpaged.engine.texts import TextError
from jaxpaged.step.channels import DRAFTS


class Worker:
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
        self.drafts = DraftTotals.none(driver.config.most_drafts)  # of what was delivered
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
        notices: list[tuple[Handle, Delta | TextError]] = []
        # Those stopped here, not on the device: their rows go on, and nobody waits for them.
        ended, stopped = list[int](), list[int]()
        for handle, delta in zip(handles, deltas, strict=True):
            if handle is not None:
                item = handle.with_text(delta)
                notices.append((handle, item))
                if isinstance(item, Delta) and DRAFTS.name in item.channels:
                    self.drafts = self.drafts.after(item.channels[DRAFTS.name])
                if isinstance(item, TextError) or item.finish_reason:
                    ended.append(delta.request_id)
                    if not delta.finish_reason:
                        stopped.append(delta.request_id)
        with self._lock:
            for request_id in ended:
                self._in_flight.pop(request_id, None)
        if stopped:
            self._driver.abort(stopped)
        for handle, item in notices:
            handle.put(item)
