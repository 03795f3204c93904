"""Calls of tools, as models write them into their text: read piece by piece, as the text comes.

What is read is the same however the text is cut. Text that turns out to be no call is given as it is.
"""

import dataclasses
import itertools
import json
import random
import re
import string
import uuid
from collections.abc import Iterator
from typing import Any, Protocol

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
MAX_HELD = 2**16  # characters of an object in which nothing speaks for a call yet; more is text
# What goes on with a JSON string, or with a list or an object, whatever it is.
IN_STRING = re.compile(r'[^"\\]+')
IN_NEST = re.compile(r'[^"{}\[\]]+')
SPACES = re.compile(f"[{SPACE}]+")


@dataclasses.dataclass(frozen=True)
class Text:
    """Text beside the calls."""

    text: str


@dataclasses.dataclass(frozen=True)
class Begin:
    """A call's beginning."""

    name: str


@dataclasses.dataclass(frozen=True)
class Arguments:
    """More of the JSON of the last call's arguments."""

    text: str


type Piece = Text | Begin | Arguments


class Parser(Protocol):
    """Of one answer."""

    def feed(self, text: str) -> list[Piece]:
        """What these characters complete."""

    def finish(self) -> list[Piece]:
        """What is left at the answer's end."""


class _Value:
    """Where a JSON value ends, character by character."""

    def __init__(self) -> None:
        self.first = ""  # character
        self._parts: list[str] = []
        self._depth, self._in_string, self._escaped = 0, False, False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def filling(self) -> re.Pattern[str] | None:
        """What goes on with it, and may come in one piece; None where each character may matter."""
        if self._in_string:
            return None if self._escaped else IN_STRING
        return IN_NEST if self._depth else None

    def takes(self, char: str) -> bool:
        """Return whether the character is part of it; the first that is not ends it.

        It may be several that match `filling`.
        """
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = not self._escaped and char == "\\"
        elif self.is_complete or (not self._depth and self.first and char in ",}]" + SPACE):
            return False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        self.first = self.first or char[0]
        self._parts.append(char)
        return True

    @property
    def is_complete(self) -> bool:
        """Of a string, an object or a list; a number ends with what comes behind it."""
        return bool(self.first) and not self._depth and not self._in_string and self.first in '"{['


class _CallObject:
    """One JSON object with a name and arguments: announced, and given on, as soon as both are known."""

    def __init__(self, *, needs_arguments: bool) -> None:
        self._raw: list[str] = []  # all of it, until it is announced
        self.num_raw = 0  # characters
        self.is_announced = self.is_done = self.is_wrong = False
        self._needs_arguments = needs_arguments
        self._name: str | None = None
        self._state, self._key = "{", ""
        self._value = _Value()
        self._arguments: list[str] = []  # that wait for the name

    @property
    def raw(self) -> str:
        """All of it so far, while it may turn out to be no call."""
        return "".join(self._raw)

    @property
    def filling(self) -> re.Pattern[str] | None:
        """As `_Value.filling`."""
        return self._value.filling

    @property
    def is_likely(self) -> bool:
        """Whether something in it speaks for a call."""
        return self._name is not None or self._key in ARGUMENTS or bool(self._arguments)

    def feed(self, char: str) -> list[Piece]:
        """Set `is_done` with the brace that closes it, `is_wrong` where it is no such object.

        `char` may be several characters that match `filling`.
        """
        if not self.is_announced:
            self._raw.append(char)
            self.num_raw += len(char)
        if self._state == "value":
            pieces = self._feed_value(char)
            if pieces is not None:
                return pieces
        if self._state == "key" and (char == '"' or self._value.first):
            self._value.takes(char)
            if self._value.is_complete:
                self._key, self._value, self._state = _decoded(self._value.text), _Value(), ":"
        elif char in SPACE:
            pass
        elif self._state == "{" and char == "{":
            self._state = "key"
        elif self._state in ("key", ",") and char == "}":
            return self._close()
        elif self._state == ":" and char == ":":
            self._state = "value"
        elif self._state == "," and char == ",":
            self._state = "key"
        else:
            self.is_wrong = True
        return []

    def _feed_value(self, char: str) -> list[Piece] | None:
        """None where the character lies behind the value, and is still to be read."""
        value, is_arguments = self._value, self._key in ARGUMENTS
        if not value.first and char in SPACE:
            return []
        if not value.first and char in ",:]}":
            self.is_wrong = True
            return []
        if not value.takes(char):
            self._value, self._state = _Value(), ","
            self.is_wrong |= self._key == "name" and self._name is None
            return None
        if is_arguments and value.first != '"':
            return self._give(char)
        if not value.is_complete or value.first != '"':
            return []
        self._value, self._state = _Value(), ","
        if is_arguments:  # JSON that was written down as a text
            return self._give(str(_decoded(value.text)))
        if self._key == "name" and self._name is None:
            self._name = _decoded(value.text) or None
            self.is_wrong = self._name is None
            waiting, self._arguments = "".join(self._arguments), []
            return self._give(waiting) if waiting else []
        return []

    def _give(self, text: str) -> list[Piece]:
        if self._name is None:
            self._arguments.append(text)
            return []
        begin: list[Piece] = [] if self.is_announced else [Begin(self._name)]
        self.is_announced = True
        return [*begin, Arguments(text)]

    def _close(self) -> list[Piece]:
        self.is_done = True
        if self.is_announced:
            return []
        self.is_wrong = self._name is None or self._needs_arguments
        return [] if self.is_wrong else self._give("{}")


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


