"""Marks of parametrised tests that take long: which settings run in which of the Makefile's targets."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_and_nightly(values: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """Return all values as parameters: `slow` are of `make test-all`, others of `make test-nightly`.

    A tuple is one value of each of several parameters.
    """
    chosen, every = list(slow), list(values)
    assert all(value in every for value in chosen), f"{chosen} must be of {every}"
    marks = {True: pytest.mark.slow, False: pytest.mark.nightly}
    parameters = {value: value if isinstance(value, tuple) else (value,) for value in every}
    return [pytest.param(*its, marks=marks[value in chosen]) for value, its in parameters.items()]
