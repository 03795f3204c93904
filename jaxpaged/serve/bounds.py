"""Bounds of a request's body: its JSON is counted as bytes before any value is made of it.

What is counted here bounds the work and the memory of everything that follows: parsing, validation,
templates.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple, Self, cast

import numpy as np

from jaxpaged.checks import MAX_SALT_CHARS, read_finite_json
from jaxpaged.sampling_state import MAX_EDITS
from jaxpaged.serve.replies import ApiError
from jaxpaged.text.limits import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS

CHUNK = 2**16  # bytes that are looked at together
QUOTE, BACKSLASH, COMMA, COLON = (ord(char) for char in '"\\,:')
OPENING, CLOSING = ord("{"), ord("}")  # and "[", "]" with the bit that they lack

MOST_FIELDS = 256  # fields of the body itself
MOST_ENTRIES = 4096  # entries of any other object or list


class Most(NamedTuple):
    """Bounds of one field, whether it is a text, a list or an object."""

    entries: int = MOST_ENTRIES
    chars: int | None = None  # of all its texts; None for as many as the body may have


FIELDS = {
    "allowed_token_ids": Most(2**18),  # no model has more tokens
    "bad_words": Most(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
    "cache_salt": Most(chars=MAX_SALT_CHARS),
    "logit_bias": Most(MAX_EDITS),
    "lora_name": Most(chars=1024),
    "lora_path": Most(chars=4096),
    "metadata": Most(16, 16 * (64 + 512)),  # OpenAI's bounds
    "model": Most(chars=1024),
    "stop": Most(MAX_STOPS, MAX_STOP_CHARS),
    "stop_sequences": Most(MAX_STOPS, MAX_STOP_CHARS),
    "stop_token_ids": Most(MAX_STOP_TOKENS),
    "tools": Most(1024),
}
# Lists of token ids, or of prompts: as long as the body's values allow. What is done with them is checked
# where the model's length and the queue are known.
LONG_FIELDS = frozenset({"prompt", "tokens"})


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a body as a whole."""

    depth: int  # objects and lists in one another
    values: int  # keys count, too
    containers: int  # objects and lists, which take most memory
    texts: int  # keys count, too

    @classmethod
    def of(cls, max_body_bytes: int, max_nesting: int) -> Self:
        """Return limits under which a body of that many bytes takes at most some ten times its own memory."""
        values, containers, texts = (max(1024, max_body_bytes // each) for each in (8, 128, 32))
        return cls(max_nesting, values, containers, texts)


class Size(NamedTuple):
    """Size of a JSON value. An empty list or object counts as two values."""

    depth: int = 0
    values: int = 1
    containers: int = 0
    texts: int = 0

    def within(self, limits: Limits) -> bool:
        return (
            self.depth <= limits.depth
            and self.values <= limits.values
            and self.containers <= limits.containers
            and self.texts <= limits.texts
        )


def measure(body: bytes | bytearray, goes_on: Callable[[Size], bool] = lambda size: True) -> Size:
    """Count the characters, texts and values in UTF-8 JSON, up to its first error.

    Chunk by chunk, in NumPy, which lets other threads run; ends early where `goes_on` is false of what was
    counted so far. Behind a mistake the numbers mean nothing: a parser does not come there.
    """
    size, depth, in_text, is_escaped = Size(), 0, False, False
    chars = np.frombuffer(body, np.uint8)
    for begin in range(0, len(chars), CHUNK):
        chunk = chars[begin : begin + CHUNK]
        is_quote = chunk == QUOTE
        is_backslash = chunk == BACKSLASH
        if is_escaped or is_backslash.any():
            escaped = _escaped(is_backslash, is_escaped)
            is_escaped = bool(escaped[-1])
            is_quote &= ~escaped[:-1]
        # A quote turns inside to outside, and back.
        inside = (np.cumsum(is_quote, dtype=np.uint8) + np.uint8(in_text)) & 1
        in_text = bool(inside[-1])
        outside = inside == 0
        opens = ((chunk | 0x20) == OPENING) & outside
        closes = ((chunk | 0x20) == CLOSING) & outside
        steps = np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
        num_opens = int(np.count_nonzero(opens))
        between = np.count_nonzero(((chunk == COMMA) | (chunk == COLON)) & outside)
        size = Size(
            max(size.depth, depth + int(steps.max())),
            size.values + num_opens + int(between),
            size.containers + num_opens,
            size.texts + int(np.count_nonzero(is_quote & (inside == 1))),
        )
        depth += int(steps[-1])
        if not goes_on(size):
            break
    return size


def _escaped(is_backslash: np.ndarray, first: bool) -> np.ndarray:
    """Return which characters, and whether the one behind the last, follow an odd number of backslashes.

    first: whether the first character is escaped by the backslashes of the chunk before.
    """
    places = np.arange(len(is_backslash) + 1, dtype=np.int32)
    # The last character before each that is no backslash, or is one that is escaped by the chunk before.
    ends_run = ~is_backslash
    ends_run[0] |= first
    last = np.maximum.accumulate(np.where(ends_run, places[1:], 0))
    escaped = np.zeros(len(places), bool)
    escaped[0] = first
    escaped[1:] = ((places[1:] - last) & 1).astype(bool)
    return escaped


def parsed(body: bytes | bytearray, limits: Limits) -> Any:
    """Return the value of a body, checked for its size and its entries. Raises `ApiError`."""
    size = measure(body, lambda size: size.within(limits))
    for name, what in (
        ("depth", "levels of nesting"),
        ("containers", "objects and lists"),
        ("texts", "texts"),
        ("values", "values"),
    ):
        maximum = getattr(limits, name)
        if getattr(size, name) > maximum:
            raise ApiError(400, f"the body must not have more than {maximum} {what}")
    try:
        value = read_finite_json(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body must be UTF-8: byte {error.start} is not") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body must be JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # NaN, 1e999, or a number of thousands of digits
        raise ApiError(400, f"the body must be JSON: {error}") from None
    check_entries(value)
    return value


def check_entries(body: Any) -> None:
    """Check how many entries, and how long texts, the fields of a body have. Raises `ApiError`."""
    if not isinstance(body, dict):
        return  # which is refused by what it should be
    if len(body) > MOST_FIELDS:
        raise ApiError(400, f"the body has {len(body)} fields, must have at most {MOST_FIELDS}")
    for name, value in body.items():
        limit = FIELDS.get(name, Most())
        if isinstance(value, str):
            _check_chars(name, len(value), limit.chars)
        elif isinstance(value, list | dict):
            if name not in LONG_FIELDS:
                _check_count(name, value, limit.entries)
            if limit.chars is not None:
                _check_chars(name, _num_chars(value), limit.chars)
            _check_inner(name, value)


def _check_inner(name: str, value: list[Any] | dict[str, Any]) -> None:
    """Check the objects and lists within one, however deep; lists of lists of token ids may be long."""
    waiting = [value]
    while waiting:
        for inner in _entries(waiting.pop()):
            if isinstance(inner, list | dict):
                if name not in LONG_FIELDS or isinstance(inner, dict):
                    _check_count(name, inner, MOST_ENTRIES)
                waiting.append(inner)


def _check_count(name: str, value: list[Any] | dict[str, Any], max_entries: int) -> None:
    if len(value) > max_entries:
        message = f"{name} has {len(value)} entries in a list or an object, must have at most {max_entries}"
        raise ApiError(400, message, param=name)


def _check_chars(name: str, num_chars: int, max_chars: int | None) -> None:
    if max_chars is not None and num_chars > max_chars:
        raise ApiError(400, f"{name} has {num_chars} characters, must have at most {max_chars}", param=name)


def _entries(value: list[Any] | dict[str, Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def _num_chars(value: list[Any] | dict[str, Any]) -> int:
    keys = sum(map(len, value)) if isinstance(value, dict) else 0
    return keys + sum(len(each) for each in _entries(value) if isinstance(each, str))


def size_of(value: Any) -> int:
    """Return about how many characters JSON takes for a value."""
    size, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, list | tuple | dict):
            size += 8 * len(each) + (sum(map(len, each)) if isinstance(each, dict) else 0)
            waiting.extend(_entries(cast(Any, each)))
    return size


def first_error_only(schema: Any) -> Any:
    """Let pydantic stop at the first wrong entry of each list in a schema: by itself it collects all."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if part.get("type") in ("list", "tuple", "set", "frozenset"):
                part["fail_fast"] = True
            waiting.extend(part.values())
        elif isinstance(part, list | tuple):
            waiting.extend(part)
    return schema
