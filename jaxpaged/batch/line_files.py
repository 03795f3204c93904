"""Files of lines that grow while answers come, and that a later run goes on with. Imports nothing heavy."""

import contextlib
import io
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Self

from jaxpaged.checks import InputError, shown


class LineFile:
    """A file to which one process at a time adds lines: each is there as a whole, or not at all.

    `flag`: what names the file in messages. Raises `InputError` where it cannot be written, or is being
    written by another run.
    """

    def __init__(self, flag: str, file: str) -> None:
        self.file, self.title = file, f"{flag} {shown(file)}"
        try:
            self._out = Path(file).open("a+b", buffering=0)  # noqa: SIM115, closed by `__exit__`
        except (OSError, ValueError) as error:
            raise InputError(f"{self.title} cannot be written: {error}") from error
        try:
            self._lock()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._out.close()

    @property
    def can_be_read(self) -> bool:
        """Whether written lines can be read back; lines written to a pipe cannot."""
        return self._out.seekable() and Path(self.file).is_file()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that end with a line feed, as they are."""
        if self.can_be_read:
            self._out.seek(0)
            with io.BufferedReader(_Unowned(self._out)) as lines:
                yield from (line for line in lines if line.endswith(b"\n"))

    def cut(self, end: int, last: int, begins: Collection[bytes]) -> int:
        """Drop all bytes from `end` on. Returns: how many there were.

        From `last` on there is the beginning of one line, that was being written when a run ended. Raises
        `InputError`, and drops nothing, if it does not begin as one of `begins`: then it is somebody's.
        """
        if not self.can_be_read:
            return 0
        self._out.seek(last)
        tail = (self._out.read(max(map(len, begins))) or b"").rstrip(b"\0")  # which a broken disk may leave
        if not any(tail.startswith(each[: len(tail)]) for each in begins):
            raise InputError(f"{self.title} must be that of an earlier run: its last line is none")
        num_bytes = self._out.seek(0, io.SEEK_END) - end
        if num_bytes > 0:
            self._out.truncate(end)
        return max(0, num_bytes)

    def write(self, lines: bytes) -> None:
        """Add lines, at once. Raises `InputError`, and the file ends with what it had before."""
        end = self._out.seek(0, io.SEEK_END) if self._out.seekable() else None
        try:
            left = memoryview(lines)
            while left:
                left = left[self._out.write(left) :]
        except OSError as error:
            if end is not None:
                with contextlib.suppress(OSError):
                    self._out.truncate(end)
            raise InputError(f"{self.title} cannot be written: {error}") from error

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on this system
            return
        try:
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{self.title} is being written by another run") from error
        except OSError:  # a file system without locks, or no file: /dev/stdout
            pass


class _Unowned(io.RawIOBase):
    """Reads a file that stays open when this is closed."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return int(self._file.readinto(buffer))
