"""Calls in JSON, read as they come: one value, and an object with a name and arguments."""

import json
import re
from typing import Any

from jaxpaged.serve.parsers.base import SPACE, Arguments, Begin, Give, Reads, Source

ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", *ARGUMENTS)  # keys of a call; JSON with other keys is an answer
_IN_STRING = re.compile(r'["\\]')
_BESIDE_STRINGS = re.compile(r"[^-+.0-9A-Za-z_\s,:]")  # the first character that has a meaning, or none
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]*")


class JsonScanner:
    """Finds where a string, an object or a list ends. What is no JSON beside strings ends it, too.

    `is_complete` says whether its last bracket or quotation mark was there.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def __call__(self, text: str, at: int) -> tuple[int, bool]:
        """Return up to where the value takes the text, and whether that is its end."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            match = (_IN_STRING if self._in_string else _BESIDE_STRINGS).search(text, at)
            if match is None:
                return len(text), False
            char, at = match[0], match.end()
            if self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = self._is_escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            else:
                return match.start(), True
            if self._depth <= 0 and not self._in_string:
                self.is_complete = True
                return at, True
        return at, False


def json_value(source: Source, give: Give | None = None) -> Reads[tuple[str, bool]]:
    """Read a JSON value. Return its text, "" with `give`, and whether it is complete."""
    first = yield from source.peek()
    if first and first in '{["':
        scanner = JsonScanner()
        text, _ = yield from source.scan(scanner, give)
        return text, scanner.is_complete
    text = yield from source.run(_SCALAR)
    if text and give is not None:
        yield give(text)
        return "", True
    return text, text != ""


def arguments_value(source: Source) -> Reads[bool]:
    """Give the arguments of a call, whatever JSON they are. Return whether they are complete.

    Objects and lists are given as they come. A text is decoded: some models write the object so. null and
    what is missing are an empty object.
    """
    first = yield from source.peek()
    if first and first in "{[":
        _, is_complete = yield from json_value(source, Arguments)
        return is_complete
    text, is_complete = yield from json_value(source)
    yield Arguments(object_text(text))
    return is_complete


def object_text(text: str) -> str:
    """Return the text of arguments that came as no object."""
    value = decoded(text)
    if isinstance(value, str):
        text = value.strip()
    return "{}" if text in ("", "null") else text


def call_object(source: Source, *, needs_arguments: bool = False) -> Reads[bool]:
    """Read an object with a name and arguments, and give it as a call. Return whether it is one.

    It begins with the next character. A call is given as soon as name and arguments are known, and stays,
    even if what follows is wrong. `needs_arguments`: whether an object without any, or with other keys, is no
    call. The source forgets its record where it is one.
    """
    name: str | None = None
    waiting: str | None = None  # arguments that came before the name
    is_announced = False
    if not (yield from source.takes("{")):
        return False
    while True:
        yield from source.run(SPACE)
        if (yield from source.takes("}")):
            break
        key = yield from _key(source)
        if key is None or (needs_arguments and not is_announced and key not in KEYS):
            return is_announced
        if key in ARGUMENTS and not is_announced and waiting is None and name is not None:
            source.forget()
            yield Begin(name)
            is_announced = True
            if not (yield from arguments_value(source)):
                return True
        else:
            value, is_right = yield from json_value(source)
            if not is_right:
                return is_announced
            if key in ARGUMENTS and not is_announced and waiting is None:
                waiting = value if value[0] in "{[" else object_text(value)
            elif key == "name" and name is None:
                name = decoded(value)
                if not isinstance(name, str) or not name:
                    return False
                if waiting is not None:
                    source.forget()
                    yield Begin(name)
                    yield Arguments(waiting)
                    is_announced = True
        yield from source.run(SPACE)
        if (yield from source.takes(",")):
            continue
        if not (yield from source.takes("}")):
            return is_announced
        break
    if not is_announced and name is not None and not needs_arguments:
        source.forget()
        yield Begin(name)
        yield Arguments("{}")
        return True
    return is_announced


def _key(source: Source) -> Reads[str | None]:
    """Read a key, a colon and the space around them. Return the key; None where there is none."""
    if (yield from source.peek()) != '"':
        return None
    text, is_complete = yield from json_value(source)
    yield from source.run(SPACE)
    if not is_complete or not (yield from source.takes(":")):
        return None
    yield from source.run(SPACE)
    key = decoded(text)
    return key if isinstance(key, str) else ""


def decoded(text: str) -> Any:
    """Return the value of a JSON text; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
