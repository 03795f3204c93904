"""Parts from outside of the package: imported by "package.module:Name", and checked by contract version.

Names come from arguments and command lines alone. A name that stands in a file is never imported.
"""

import importlib
import os
import sys
from typing import Any

FIRST = 1  # the version of a part that declares none


def is_path(name: Any) -> bool:
    """Return whether a value names a part from outside, as "package.module:Name" does."""
    return isinstance(name, str) and ":" in name


def imported(path: str) -> Any:
    """Import the object with the path "package.module:Name"; Name may have dots.

    The current directory is searched behind all other places.

    Raises: ValueError with the reason, for a name that is malformed or missing, and for a module that fails.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError("it is not of the form package.module:Name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value = importlib.import_module(module_name)
        for part in name.split("."):
            value = getattr(value, part)
    except Exception as error:  # whatever importing somebody's module raises
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    return value


def why_not_version(part: Any, served: tuple[int, ...]) -> str | None:
    """Return why this release does not serve a part's version of its contract; None if it does.

    A part declares its version as `contract`. One without a declaration has the first version.
    """
    declared = getattr(part, "contract", FIRST)
    if isinstance(declared, int) and not isinstance(declared, bool) and declared in served:
        return None
    return (
        f"it declares contract = {declared!r}, and this release serves {', '.join(map(str, served))} "
        "(docs/research/contracts.md)"
    )
