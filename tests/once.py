"""Work that is done once for all processes of a test run."""

import contextlib
import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


def once[T](factory: pytest.TempPathFactory, name: str, make: Callable[[], T]) -> T:
    """Return what `make` returns, called by the first process that needs it while others wait.

    `name` identifies the result in the whole run. The result is pickled.
    """
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / name
    with one_at_a_time(path.with_suffix(".lock")):
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
    found: T = pickle.loads(path.read_bytes())
    return found


@contextlib.contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold a lock file: other processes wait for it to be released."""
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
