"""Checks of sampling parameters that are lists: of tokens, of texts, of candidates."""

from typing import TYPE_CHECKING, Any

from jaxpaged.checks import check, is_int_type

if TYPE_CHECKING:
    import numpy as np


def token_ids(name: str, ids: object) -> tuple[int, ...]:
    """Return each id once, in the given order. The request checks that the model has them."""
    if ids is None:
        return ()
    # There may be as many as the model has tokens: no loop of Python's own goes over them.
    ok = (
        isinstance(ids, tuple | list)
        and all(map(is_int_type, set(map(type, ids))))
        and min(ids, default=0) >= 0
    )
    check(name, ids, "a list of token ids, ints >= 0", ok)
    assert isinstance(ids, tuple | list)
    return tuple(map(int, dict.fromkeys(ids)))


def texts(name: str, given: object) -> tuple[str, ...]:
    """Return each text once, in the given order."""
    if given is None:
        return ()
    ok = isinstance(given, tuple | list) and all(isinstance(text, str) and _is_text(text) for text in given)
    check(name, given, "a list of Unicode texts that are not empty", ok)
    assert isinstance(given, tuple | list)
    return tuple(dict.fromkeys(given))


def _is_text(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def allowed(name: str, ids: object) -> tuple[int, ...] | None:
    """Return token ids, of which there must be one at least; or None."""
    allowed_ids = None if ids is None else token_ids(name, ids)
    check(name, ids, "None or at least one token id", allowed_ids != ())
    return allowed_ids


def trace(name: str, ids: Any) -> tuple[int, ...] | None:
    """Return the tokens of an answer, as often as they come; or None."""
    return allowed(name, ids) and tuple(map(int, ids))


def candidates(name: str, ids: Any) -> "np.ndarray | None":
    """Return lines of token ids as int32 [lines, most of a line], filled up with -1; or None.

    An array is copied. The request checks how many lines there are, and that the model has the tokens.
    """
    if ids is None:
        return None
    import numpy as np  # not before: commands print their help without it

    rule = "None, or lists of token ids or an array of them, [lines, ids], with -1 for none"
    if isinstance(ids, np.ndarray):
        ok = ids.ndim == 2 and ids.size > 0 and ids.dtype.kind in "iu"
        check(name, ids, rule, bool(ok and ids.min() >= -1 and ids.max() < 2**31))
        return ids.astype(np.int32)
    ok = isinstance(ids, tuple | list) and any(ids) and all(isinstance(line, tuple | list) for line in ids)
    ok = ok and all(all(map(is_int_type, set(map(type, line)))) for line in ids)
    check(
        name,
        ids,
        rule,
        ok and all(-1 <= min(line, default=0) <= max(line, default=0) < 2**31 for line in ids),
    )
    table = np.full((len(ids), max(map(len, ids))), -1, np.int32)
    for row, line in zip(table, ids, strict=True):
        row[: len(line)] = line
    return table
