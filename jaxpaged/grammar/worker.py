"""Processes that compile constraints, each stopped by the system where it takes too much time or memory.

`python -m jaxpaged.grammar.worker` reads a vocabulary once. It forks a process for each constraint, which
answers with an automaton, with the source of a recursive grammar, or with a sentence, and ends. So nothing
that one constraint does reaches another. `Worker` is its other end.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxpaged.checks import shown
from jaxpaged.grammar import files, recursive
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.compile import TOO_DEEP, Constraint
from jaxpaged.grammar.nodes import GrammarError, Limits, TooLargeError
from jaxpaged.grammar.recursive import Language
from jaxpaged.grammar.vocabulary import TokenBytes

AUTOMATON, SOURCE, ERROR = b"A", b"S", b"E"
MAX_DEPTH = 5000  # of Python's calls, for nodes inside nodes
# Of the thread that llguidance reads a source in: less than threads of the engine's process have.
STACK_BYTES = 4 << 20
NOTICE = struct.Struct("<qii")  # job, its process, and how that ended as `os.wait` says it
BEGUN = -1  # in place of how it ended


class Worker:
    """The process of one vocabulary that forks the others, started when it is needed. For one thread."""

    def __init__(self, tokens: TokenBytes, limits: Limits) -> None:
        self._tokens, self._limits = tokens, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._num_jobs = 0

    @property
    def process(self) -> int | None:
        """The number of the process; None before it is started."""
        return None if self._process is None else self._process.pid

    @property
    def control(self) -> socket.socket | None:
        """Socket for the process's notices; None before the process is started."""
        return self._control

    def begin(self, fields: Mapping[str, Any]) -> tuple[int, int]:
        """Begin with a constraint. Return the number of the job, and the pipe on which its answer comes.

        Raises `OSError`.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._control is not None
        self._num_jobs += 1
        source, target = os.pipe()
        try:
            _send(self._control, json.dumps([self._num_jobs, dict(fields)]).encode(), target)
        except OSError:
            os.close(source)
            raise
        finally:
            os.close(target)
        return self._num_jobs, source

    def notice(self) -> tuple[int, int, int]:
        """Return the next notice: job, process, and how it ended or BEGUN. Raises `EOFError`."""
        assert self._control is not None
        return NOTICE.unpack(_received(self._control, NOTICE.size))

    def answer(self, content: bytes, status: int) -> TokenAutomaton | str:
        """Return the automaton, or the text, that an ended process has answered. Raises `GrammarError`."""
        length = int.from_bytes(content[:8], "little")
        kind, body = content[8:9], content[9:]
        if len(content) < 9 or len(body) != length:
            raise GrammarError(self._why(status))
        if kind == ERROR:
            raise GrammarError(**json.loads(body))
        if kind == SOURCE:
            return body.decode()
        made = files.from_bytes(body, len(self._tokens.raw), self._limits)
        assert made is not None
        return made

    @staticmethod
    def was_ended(status: int) -> bool:
        """Return whether somebody else ended a process, as the system does where memory is short."""
        return os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGTERM)

    def compile(self, fields: Mapping[str, Any]) -> TokenAutomaton | str:
        """Return the automaton of a constraint, or the source of a recursive one. Raises `GrammarError`."""
        job, pipe = self.begin(fields)
        with open(pipe, "rb") as source:
            content = source.read()
        while True:
            its_job, _, status = self.notice()
            if its_job == job and status != BEGUN:
                return self.answer(content, status)

    def close(self) -> None:
        """Stop the process, if there is one; the processes that it forked end with it."""
        process, self._process = self._process, None
        if self._control is not None:
            self._control.close()
            self._control = None
        if process is not None:
            process.kill()
            process.wait()

    def _why(self, status: int) -> str:
        """Return why a process ended without an answer."""
        limits = self._limits
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number == signal.SIGXCPU:
            return (
                f"the grammar took more than {limits.cpu_seconds} s of processor time to compile: make it "
                "simpler"
            )
        if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
            return f"{TOO_DEEP}: its reader ended by {signal.Signals(number).name}"
        ended = f"by signal {number}" if number else f"with status {os.waitstatus_to_exitcode(status)}"
        return f"the grammar could not be compiled: the process for it ended {ended}"

    def _start(self) -> None:
        self.close()
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._control, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxpaged.grammar.worker", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            )
        tokens = [raw.decode("latin-1") for raw in self._tokens.raw]
        first = {"raw": tokens, "eos_ids": self._tokens.eos_ids, "limits": asdict(self._limits)}
        _send(self._control, json.dumps(first).encode())


def serve(control: socket.socket) -> None:
    """Fork a process for each constraint that comes, until there are no more."""
    first = json.loads(_message(control)[0])
    tokens = TokenBytes(tuple(raw.encode("latin-1") for raw in first["raw"]), tuple(first["eos_ids"]))
    limits = Limits(**first["limits"])
    assert tokens.trie is not None  # made once, before time is counted
    if recursive.is_installed():
        recursive.prepare(tokens)
    sys.setrecursionlimit(MAX_DEPTH)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    jobs: dict[int, int] = {}  # by process
    try:
        while True:
            ready, _, _ = select.select([control, woken], [], [])
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
            for process, status in _ended(jobs):
                control.sendall(NOTICE.pack(jobs.pop(process), process, status))
            if control in ready:
                content, pipes = _message(control)
                job, fields = json.loads(content)
                process = os.fork()
                if not process:
                    signal.set_wakeup_fd(-1)
                    for end in (control, woken, wakes):
                        end.close()
                    _compile(fields, tokens, limits, pipes[0])
                os.close(pipes[0])
                jobs[process] = job
                control.sendall(NOTICE.pack(job, process, BEGUN))
    except (EOFError, OSError):  # the engine has gone
        pass
    finally:
        for process in jobs:
            os.kill(process, signal.SIGKILL)


def _ended(jobs: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the processes that have ended, and how."""
    waited = (os.waitpid(process, os.WNOHANG) for process in jobs)
    return [(process, status) for process, status in waited if process]


