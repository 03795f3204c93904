"""What takes long and is the same for all processes of a test run."""

import fcntl
import os
import pickle
from collections.abc import Callable

import pytest


def once[T](factory: pytest.TempPathFactory, name: str, make: Callable[[], T]) -> T:
    """Made by the first process that needs it, while others wait; `name` is one for the whole run."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / name
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
    found: T = pickle.loads(path.read_bytes())
    return found
