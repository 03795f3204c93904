"""Compiler of constraints for many clients: a thread that gives the processes of constraints their turns."""

import collections
import contextlib
import json
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from absl import logging

from jaxpaged.grammar.nodes import GrammarError
from jaxpaged.grammar.turns import Turn, Turns
from jaxpaged.grammar.worker import BEGUN, Worker

QUANTUM = 0.02  # seconds between two choices of who goes on, where several wait
MOST_SECONDS = 120.0  # of the clock, for one that waits for what never comes
CHUNK = 1 << 20
CLOSED = "structured outputs cannot be compiled: the engine was closed"


class Job(Turn):
    """Constraint under compilation, with everyone who waits for it.

    process: None while it is not known.
    pipe: where its answer comes; None while it has no process.
    """

    def __init__(self, key: str) -> None:
        super().__init__(set())
        self.key = key
        self.waiting: list[tuple[Future[Any], Hashable]] = []
        self.number = 0
        self.process: int | None = None
        self.pipe: int | None = None
        self.content = bytearray()
        self.status: int | None = None  # how its process has ended


class Compiler:
    """Thread that compiles constraints, and the queue that any thread may add to. Any thread may ask.

    worker_of: returns the worker, once.
    find: returns what is known of a constraint by its key, None where nothing is.
    keep: returns what came of a constraint as it is to be given.
    refuse: notes that a constraint was refused, which would be so again.
    """

    def __init__(
        self,
        worker_of: Callable[[], Worker],
        find: Callable[[str], Any],
        keep: Callable[[str, Any], Any],
        refuse: Callable[[str, GrammarError], None],
    ) -> None:
        self._worker_of, self._find, self._keep, self._refuse = worker_of, find, keep, refuse
        self._lock = threading.Lock()
        self._asked: collections.deque[tuple[str, Future[Any], Hashable]] = collections.deque()
        self._gone: collections.deque[Future[Any]] = collections.deque()
        self._is_closed = False
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        # For the thread alone.
        self._worker: Worker | None = None
        self._jobs: dict[str, Job] = {}
        self._turns = Turns()
        self._running: Job | None = None
        self._since = 0.0  # when it began to run, or was last looked at
        self._killed: set[int] = set()  # jobs whose processes are to end as soon as they are known
        self._thread = threading.Thread(target=self._serve, name="jaxpaged-grammars", daemon=True)
        self._thread.start()

    def ask(self, key: str, client: Hashable = None) -> Future[Any]:
        """Return a future of the compiled constraint, or of a `GrammarError`. Cancelling it leaves the queue.

        key: its fields as JSON text.
        client: who asks. Clients share the processor evenly.
        """
        asked: Future[Any] = Future()
        with self._lock:
            if self._is_closed:
                raise GrammarError(CLOSED)
            self._asked.append((key, asked, client))
        asked.add_done_callback(self._note)
        self._wake()
        return asked

    def under_way(self) -> list[str]:
        """Return the keys of the constraints that somebody waits for, as they were a moment ago."""
        return [*self._jobs]

    def close(self) -> None:
        """End the thread and all processes. What still waits gets an error."""
        with self._lock:
            self._is_closed = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _note(self, asked: Future[Any]) -> None:
        if asked.cancelled():
            self._gone.append(asked)
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes anyhow; closed: it has ended
            self._wakes.send(b"\0")

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._take()
                self._choose()
                self._look(QUANTUM if len(self._turns) > 1 else None)
        except BaseException as error:
            logging.exception("grammars are compiled no more")
            with self._lock:
                self._is_closed = True
            self._end_all(f"{CLOSED} by {type(error).__name__}: {error}")
        else:
            self._end_all(CLOSED)
        finally:
            for job in self._jobs.values():
                self._give_up(job)
            if self._worker is not None:
                self._worker.close()
            self._woken.close()
            self._wakes.close()

    def _take(self) -> None:
        """Take in new requests for constraints, and drop cancelled ones."""
        while self._asked:
            key, asked, client = self._asked.popleft()
            if asked.cancelled():
                continue
            if (job := self._jobs.get(key)) is None:
                try:
                    automaton = self._find(key)
                except Exception as error:
                    _set(asked, error)
                    continue
                if automaton is not None:
                    _set(asked, automaton)
                    continue
                job = self._jobs[key] = Job(key)
            job.waiting.append((asked, client))
            self._turns.add(job, client)
        while self._gone:
            self._drop(self._gone.popleft())

    def _drop(self, asked: Future[Any]) -> None:
        for job in [*self._jobs.values()]:
            left = [pair for pair in job.waiting if pair[0] is not asked]
            if len(left) < len(job.waiting):
                job.waiting = left
                self._turns.leave(job, job.clients - {client for _, client in left})
                if not left:
                    del self._jobs[job.key]
                    self._give_up(job)

    def _choose(self) -> None:
        """Resume the constraint whose turn it is."""
        self._spend()
        chosen = self._turns.next()
        while isinstance(chosen, Job):
            if chosen is self._running:
                return
            self._stop(self._running)
            self._running = chosen
            try:
                self._go_on(chosen)
                return
            except OSError as error:  # no process, or no memory for one
                self._finish(chosen, GrammarError(f"the grammar could not be compiled now: {error}"))
                chosen = self._turns.next()
        self._stop(self._running)
        self._running = None

    def _spend(self) -> None:
        now = time.monotonic()
        job, self._since, seconds = self._running, now, now - self._since
        if job is None or job.process is None:  # whose process is not there yet
            return
        if self._turns.spend(job, seconds):
            self._give_up(job)
        elif job.seconds > MOST_SECONDS:
            self._finish(job, GrammarError(f"the grammar was not compiled within {MOST_SECONDS:g} s"))

    def _stop(self, job: Job | None) -> None:
        if job is not None and job.process is not None:
            _signal(job.process, signal.SIGSTOP)

    def _go_on(self, job: Job) -> None:
        if job.has_process:
            if job.process is not None:
                _signal(job.process, signal.SIGCONT)
            return
        if self._worker is None:
            self._worker = self._worker_of()
        job.number, job.pipe = self._worker.begin(json.loads(job.key))
        os.set_blocking(job.pipe, False)
        job.has_process = True

    def _look(self, seconds: float | None) -> None:
        """Wait at most so many seconds for a new request or a process's answer, and take it in."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            control = None if self._worker is None else self._worker.control
            if control is not None:
                selector.register(control, selectors.EVENT_READ, self._worker)
            for job in self._jobs.values():
                if job.pipe is not None:
                    selector.register(job.pipe, selectors.EVENT_READ, job)
            ready = [key for key, _ in selector.select(seconds)]
        for key in ready:
            if isinstance(key.data, Job):
                self._read(key.data)
            elif isinstance(key.data, Worker):
                self._read_notice(key.data)
            else:
                self._woken.recv(4096)

    def _read(self, job: Job) -> None:
        if job.pipe is None:
            return
        try:
            while chunk := os.read(job.pipe, CHUNK):
                job.content += chunk
        except BlockingIOError:
            return
        os.close(job.pipe)
        job.pipe = None
        self._end(job)

    def _read_notice(self, worker: Worker) -> None:
        try:
            number, process, status = worker.notice()
        except (EOFError, OSError):  # the system may have ended it, where memory was short
            worker.close()
            self._running = None
            for lost in [each for each in self._jobs.values() if each.has_process]:
                self._finish(lost, GrammarError("the grammar could not be compiled: its process was ended"))
            return
        job = next((job for job in self._jobs.values() if job.number == number), None)
        if status != BEGUN:
            self._killed.discard(number)
            if job is not None:
                job.status = status
                self._end(job)
        elif number in self._killed:
            _signal(process, signal.SIGKILL)
        elif job is not None:
            job.process = process
            if job is not self._running:
                self._stop(job)

    def _end(self, job: Job) -> None:
        """Finish a job once its process has ended and its whole answer has been read."""
        if job.pipe is not None or job.status is None:
            return
        assert self._worker is not None
        try:
            result = self._keep(job.key, self._worker.answer(bytes(job.content), job.status))
        except Exception as error:
            result = error
            if isinstance(error, GrammarError) and not self._worker.was_ended(job.status):
                self._refuse(job.key, error)
        self._finish(job, result)

    def _finish(self, job: Job, result: Any) -> None:
        if job is self._running:
            self._running = None
        self._jobs.pop(job.key, None)
        self._turns.leave(job)
        self._give_up(job)
        for asked, _ in job.waiting:
            _set(asked, result)

    def _give_up(self, job: Job) -> None:
        """End the process of a job, if it has one; it may begin again."""
        if job.status is None and job.process is not None:
            _signal(job.process, signal.SIGKILL)
        elif job.status is None and job.number:
            self._killed.add(job.number)
        if job.pipe is not None:
            os.close(job.pipe)
        if job is self._running:
            self._running = None
        job.number, job.process, job.pipe, job.status = 0, None, None, None
        job.content, job.has_process = bytearray(), False

    def _end_all(self, why: str) -> None:
        asked = [asked for job in self._jobs.values() for asked, _ in job.waiting]
        for each in [*asked, *(future for _, future, _ in self._asked)]:
            _set(each, GrammarError(why))


def _set(asked: Future[Any], result: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
        if isinstance(result, Exception):
            asked.set_exception(result)
        else:
            asked.set_result(result)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
