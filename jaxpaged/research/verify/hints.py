"""One sentence about the first place where two sides differ."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOTHING = "nothing"


def difference(got: Mapping[str, Any], want: Mapping[str, Any]) -> str | None:
    """Return "WHAT is GOT and must be WANT" for the first value that differs, or None if none does.

    A value that one side lacks is told as "nothing".
    """
    for what in dict.fromkeys([*want, *got]):
        found, right = got.get(what, NOTHING), want.get(what, NOTHING)
        if found != right:
            return f"{what} is {_plain(found)} and must be {_plain(right)}"
    return None


def entries(what: str, values: Iterable[Any]) -> dict[str, Any]:
    """Return the values of a list, each under what it is: `what` with its index in the place of {}."""
    return {what.format(index): value for index, value in enumerate(values)}


def copies(what: str, pairs: Iterable[Sequence[int]]) -> dict[str, str]:
    """Return copies of blocks as text, each under `what` with its index in the place of {}."""
    return entries(what, [f"block {source} to block {target}" for source, target in pairs])


def _plain(value: Any) -> Any:
    """Return a value as one reads it: an enumeration's by its name."""
    return getattr(value, "name", None) or value