class _Calls:
    """What the three forms have in common: text up to a mark, then objects, then text again."""

    marks: tuple[str, ...]  # each begins a place where calls stand
    needs_arguments = False  # whether an object without any is no call

    def __init__(self) -> None:
        self._held = ""  # may be the beginning of a mark
        self._call: _CallObject | None = None
        self._before = ""  # of the call under way: to be given as text if it is none
        self._gap: list[str] = []  # white space behind it
        self._in_calls = False

    def feed(self, text: str) -> list[Piece]:
        """Read character by character, and in one piece what cannot matter, so that it takes linear time."""
        pieces: list[Piece] = []
        at = 0
        while at < len(text):
            end = self._end_of_run(text, at)
            run, at = text[at:end], end
            pieces += self._feed_call(run) if self._in_calls else self._feed_text(run)
        return joined(pieces)

    def _end_of_run(self, text: str, at: int) -> int:
        """Return the end of the characters from `at` on that may be read as one."""
        if not self._in_calls:
            if self._held:
                return at + 1
            ends = [end for mark in self.marks if (end := text.find(mark[0], at)) >= 0]
            return max(min(ends, default=len(text)), at + 1)
        filling = self._filling
        found = filling.match(text, at) if filling is not None else None
        return found.end() if found else at + 1

    @property
    def _filling(self) -> re.Pattern[str] | None:
        """What changes nothing where calls stand."""
        return SPACES if self._call is None else self._call.filling

    def finish(self) -> list[Piece]:
        """A call that has begun stays as far as it came; what has not is text."""
        self._close_gap()
        call, held = self._call, self._held
        self._held, self._call = "", None
        if self._in_calls and call is not None:
            return [] if call.is_announced else [Text(self._before + call.raw)]
        if self._in_calls:
            return [Text(self._before)] if self._before.strip() else []
        return [Text(held)] if held else []

    def _feed_text(self, char: str) -> list[Piece]:
        self._held += char
        for mark in self.marks:
            if self._held.endswith(mark):
                text = self._held[: -len(mark)]
                self._held, self._in_calls, self._before = "", True, mark
                return [Text(text)] if text else []
        keep = max(_overlap(self._held, mark) for mark in self.marks)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return [Text(given)] if given else []

    def _feed_call(self, char: str) -> list[Piece]:
        if self._call is None:
            if char[0] in SPACE:
                self._gap.append(char)
                return []
            self._close_gap()
            return self._between(char)
        pieces = self._call.feed(char)
        is_long = self._call.num_raw > MAX_HELD and not self._call.is_likely
        if self._call.is_done or self._call.is_wrong or is_long:
            call, self._call = self._call, None
            if not call.is_announced:
                return self._as_text(call.raw)
            self._before = ""
            if call.is_wrong:  # it was announced, so it stays; what follows is text
                self._in_calls = False
        return pieces

    def _between(self, char: str) -> list[Piece]:
        """Read a character, no white space, before, between and behind the objects of a place with calls."""
        raise NotImplementedError

    def _close_gap(self) -> None:
        self._before += "".join(self._gap)
        self._gap = []

    def _begin(self, char: str) -> list[Piece]:
        self._call = _CallObject(needs_arguments=self.needs_arguments)
        return self._call.feed(char)

    def _as_text(self, more: str) -> list[Piece]:
        """It was no call: all that was held back is text, in which marks may stand again."""
        text, self._before, self._in_calls = self._before + more, "", False
        return [Text(text)] if text else []


class Hermes(_Calls):
    """Hermes', Qwen's: objects between <tool_call> and </tool_call>."""

    marks = ("<tool_call>",)
    END = "</tool_call>"

    def _between(self, char: str) -> list[Piece]:
        behind = self._before.removeprefix(self.marks[0]).strip(SPACE)
        if char == "{" and not behind:
            return self._begin(char)
        self._before += char
        behind = (behind + char).strip(SPACE)
        if behind == self.END:
            self._before, self._in_calls = "", False
        elif not self.END.startswith(behind):
            return self._as_text("")
        return []


