"""A coverage-guided fuzzer for parsers of bytes, without dependencies. A seed determines its inputs.

An input joins the corpus if a line of the parser's source runs for the first time. `sys.monitoring` reports
each line once, and is then told to stop reporting it, so watching costs little.
"""

import contextlib
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from jaxpaged.checks import InputError

# Numbers to replace lengths, counts and offsets by.
NUMBERS = (0, 1, 2, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
# Texts that mean something to one of the parsers.
WORDS = (
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"9" * 400, b'""', b"{}", b"[]", b"[" * 40,
    b'{"a":' * 40, b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"\xf0\x9f\xa6\x9c", b"\n", b"\r\n", b"..", b"/",
    b"m8[s/0]", b"object",
    b"float32", b"bfloat16", b"int32", b"<tool_call>", b"</tool_call>", b"<", b">",
)  # fmt: skip
TOOL = sys.monitoring.PROFILER_ID
MAX_BYTES = 2**16  # an input longer than its seed has no more
MAX_SECONDS = 20.0  # processor time for one input: any needs far less


@dataclass(frozen=True)
class Target:
    """A parser under test.

    parse: takes an input and a folder to write files into. It may raise `InputError`, and nothing else.
    seeds: makes the valid inputs to begin with.
    sources: parts of the paths of the source files whose lines are watched.
    """

    name: str
    parse: Callable[[bytes, Path], object]
    seeds: Callable[[], Sequence[bytes]]
    sources: tuple[str, ...]


class FoundError(AssertionError):
    """A failure of a parser. The message has the target, the input and a command that repeats it."""


@dataclass
class Fuzzer:
    """A target, its corpus of inputs that reached new lines, and counts of what was tried."""

    target: Target
    folder: Path
    seed: int = 0
    num_lines: int = 0  # reached in the sources
    num_inputs: int = 0
    num_refused: int = 0
    corpus: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._has_new = False

    def run(self, seconds: float) -> None:
        """Try the seeds, then mutated inputs, for this much processor time. Raises `FoundError`."""
        end = time.process_time() + seconds
        with self._watching():
            for data in self.target.seeds():
                self._try(data)
                self.corpus.append(data)
            if self.num_refused:
                raise self._found(self.corpus[0], f"{self.num_refused} of its seeds are refused")
            while time.process_time() < end:
                data = mutated(self.corpus, self._rng)
                if self._try(data) and len(data) <= MAX_BYTES:
                    self.corpus.append(data)

    def _try(self, data: bytes) -> bool:
        """Parse an input. Returns whether it reached a new line."""
        self._has_new = False
        self.num_inputs += 1
        start = time.process_time()
        try:
            self.target.parse(data, self.folder)
        except InputError as error:
            self.num_refused += 1
            if "\n" in str(error).strip() or not str(error):
                raise self._found(data, f"its message is not one sentence: {str(error)!r}") from error
        except Exception as error:
            raise self._found(data, f"{type(error).__name__}: {error}") from error
        if time.process_time() - start > MAX_SECONDS:
            raise self._found(data, f"it takes more than {MAX_SECONDS:.0f} s")
        return self._has_new

    def _found(self, data: bytes, what: str) -> FoundError:
        """Write an input to a file, and return the error that names it."""
        file = self.folder / f"found-{self.target.name}"
        file.write_bytes(data)
        again = f"python -m tests.fuzz {self.target.name} --input {file}"
        return FoundError(
            f"{self.target.name}: {what[:500]}; input {data[:200]!r}, {len(data)} bytes; {again}"
        )

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Count the lines of the sources that run for the first time inside this context."""
        monitoring = sys.monitoring

        def reached(code: CodeType, _line: int) -> object:
            if any(part in code.co_filename for part in self.target.sources):
                self._has_new = True
                self.num_lines += 1
            return monitoring.DISABLE

        monitoring.use_tool_id(TOOL, "fuzzer")
        try:
            monitoring.register_callback(TOOL, monitoring.events.LINE, reached)
            monitoring.restart_events()
            monitoring.set_events(TOOL, monitoring.events.LINE)
            yield
        finally:
            monitoring.set_events(TOOL, monitoring.events.NO_EVENTS)
            monitoring.free_tool_id(TOOL)


def mutated(corpus: Sequence[bytes], rng: random.Random) -> bytes:
    """Return an input of the corpus with one to eight random changes."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(
            min(len(data), rng.choice((512, 4096, MAX_BYTES))) + 1
        )  # most changes hit the head, which says the most
        length = min(rng.choice((1, 2, 4, 8, 16, 64, 256)), len(data) - at)
        match rng.randrange(9):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + length] = rng.randbytes(length)
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = data[at : at + length] * rng.choice((1, 2, 50))
            case 4:
                data[at : at + rng.choice((0, length))] = rng.choice(WORDS)
            case 5:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) % 256**size
                data[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case 6:
                other = rng.choice(corpus)
                begin = rng.randrange(len(other) + 1)
                data[at:] = other[begin:]
            case 7:  # replace a value of JSON text
                values = list(re.finditer(rb'"[^"]*"|-?\d+|true|false|null', data[:MAX_BYTES]))
                if values:
                    found = rng.choice(values)
                    data[found.start() : found.end()] = rng.choice((*WORDS, b'"x"', b"[[]]", b"7", b"1.5"))
            case 8:
                del data[at:]
        del data[MAX_BYTES + len(corpus[0]) :]
    return bytes(data)
