"""One sentence about the first place where two sides differ, or where a user's code fails."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOTHING = "nothing"


def difference(got: Mapping[str, Any], want: Mapping[str, Any]) -> str | None:
    """Return "WHAT is GOT and must be WANT" for the first value that differs, or None if none does.

    A value that one side lacks is told as "nothing".
    """
    for what in dict.fromkeys([*want, *got]):
        got_value, want_value = got.get(what, NOTHING), want.get(what, NOTHING)
        if got_value != want_value:
            return f"{what} is {_plain(got_value)} and must be {_plain(want_value)}"
    return None


def entries(what: str, values: Iterable[Any]) -> dict[str, Any]:
    """Return the values of a list by their names: `what` with {} replaced by the index."""
    return {what.format(index): value for index, value in enumerate(values)}


def copies(what: str, pairs: Iterable[Sequence[int]]) -> dict[str, str]:
    """Return block copies as text, by name: `what` with {} replaced by the index."""
    return entries(what, [f"block {source} to block {target}" for source, target in pairs])


def raised(error: BaseException, length: int | None = None) -> str:
    """Return an error as "TYPE: MESSAGE (at FILE:LINE)": the place is the innermost line of a user's file.

    An error that no line of such a file has led to has none. `length`: the first line of the message
    alone, cut to so many characters.
    """
    message = str(error)
    if length is not None:
        message = next(iter(message.strip().splitlines()), "")[:length]
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [f"{_short(file)}:{line}" for file, line in lines if _is_theirs(file)]
    where = f" (at {theirs[-1]})" if theirs else ""
    return f"{type(error).__name__}: {message}{where}"


def _is_theirs(file: str) -> bool:
    """Return whether a file is neither the kit's nor a package's, and no text that was compiled."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    kit = [os.path.join(root, name, "") for name in ("jaxpaged", "pallas_kernels", "reference")]
    others = [os.path.join(path, "") for path in (sysconfig.get_path("stdlib"), sys.prefix)]
    path = os.path.abspath(file)
    return not file.startswith("<") and not path.startswith((*kit, *others)) and "site-packages" not in path


def _short(file: str) -> str:
    """Return a file's path, from the working directory where it lies below that."""
    near = os.path.relpath(file)
    return file if near.startswith(os.pardir) else near


def _plain(value: Any) -> Any:
    """Return a value as one reads it: an enumeration's by its name."""
    return getattr(value, "name", None) or value