def _compile(fields: Mapping[str, Any], tokens: TokenBytes, limits: Limits, pipe: int) -> None:
    """Answer one constraint within the limits, and end the process."""
    sentence = f"the grammar took more than {limits.memory_bytes >> 20} MB to compile: make it simpler"
    too_much = ERROR, json.dumps({"sentence": sentence}).encode()  # later there may be no room for it
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
        try:
            kind, body = _answer(fields, tokens, limits)
        except (MemoryError, SystemError):  # CPython may forget why there was no memory
            kind, body = too_much
        except GrammarError as problem:
            kind, body = ERROR, json.dumps({"sentence": str(problem), "path": problem.path}).encode()
        except BaseException as problem:  # whatever a constraint of anybody makes our readers raise
            what = "; ".join(f"{name}={shown(value)}" for name, value in fields.items())
            sentence = f"structured_outputs cannot be read: {type(problem).__name__}: {problem} ({what})"
            if isinstance(problem, RecursionError):
                sentence = TOO_DEEP
            kind, body = ERROR, json.dumps({"sentence": sentence}).encode()
        for part in (len(body).to_bytes(8, "little") + kind, memoryview(body)):
            while part:
                part = part[os.write(pipe, part) :]
        os._exit(0)
    finally:
        os._exit(1)


def _answer(fields: Mapping[str, Any], tokens: TokenBytes, limits: Limits) -> tuple[bytes, bytes]:
    """Return the answer to one constraint: its source for llguidance, or an automaton.

    A schema that llguidance refuses gets an automaton; what has too large tables goes to llguidance. Raises
    `GrammarError`.
    """
    constraint = Constraint(fields, limits)
    if (source := constraint.source()) is not None:
        try:
            _try_out(source, tokens)
            return SOURCE, source.encode()
        except GrammarError:
            if fields.get("grammar") is not None:
                raise
    try:
        return AUTOMATON, files.to_bytes(constraint.automaton(tokens))
    except TooLargeError:
        if source is not None or (source := constraint.large_source()) is None:
            raise
    _try_out(source, tokens)
    return SOURCE, source.encode()


def _try_out(source: str, tokens: TokenBytes) -> None:
    """Follow a language for a few tokens. Raises `GrammarError` if it cannot be followed."""
    _in_small_stack(lambda: Language(source, tokens).try_out())


def _in_small_stack(read: Callable[[], Any]) -> None:
    """Read a source as the engine will, in a thread with less room. Raises what it raises."""
    threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(read).result()


def _send(control: socket.socket, content: bytes, file: int | None = None) -> None:
    """Send a message, its length before it, and perhaps an open file."""
    head = len(content).to_bytes(4, "little")
    if file is None:
        control.sendall(head)
    else:
        socket.send_fds(control, [head], [file])
    control.sendall(content)


def _message(control: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message, and the open files that came with it. Raises `EOFError`."""
    head, open_files, _, _ = socket.recv_fds(control, 4, 1)
    if len(head) < 4:
        raise EOFError
    return _received(control, int.from_bytes(head, "little")), open_files


def _received(control: socket.socket, size: int) -> bytes:
    """Read exactly the given number of bytes. Raises `EOFError` if there are fewer."""
    content = bytearray()
    while len(content) < size:
        chunk = control.recv(min(size - len(content), 1 << 20))
        if not chunk:
            raise EOFError
        content += chunk
    return bytes(content)


if __name__ == "__main__":
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a reader prints
    serve(socket.socket(fileno=int(sys.argv[1])))