class Mistral(_Calls):
    """Mistral's: [TOOL_CALLS] and a list of objects; or, since 2025, a name and its arguments' object."""

    marks = ("[TOOL_CALLS]",)
    NAMED = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[ARGS\]|\[CALL_ID\][^\[{]*\[ARGS\])?\s*\{")

    def __init__(self) -> None:
        super().__init__()
        self._value: _Value | None = None  # the arguments behind a name

    @property
    def _filling(self) -> re.Pattern[str] | None:
        return super()._filling if self._value is None else self._value.filling

    def _feed_call(self, char: str) -> list[Piece]:
        if self._value is not None:
            self._value.takes(char)
            if self._value.is_complete:
                self._value, self._in_calls = None, False
            return [Arguments(char)]
        return super()._feed_call(char)

    def _between(self, char: str) -> list[Piece]:
        self._before += char
        behind = self._before.removeprefix(self.marks[0])
        if found := self.NAMED.fullmatch(behind):
            self._before, self._value = "", _Value()
            self._value.takes("{")
            return [Begin(found[1]), Arguments("{")]
        if char == "{" and behind[:-1].strip(SPACE) in ("[", ","):
            self._before = self._before[:-1]
            return self._begin(char)
        stripped = behind.strip(SPACE)
        if stripped == "]":
            self._before, self._in_calls = "", False
        elif len(behind) > 256 or not re.fullmatch(r"\[?|,|[A-Za-z0-9_.-]+[^{]*", stripped):
            return self._as_text("")
        return []


class Llama3(_Calls):
    """Llama 3's: an answer that is nothing but objects, one behind the other with semicolons between."""

    marks = ("<|python_tag|>",)
    needs_arguments = True  # plain JSON may be an answer

    def __init__(self) -> None:
        super().__init__()
        self._in_calls = True  # an answer may begin with one

    def _between(self, char: str) -> list[Piece]:
        if char == "{":
            return self._begin(char)
        self._before += char
        behind = self._before.strip(SPACE)
        if behind in ("", ";") or any(mark.startswith(behind) for mark in self.marks):
            return []
        return self._as_text("")


PARSERS: dict[str, type[_Calls]] = {"hermes": Hermes, "llama3_json": Llama3, "mistral": Mistral}


def joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring pieces of text, and of arguments, as one."""
    made: list[Piece] = []
    for kind, same in itertools.groupby(pieces, type):
        if kind is Begin:
            made += same
        else:
            made.append(kind("".join(piece.text for piece in same if not isinstance(piece, Begin))))
    return made


def _overlap(text: str, mark: str) -> int:
    """How many of the text's last characters may begin the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def call_id(parser: str) -> str:
    """A new one; Mistral's templates want nine letters and digits."""
    if parser == "mistral":
        return "".join(random.choices(string.ascii_letters + string.digits, k=9))
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolDeltas:
    """Pieces as OpenAI's deltas for a stream.

    `calls` is what they come to: with their arguments once the last text has been read.
    """

    def __init__(self, parser: str, *, parallel: bool = True) -> None:
        self._parser: Parser = PARSERS[parser]()
        self._kind, self._parallel = parser, parallel
        self.calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []  # of each call, in the pieces in which they came
        self._is_dropped = False
        self._space = ""  # behind a call: left out, unless text follows

    def feed(self, text: str, *, is_last: bool) -> Iterator[dict[str, Any]]:
        """Deltas of what this text completes."""
        pieces = self._parser.feed(text)
        for piece in joined([*pieces, *self._parser.finish()] if is_last else pieces):
            if isinstance(piece, Text):
                self._space += piece.text
                if self._space.strip() or not self.calls:
                    yield {"content": self._space}
                    self._space = ""
            elif isinstance(piece, Begin):
                self._space = ""
                self._is_dropped = bool(self.calls) and not self._parallel
                if not self._is_dropped:
                    function = {"name": piece.name, "arguments": ""}
                    call = {"id": call_id(self._kind), "type": "function", "function": function}
                    self.calls.append(call)
                    self._arguments.append([])
                    yield {"tool_calls": [{"index": len(self.calls) - 1, **call, "function": {**function}}]}
            elif not self._is_dropped:
                self._arguments[-1].append(piece.text)
                index, function = len(self.calls) - 1, {"arguments": piece.text}
                yield {"tool_calls": [{"index": index, "function": function}]}
        if is_last:
            for its, parts in zip(self.calls, self._arguments, strict=True):
                its["function"]["arguments"] = "".join(parts)
