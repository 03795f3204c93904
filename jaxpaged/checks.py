"""Checks of what users give: a mistake is one sentence with the name, the value and the rule.

Numbers may be NumPy's; what a check gives back is Python's own. Imports nothing heavy.
"""

import difflib
import json
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38
MAX_SHOWN = 200  # characters of a value in a message
MAX_SALT_CHARS = 1024


class InputError(ValueError):
    """Error in the user's input: one sentence with the name, the value and the rule."""


class UnknownNameError(InputError, TypeError):
    """A name that nobody knows, among those that were given. It is a `TypeError`, as Python's own is."""


def unknown(what: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that is none of those known: it says them all, and the nearest."""
    known = [*map(str, known)]
    near = difflib.get_close_matches(name, known, 1, 0.7) if isinstance(name, str) else []
    hint = f"the nearest is {near[0]!r}" if near else "it is unknown"
    return UnknownNameError(f"{what}{shown(name)} must be one of {', '.join(known)}: {hint}")


def shown(value: object) -> str:
    """Return the text of a value for a message: its `repr`, cut if long, or its type if it has none.

    Of texts, lists and objects as JSON has them no more is written than is shown, however large they are.
    """
    try:
        text = repr(_beginning(value, MAX_SHOWN))
    except Exception:  # an integer of thousands of digits has none, and a class of the user's may have none
        text = f"<{type(value).__name__}>"
    text = " ".join(text.splitlines())  # arrays have lines
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _beginning(value: Any, max_chars: int) -> Any:
    """Return the value cut to the first entries, at any depth, that `max_chars` characters can show."""
    room = [max_chars + 1]

    def begun(value: Any) -> Any:
        kind = type(value)
        if kind is str:
            room[0] -= len(value) + 2
            return value[: max_chars + 1]
        if kind not in (list, tuple, dict):
            room[0] -= 1
            return value
        room[0] -= 2
        if kind is dict:
            made = {}
            for key, entry in value.items():
                if room[0] < 0:
                    break
                made[begun(key)] = begun(entry)
            return made
        entries = []
        for entry in value:
            if room[0] < 0:
                break
            entries.append(begun(entry))
        return kind(entries)

    return begun(value)


def check(name: str, value: object, rule: str, ok: bool) -> None:
    """Raise `InputError` with the one form all our messages have, unless `ok`."""
    if not ok:
        raise InputError(f"{name}={shown(value)} must be {rule}")


def is_int_type(kind: type) -> bool:
    """Return whether a type is one of integers, Python's or NumPy's; bool is none."""
    return issubclass(kind, numbers.Integral) and not issubclass(kind, bool)


def is_int(value: object) -> bool:
    return is_int_type(type(value))


def checked_int(name: str, value: object, rule: str, minimum: int, maximum: int = INT32_MAX) -> int:
    """Return the value if it is an integer from `minimum` to `maximum`. Raises `InputError`."""
    check(name, value, rule, is_int(value) and minimum <= value <= maximum)  # type: ignore[operator]
    return int(value)  # type: ignore[call-overload]


def checked_number(
    name: str, value: object, rule: str, minimum: float, maximum: float = FLOAT32_MAX, *, above: bool = False
) -> float:
    """Return the value if it is a number from `minimum` (`above`: beyond it) to `maximum`, never NaN.

    Raises `InputError`.
    """
    number = float("nan")
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
    check(name, value, rule, minimum <= number <= maximum and not (above and number == minimum))
    return number


def checked_bool(name: str, value: object) -> bool:
    check(name, value, "True or False", isinstance(value, bool))
    return bool(value)


def checked_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return the value if it is one of these strings. Raises `InputError`."""
    choices = tuple(choices)
    ok = isinstance(value, str) and value in choices
    check(name, value, f"one of {', '.join(choices)}", ok)
    return str(value)


def parsed_json(name: str, value: object, rule: str) -> Any:
    """Return the value of a JSON text, and a value that is no text unchanged. Raises `InputError`."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise InputError(f"{name}={shown(value)} must be {rule}") from None


def read_finite_json(text: str | bytes) -> Any:
    """Parse standard JSON, whose numbers must be finite in float64.

    Python's own reader takes NaN and Infinity, and makes infinity of 1e999; nothing that is written back may
    have them. Raises `ValueError`, or `RecursionError` for text that is too deep.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number there")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0:
        raise ValueError(f"{text[:40]} is beyond the numbers of float64")
    return number


def checked_mapping(name: str, value: object, rule: str, keys: Iterable[str]) -> Mapping[str, Any]:
    """Return the value if it is a mapping without other keys than these. Raises `InputError`."""
    check(name, value, rule, isinstance(value, Mapping))
    assert isinstance(value, Mapping)
    keys = tuple(keys)
    for key in value:
        if key not in keys:
            raise unknown(f"{name}: key=", key, keys)
    return value


def check_salt(name: str, value: object) -> None:
    """Check that a value could separate the prefix cache. Raises `InputError`."""
    is_salt = value is None or (isinstance(value, str) and 0 < len(value) <= MAX_SALT_CHARS)
    check(name, value, f"None or a string of 1 to {MAX_SALT_CHARS} characters", is_salt)
