"""Building blocks of answer parsers: fragments, the text as it comes, and a parser as a generator.

A parser is a class with one method, `read`, a generator over a `Source`. It yields fragments, and asks the
source for more text with `yield from`. The result does not depend on how the text is divided as it comes,
since the source's operations do not. Each character is looked at a bounded number of times.
"""

import dataclasses
import enum
import itertools
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

SPACE = re.compile(r"[ \t\r\n]*")


@dataclasses.dataclass(frozen=True)
class Text:
    """Text of the answer itself."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class Begin:
    """The beginning of a call. `id` is the call's, where the model itself gives one."""

    name: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class Arguments:
    """More of the JSON of the last call's arguments."""

    text: str


type Fragment = Text | Reasoning | Begin | Arguments
# A part of a parser: yields fragments, and None where it needs more text.
type Reads[T] = Generator[Fragment | None, None, T]
type Give = Callable[[str], Fragment]


class Marks:
    """Texts to look for. None of them may begin another one."""

    def __init__(self, *marks: str) -> None:
        self.marks = marks
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._longest = max(map(len, marks))

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def num_open(self, text: str, at: int) -> int:
        """Return how many of the text's last characters, from `at` on, may begin a mark."""
        for start in range(max(at, len(text) - self._longest + 1), len(text)):
            if any(mark.startswith(text[start:]) for mark in self.marks):
                return len(text) - start
        return 0


class Source:
    """Text of an answer that has been received and not yet read."""

    def __init__(self) -> None:
        self.is_whole = False
        self._text, self._at = "", 0
        self._record: list[str] | None = None

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(text)
        return text

    def record(self) -> None:
        """Keep the text that is read from now on, until `forget` or the next `record`."""
        self._record = []

    def recorded(self) -> str:
        return "".join(self._record or ())

    def forget(self) -> None:
        self._record = None

    def until(self, marks: Marks, give: Give | None = None) -> Reads[tuple[str, str]]:
        """Read up to a mark, and the mark. Return the text before it, and the mark, "" at the answer's end.

        With `give` the text is given as it comes, and the text returned is "".
        """
        parts: list[str] = []
        while True:
            match = marks.search(self._text, self._at)
            if match:
                end = match.start()
            else:
                end = len(self._text)
                end -= 0 if self.is_whole else marks.num_open(self._text, self._at)
            if end > self._at:
                text = self._take(end)
                if give is None:
                    parts.append(text)
                else:
                    yield give(text)
            if match:
                self._take(match.end())
                return "".join(parts), match[0]
            if self.is_whole:
                return "".join(parts), ""
            yield None

    def rest(self, give: Give) -> Reads[None]:
        """Read all remaining text, and give it as it arrives."""
        while True:
            if self._at < len(self._text):
                yield give(self._take(len(self._text)))
            if self.is_whole:
                return
            yield None

    def run(self, pattern: re.Pattern[str]) -> Reads[str]:
        """Read characters as long as they match. `pattern` must be a class of characters with a star."""
        parts: list[str] = []
        while True:
            match = pattern.match(self._text, self._at)
            if match and match.end() > self._at:
                parts.append(self._take(match.end()))
            if self._at < len(self._text) or self.is_whole:
                return "".join(parts)
            yield None

    def peek(self) -> Reads[str]:
        """Return the next character without reading it; "" at the answer's end."""
        while self._at == len(self._text):
            if self.is_whole:
                return ""
            yield None
        return self._text[self._at]

    def takes(self, *marks: str) -> Reads[str]:
        """Read one of the marks, if it comes next, and return it; else read nothing and return "".

        No mark may begin another one.
        """
        longest = max(map(len, marks))
        while True:
            rest = self._text[self._at : self._at + longest]
            for mark in marks:
                if rest.startswith(mark):
                    return self._take(self._at + len(mark))
            if self.is_whole or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield None

    def scan(
        self, scanner: Callable[[str, int], tuple[int, bool]], give: Give | None = None
    ) -> Reads[tuple[str, bool]]:
        """Read as far as a scanner says. Return the text ("" with `give`), and whether the scanner has ended.

        `scanner(text, at)` returns up to where it takes the text, and whether that is its end.
        """
        parts: list[str] = []
        while True:
            end, has_ended = scanner(self._text, self._at)
            if end > self._at:
                text = self._take(end)
                if give is None:
                    parts.append(text)
                else:
                    yield give(text)
            if has_ended or self.is_whole:
                return "".join(parts), has_ended
            yield None


