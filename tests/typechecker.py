"""Checker that the import hook of `conftest.py` puts on every annotated function."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# An int is accepted as a float, as mypy does.
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments and results of a function, but not of a dataclass's constructor.

    JAX rebuilds pytrees with leaves that are not arrays, such as axes under vmap, and may do so.
    """
    return function if function.__name__ == "__init__" else _beartype(function)
