"""Limits of tests with threads: a decorator for the time, and a length."""

import functools
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import wait

import pytest

from tests import tiny

LIMIT_S = 120.0  # far more than any of them takes, for a machine with much else to do


LONG = 100  # tokens


def limited[**P](test: Callable[P, None]) -> Callable[P, None]:
    """Run a test in a thread; fail, with a view of all threads, if it does not end in time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        ended = tiny.start(test, *args, **kwargs)
        if not wait([ended], LIMIT_S).done:
            stacks = ["".join(traceback.format_stack(f)) for f in sys._current_frames().values()]
            pytest.fail(f"still running after {LIMIT_S} s:\n" + "\n\n".join(stacks))
        ended.result()

    return run
