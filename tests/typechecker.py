"""The checker that the import hook of `conftest.py` puts on every annotated function."""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# An int is a good float, as it is for mypy.
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments and results, but not how dataclasses are built.

    JAX rebuilds pytrees with leaves that are no arrays (axes under vmap, placeholders), and that is right.
    """
    return function if function.__name__ == "__init__" else _beartype(function)
