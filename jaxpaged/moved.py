"""Old import paths of the public API: they work for one more release, with a `DeprecationWarning`."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module `old` whose names are now defined in the module `new`."""

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(f"{old} has moved to {new}", DeprecationWarning, stacklevel=2)
        return value

    return lookup
