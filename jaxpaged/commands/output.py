"""Standard output and standard error of a command. Imports nothing heavy at the top."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

LINE_EVERY_S = 10.0  # of progress, where standard error is no terminal


class OutputError(Exception):
    """Standard output cannot be written; the message says why."""


def write_stdout(text: str) -> None:
    """Write a line or more to standard output and flush it. Raises `OutputError` if it is closed or full."""
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except UnicodeEncodeError:  # the terminal cannot show everything; JSON is ASCII where that is so
        write_stdout(text.encode("ascii", "backslashreplace").decode())
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # a full disk, or a closed file
        discard_stdout()
        raise OutputError(f"standard output cannot be written: {error}") from error


def discard_stdout() -> None:
    """Drop output that could not be written: Python would try to write it again when it exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def keep_stdout_for_answers() -> None:
    """Send the output of libraries on file descriptor 1 to standard error.

    gloo, which connects processes on CPUs, writes lines of its own there.
    """
    given = sys.stdout
    if given is sys.__stdout__ and given is not None:
        given.flush()
        copy = os.dup(given.fileno())
        os.dup2(2, given.fileno())
        sys.stdout = open(copy, "w", encoding=given.encoding, errors=given.errors)  # noqa: SIM115


def write_stderr(text: str) -> None:
    """Write a line to standard error; do nothing if that is closed."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def log_to_stderr(is_verbose: bool) -> None:
    """Send the package's log to standard error: warnings, or everything if `is_verbose`."""
    from absl import logging

    logging.use_absl_handler()
    if is_verbose:
        logging.set_verbosity(logging.INFO)


def bar(*, total: int | None, desc: str, unit: str, **options: Any) -> Any:
    """Return a bar of tqdm on standard error; where that is no terminal, a line each `LINE_EVERY_S` seconds.

    `options`: further ones of tqdm's.
    """
    from tqdm import tqdm

    if sys.stderr is not None and not sys.stderr.isatty():
        options |= {"file": _Lines(), "mininterval": LINE_EVERY_S, "ncols": 0}
    return tqdm(total=total, desc=desc, unit=unit, **options)


class _Lines:
    """Standard error for a bar, each of whose states becomes a line."""

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            write_stderr(text)

    def flush(self) -> None:
        pass


@contextlib.contextmanager
def first_interrupt(stop: Callable[[], object]) -> Iterator[list[bool]]:
    """Let the first Ctrl-C call `stop`, and only the next one interrupt; the list is not empty after it.

    In other threads than the main one, which get no signals, nothing changes.
    """
    came: list[bool] = []

    def on_signal(number: int, frame: Any) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(True)
        stop()

    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