def without_end[T](reads: Reads[T], give: Give, chars: str, max_chars: int | None = None) -> Reads[T]:
    """Give the text that `reads` gives, without up to `max_chars` characters of `chars` at its end."""
    held: list[str] = []
    while True:
        try:
            fragment = next(reads)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if fragment is None:
            yield None
            continue
        assert not isinstance(fragment, Begin)
        kept = fragment.text.rstrip(chars)
        if kept:
            yield give("".join([*held, kept]))
            held.clear()
        held.append(fragment.text[len(kept) :])
        if max_chars is not None and sum(map(len, held)) > max_chars:
            text = "".join(held)
            yield give(text[:-max_chars])
            held[:] = [text[-max_chars:]]


@dataclasses.dataclass(frozen=True)
class CallMarks:
    """Texts around the parts of a call that a model writes as marked JSON.

    A call is `before_name`, its name as JSON, `before_arguments`, them as JSON, and `end`. It begins with
    `trigger`, which stands nowhere else.
    """

    trigger: str
    before_name: str
    before_arguments: str
    end: str


class Reasons(enum.Enum):
    """Whether an answer that is not written yet begins with reasoning."""

    NOW = enum.auto()  # up to the mark of its end
    PERHAPS = enum.auto()  # if it begins with the mark of its beginning
    NO_MORE = enum.auto()


class Parser:
    """Reads one answer. Subclasses have the generator `read`.

    `tools` are those of the request, as OpenAI's; `prompt` is the text that the answer follows, `begun` what
    of that is the answer's own beginning, where a message is continued. `is_end` is asked whether the n-th
    `end_mark` of the text is that token, and not letters that look like it; None: each ends the reasoning.
    """

    # A chat template that has all of these is of a model that writes in this form.
    signs: ClassVar[tuple[str, ...]] = ()
    # The mark behind which the answer begins, for a parser of reasoning; None where no one mark tells it.
    end_mark: ClassVar[str | None] = None
    begin_mark: ClassVar[str | None] = None  # likewise, before it
    # How calls are written, for a parser of marked JSON; None for other forms.
    call_marks: ClassVar[CallMarks | None] = None

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), prompt: str = "", begun: str = "") -> None:
        self.tools, self.prompt, self.begun = tools, prompt, begun
        self.is_end: Callable[[int], bool] | None = None
        self._source = Source()
        self._reading = self.read(self._source)

    @classmethod
    def reasons(cls, prompt: str, begun: str) -> Reasons:
        """Return whether reasoning follows a prompt, of which `begun` is the answer's own beginning."""
        return Reasons.NOW

    def read(self, source: Source) -> Reads[None]:
        """Yield the answer's fragments. Must not return before the answer's end."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Fragment]:
        """Return the fragments that these characters complete."""
        self._source.add(text)
        return self._fragments()

    def finish(self) -> list[Fragment]:
        """Return the fragments that are left at the answer's end."""
        self._source.is_whole = True
        return self._fragments()

    def _fragments(self) -> list[Fragment]:
        return merged(itertools.takewhile(lambda fragment: fragment is not None, self._reading))


class Chain:
    """A parser of the reasoning, and one of the calls in what is left."""

    def __init__(self, reasoning: Parser, calls: Parser) -> None:
        self._reasoning, self._calls = reasoning, calls

    def feed(self, text: str) -> list[Fragment]:
        """Return the fragments that these characters complete."""
        return self._through(self._reasoning.feed(text))

    def finish(self) -> list[Fragment]:
        """Return the fragments that are left at the answer's end."""
        return merged([*self._through(self._reasoning.finish()), *self._calls.finish()])

    def _through(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        made: list[Fragment] = []
        for fragment in fragments:
            made += self._calls.feed(fragment.text) if isinstance(fragment, Text) else [fragment]
        return made


class NoCalls:
    """Parser that leaves calls as text, for requests without tools."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Fragment]:
        """Return the fragments that these characters complete."""
        return self._as_text(self._parser.feed(text))

    def finish(self) -> list[Fragment]:
        """Return the fragments that are left at the answer's end."""
        return self._as_text(self._parser.finish())

    @staticmethod
    def _as_text(fragments: Sequence[Fragment]) -> list[Fragment]:
        texts = [
            Text(fragment.text) if isinstance(fragment, Arguments) else fragment for fragment in fragments
        ]
        return merged(fragment for fragment in texts if not isinstance(fragment, Begin))


def merged(fragments: Any) -> list[Fragment]:
    """Return the fragments with neighbours of one kind joined; fragments that begin calls are not joined."""
    made: list[Fragment] = []
    for kind, group in itertools.groupby(fragments, key=type):
        if kind is Begin:
            made += group
        else:
            text = "".join(fragment.text for fragment in group)
            if text:
                made.append(kind(text))
    return made
