"""The two files of a batch, in OpenAI's form: requests, a line each, and answers, a line each as it comes.

Nothing here holds a whole file: of each line that was seen 16 bytes are kept, to know it again.
"""

import contextlib
import dataclasses
import hashlib
import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self

from jaxpaged.batch.line_files import LineFile
from jaxpaged.checks import InputError, check, read_finite_json, shown

STANDARD_INPUT = "-"
INVALID_LINE = "invalid_line"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Bytes of a line beside its body: names, and an id that is not a book.
MOST_AROUND_BODY = 64 * 2**10
CHUNK = 2**20
BEGINS = b'{"id":'  # each line of the output


class LineError(ValueError):
    """Error in a line that is no request; its message goes into the line's output."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the input."""

    number: int  # from 1 on
    content: bytes | None  # None: it is longer than any request may be

    @property
    def id(self) -> bytes:
        """Bytes that identify a line without a valid `custom_id`: a digest of its number and content."""
        return _digest(b"line %d " % self.number + (self.content or b""))


@dataclasses.dataclass(frozen=True)
class BatchRequest:
    """A request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def id(self) -> bytes:
        return digest_of(self.custom_id)


def digest_of(custom_id: str) -> bytes:
    """Return the digest by which a `custom_id` is recognised again."""
    return _digest(b"id " + custom_id.encode("utf-8", "surrogatepass"))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def parse(line: Line, urls: Collection[str], max_body_bytes: int) -> BatchRequest:
    """Return the request in a line of a batch file. Raises `LineError`."""
    if line.content is None:
        raise LineError(f"must have a body of at most {max_body_bytes} bytes")
    try:
        value = read_finite_json(line.content)
    except (ValueError, RecursionError) as error:
        raise LineError(f"must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise LineError(f"must be an object, not {shown(value)}")
    custom_id, body = value.get("custom_id"), value.get("body")
    try:
        check(
            "custom_id",
            custom_id,
            "a string that is not empty",
            isinstance(custom_id, str) and custom_id != "",
        )
        check("method", value.get("method"), "'POST'", value.get("method", "POST") == "POST")
        check("url", value.get("url"), f"one of {', '.join(sorted(urls))}", value.get("url") in [*urls])
        check("body", body, "an object", isinstance(body, dict))
        assert isinstance(body, dict)
        check("body.stream", body.get("stream"), "false or left out in a batch", not body.get("stream"))
    except InputError as error:
        raise LineError(str(error)) from error
    return BatchRequest(str(custom_id), value["url"], body)


def read(file: str, max_body_bytes: int) -> Iterator[Line]:
    """Yield the lines of a file that are not empty, "-" for standard input. Raises `InputError`."""
    max_line_bytes, number = max_body_bytes + MOST_AROUND_BODY, 0
    with _opened(file) as source:
        while content := _read(source.readline, max_line_bytes + 1):
            number += 1
            is_long = len(content) > max_line_bytes and not content.endswith(b"\n")
            while is_long and not content.endswith(b"\n") and content:
                content = _read(source.readline, CHUNK)
            if number == 1:
                content = content.removeprefix(BYTE_ORDER_MARK)
            if is_long or content.strip():
                yield Line(number, None if is_long else content.strip())


def count(file: str) -> int | None:
    """Return how many lines a file has, with empty ones; None where it can be read only once."""
    if file == STANDARD_INPUT or not Path(file).is_file():
        return None
    with _opened(file) as source:
        num_lines, last = 0, b"\n"
        while chunk := source.read(CHUNK):
            num_lines, last = num_lines + chunk.count(b"\n"), chunk[-1:]
    return num_lines + (last != b"\n")


def _read(readline: Any, max_bytes: int) -> bytes:
    try:
        return bytes(readline(max_bytes))
    except OSError as error:
        raise InputError(f"--input-file cannot be read: {error}") from error


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == STANDARD_INPUT:
        check("--input-file", file, "a file: standard input is closed", sys.stdin is not None)
        yield sys.stdin.buffer
        return
    try:
        source = Path(file).open("rb")  # noqa: SIM115, closed below
    except (OSError, ValueError) as error:
        raise InputError(f"--input-file {shown(file)} cannot be read: {error}") from error
    with source:
        yield source


class Output:
    """The file of answers, to which lines are added. What it had before counts as answered.

    A last line that was cut off, by a full disk or a killed process, is taken away. One process at a time
    may have it. Raises `InputError` where it cannot be written or holds anything but answers of a batch.
    """

    def __init__(self, file: str) -> None:
        self.answered: set[bytes] = (
            set()
        )  # requests, by `BatchRequest.id`; and lines that are none, by `Line.id`
        self.num_written = 0
        self._lines = LineFile("--output-file", file)
        try:
            self._read_back()
        except BaseException:
            self._lines.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def write(self, answer: dict[str, Any]) -> None:
        """Add a line, at once. Raises `InputError`, and the file ends with the line before."""
        line = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        self._lines.write(line + b"\n")
        self.num_written += 1

    def _read_back(self) -> None:
        end = 0
        for number, line in enumerate(self._lines.lines(), 1):
            end += len(line)
            if line.strip():
                self.answered.add(self._id_of(line, number))
        self._lines.cut(end, end, [BEGINS])

    def _id_of(self, line: bytes, number: int) -> bytes:
        try:
            value = json.loads(line)
            error = value["error"] or {}
            if value["response"] is None and error["code"] == INVALID_LINE:
                return bytes.fromhex(value["id"].rpartition("_")[2])
            return digest_of(value["custom_id"])
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as wrong:
            raise InputError(
                f"{self._lines.title} must be new, or that of an earlier run: its line {number} "
                "is no answer of a batch"
            ) from wrong
