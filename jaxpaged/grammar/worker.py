"""Process that compiles constraints, stopped by the system where one takes too much time or memory.

`python -m jaxpaged.grammar.worker` reads a vocabulary, then constraints, and answers each with an automaton,
with the source of a recursive grammar, or with a sentence. A message is four bytes of length and its content.
`Worker` is its other end.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from jaxpaged.grammar import files
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.nodes import GrammarError, Limits, TooLargeError
from jaxpaged.grammar.recursive import Language
from jaxpaged.grammar.vocabulary import TokenBytes

AUTOMATON, SOURCE, ERROR = b"A", b"S", b"E"
MAX_DEPTH = 5000  # of Python's calls, for nodes inside nodes
# Of the thread that llguidance reads a source in: less than threads of the engine's process have.
STACK_BYTES = 4 << 20


class Worker:
    """A process for one vocabulary, started when it is first needed, and again after it was stopped."""

    def __init__(self, tokens: TokenBytes, limits: Limits) -> None:
        self._tokens, self._limits = tokens, limits
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, fields: Mapping[str, Any]) -> TokenAutomaton | str:
        """Return the automaton of a constraint, or the source of a recursive one, for a `Language`.

        Raises `GrammarError`. One thread at a time may call this.
        """
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            _write(process.stdin, json.dumps(dict(fields)).encode())
            answer = _read(process.stdout)
        except (BrokenPipeError, EOFError):
            self.close()
            limits = self._limits
            raise GrammarError(
                f"the grammar took more than {limits.cpu_seconds} s of processor time, or "
                f"{limits.memory_bytes >> 20} MB, to compile: make it simpler"
            ) from None
        if answer[:1] == ERROR:
            raise GrammarError(**json.loads(answer[1:]))
        if answer[:1] == SOURCE:
            return answer[1:].decode()
        made = files.from_bytes(answer[1:], len(self._tokens.raw), self._limits)
        assert made is not None
        return made

    def close(self) -> None:
        """Stop the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    assert pipe is not None
                    pipe.close()

    def _start(self) -> None:
        self.close()
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxpaged.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        )
        tokens = [raw.decode("latin-1") for raw in self._tokens.raw]
        first = {"raw": tokens, "eos_ids": self._tokens.eos_ids, "limits": asdict(self._limits)}
        assert self._process.stdin is not None
        _write(self._process.stdin, json.dumps(first).encode())


def answers(source: IO[bytes], target: IO[bytes]) -> None:
    """Answer constraints until there are no more, each within the limits."""
    first = json.loads(_read(source))
    tokens = TokenBytes(tuple(raw.encode("latin-1") for raw in first["raw"]), tuple(first["eos_ids"]))
    limits = Limits(**first["limits"])
    assert tokens.trie is not None  # made once, before time is counted
    sentence = f"the grammar took more than {limits.memory_bytes >> 20} MB to compile: make it simpler"
    too_much = ERROR + json.dumps({"sentence": sentence}).encode()
    sys.setrecursionlimit(MAX_DEPTH)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    while True:
        try:
            fields = json.loads(_read(source))
        except EOFError:
            return
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + limits.cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))
        try:
            answer = _answer(fields, tokens, limits)
        except (MemoryError, SystemError):  # CPython may forget why there was no memory
            _write(target, too_much)
            return  # what is left of the memory is in pieces
        except GrammarError as problem:
            answer = ERROR + json.dumps({"sentence": str(problem), "path": problem.path}).encode()
        _write(target, answer)


def _answer(fields: Mapping[str, Any], tokens: TokenBytes, limits: Limits) -> bytes:
    """Return the answer to one constraint: its source for llguidance, or an automaton.

    A schema that llguidance refuses gets an automaton; what has too large tables goes to llguidance. Raises
    `GrammarError`.
    """
    constraint = Constraint(fields, limits)
    if (source := constraint.source()) is not None:
        try:
            _in_small_stack(lambda: Language(source, tokens).matcher().allowed())
            return SOURCE + source.encode()
        except GrammarError:
            if fields.get("grammar") is not None:
                raise
    try:
        return AUTOMATON + files.to_bytes(constraint.automaton(tokens))
    except TooLargeError:
        if source is not None or (source := constraint.large_source()) is None:
            raise
    _in_small_stack(lambda: Language(source, tokens).matcher().allowed())
    return SOURCE + source.encode()


def _in_small_stack(read: Callable[[], Any]) -> None:
    """Read a source as the engine will, in a thread with less room. Raises what it raises."""
    threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(read).result()


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(4, "little") + content)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    """Return the next message. Raises `EOFError` if there is none, or not all of it."""
    length = pipe.read(4)
    content = pipe.read(int.from_bytes(length, "little")) if len(length) == 4 else b""
    if len(length) < 4 or len(content) < int.from_bytes(length, "little"):
        raise EOFError
    return content


if __name__ == "__main__":
    own = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what prints must not be read as an answer
    answers(sys.stdin.buffer, own)
