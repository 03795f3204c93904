"""Assembly of an answer's text into OpenAI's messages and deltas, by way of parsed fragments.

The result does not depend on how the text is divided as it comes. Space before and behind calls is left out,
unless text follows.
"""

import dataclasses
import random
import string
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpaged.serve.parsers import REASONING_PARSERS, answer_parser
from jaxpaged.serve.parsers.base import Begin, Fragment, Parser, Reasoning, Text
from jaxpaged.serve.parsers.forced import NAMED
from jaxpaged.structured_outputs import StructuredOutputsParams

SPACE = " \t\r\n"


@dataclasses.dataclass(frozen=True)
class Form:
    """Form of an answer: the parsers that read it, and the request that it answers.

    `calls` and `reasoning` are names of parsers, or None. `tools` are the request's. `prompt` is the text
    that the answer follows, and `begun` the part of it that the answer continues. `parallel`: whether calls
    after the first are reported. `includes_reasoning`: whether reasoning is. `constraint`: what calls must
    look like, where they are forced. `strict`: what an answer must look like that may have calls of strict
    tools.
    """

    calls: str | None = None
    reasoning: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str = ""
    begun: str = ""
    parallel: bool = True
    includes_reasoning: bool = True
    constraint: StructuredOutputsParams | None = None
    strict: StructuredOutputsParams | None = None

    @property
    def ends_with_calls(self) -> bool:
        """Whether calls are the reason why an answer ends: not where the client has named the only one."""
        return self.calls != NAMED

    @property
    def is_plain(self) -> bool:
        """Whether the answer is text, and nothing else is looked for."""
        return self.calls is None and self.reasoning is None


def call_id(parser: str | None) -> str:
    """Return a new id for a call; Mistral's templates want nine letters and digits."""
    if parser == "mistral":
        return "".join(random.choices(string.ascii_letters + string.digits, k=9))
    return f"call_{uuid.uuid4().hex[:24]}"


class ReasoningTokens:
    """Count of the tokens of one answer that are reasoning, without the tokens of its marks.

    Where the end mark is no token of its own, the reasoning's text is written in tokens and counted.
    """

    def __init__(self, reasoning: str | None, tokenizer: Any) -> None:
        parser, self._tokenizer = REASONING_PARSERS.get(reasoning or "", Parser), tokenizer
        self._begin, self._end = (_token_of(mark, tokenizer) for mark in (parser.begin_mark, parser.end_mark))
        self._end_mark, self._before = parser.end_mark or "", list[int]()  # tokens before the end
        self._num_alike: int | None = None  # marks of the end among their letters
        self._num, self._has_begin, self._has_end, self._has_answer = 0, False, False, False
        self._text: list[str] = []

    def note_tokens(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens."""
        if self._has_end:
            return
        if self._end in token_ids:
            token_ids, self._has_end = token_ids[: token_ids.index(self._end)], True
        self._before += token_ids
        self._num += len(token_ids)
        self._has_begin |= self._begin in token_ids

    def is_end(self, num: int) -> bool:
        """Return whether so many marks of the end in the text are enough: the last one is that token."""
        if self._end is None:
            return True
        if self._has_end and self._num_alike is None:
            text = self._tokenizer.decode(self._before, skip_special_tokens=False)
            self._num_alike = text.count(self._end_mark)
        return self._num_alike is not None and num > self._num_alike

    def note(self, fragment: Fragment) -> None:
        """Take in the next fragment of the text."""
        if isinstance(fragment, Reasoning):
            self._text.append(fragment.text)
        else:
            self._has_answer = True

    @property
    def num(self) -> int:
        """Tokens of the reasoning so far."""
        if not self._text:
            return 0
        if not self._has_end and self._has_answer:
            encoded = self._tokenizer.encode("".join(self._text), add_special_tokens=False)
            return min(len(encoded), self._num)
        return self._num - self._has_begin


class AnswerFragments:
    """The fragments of one answer, each call with an id, and no space that belongs to none of them.

    reasoned: counts the reasoning among all fragments, reported or not.
    """

    def __init__(self, form: Form, reasoned: ReasoningTokens | None = None) -> None:
        self._form, self._reasoned = form, reasoned
        self._parser = answer_parser(
            form.calls,
            form.reasoning,
            tools=form.tools,
            prompt=form.prompt,
            begun=form.begun,
            is_end=None if reasoned is None else reasoned.is_end,
        )
        self._num_calls = 0
        self._has_text = self._is_dropped = False
        self._space: list[str] = []  # held back until text follows

    def feed(self, text: str, *, is_last: bool) -> Iterator[Fragment]:
        """Yield the fragments that this text completes."""
        if self._parser is None:
            if text:
                yield Text(text)
            return
        fragments = self._parser.feed(text)
        for fragment in [*fragments, *self._parser.finish()] if is_last else fragments:
            if self._reasoned is not None:
                self._reasoned.note(fragment)
            yield from self._reported(fragment)
        if is_last and not self._num_calls and self._space:
            yield Text("".join(self._space))

    def _reported(self, fragment: Fragment) -> Iterator[Fragment]:
        if isinstance(fragment, Text):
            kept = fragment.text.rstrip(SPACE)
            if kept:
                yield Text("".join([*self._space, kept]))
                self._space, self._has_text = [], True
            self._space.append(fragment.text[len(kept) :])
        elif isinstance(fragment, Reasoning):
            if self._form.includes_reasoning:
                yield fragment
        elif isinstance(fragment, Begin):
            if self._has_text and not self._num_calls and any(self._space):
                yield Text("".join(self._space))
            self._space = []
            self._is_dropped = self._num_calls > 0 and not self._form.parallel
            self._num_calls += 1
            if not self._is_dropped:
                yield Begin(fragment.name, fragment.id or call_id(self._form.calls))
        elif not self._is_dropped:
            yield fragment


class ToolDeltas:
    """Fragments as OpenAI's deltas for a stream. `calls` and `reasoning` are what they come to."""

    def __init__(
        self, form: Form | str, reasoned: ReasoningTokens | None = None, *, parallel: bool = True
    ) -> None:
        """Start reading an answer. `form` may be the name of a parser of calls."""
        answer_form = Form(calls=form, parallel=parallel) if isinstance(form, str) else form
        self._fragments = AnswerFragments(answer_form, reasoned)
        self._calls: list[tuple[dict[str, Any], list[str]]] = []
        self._reasoning: list[str] = []

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls so far, as in a message."""
        return [
            {**call, "function": {**call["function"], "arguments": "".join(arguments)}}
            for call, arguments in self._calls
        ]

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    @property
    def reasoning(self) -> str:
        """Text of the reasoning so far."""
        return "".join(self._reasoning)

    def feed(self, text: str, *, is_last: bool) -> Iterator[dict[str, Any]]:
        """Yield the deltas of the fragments that this text completes."""
        for fragment in self._fragments.feed(text, is_last=is_last):
            if isinstance(fragment, Text):
                yield {"content": fragment.text}
            elif isinstance(fragment, Reasoning):
                self._reasoning.append(fragment.text)
                yield reasoning_fields(fragment.text)
            elif isinstance(fragment, Begin):
                call = {
                    "id": fragment.id,
                    "type": "function",
                    "function": {"name": fragment.name, "arguments": ""},
                }
                self._calls.append((call, []))
                yield {"tool_calls": [{"index": len(self._calls) - 1, **call}]}
            else:
                self._calls[-1][1].append(fragment.text)
                delta = {"index": len(self._calls) - 1, "function": {"arguments": fragment.text}}
                yield {"tool_calls": [delta]}


def _token_of(mark: str | None, tokenizer: Any) -> int | None:
    """Return the token that a mark is; None if it is several, or if there is no mark."""
    ids = tokenizer.encode(mark, add_special_tokens=False) if mark else []
    return ids[0] if len(ids) == 1 else None


def reasoning_fields(text: str) -> dict[str, str]:
    """Return the fields of a delta or message that tell reasoning, by vLLM's older and newer names."""
    return {"reasoning_content": text, "reasoning": text}


def contents(deltas: Iterable[Mapping[str, Any]]) -> str:
    """Return the content that deltas come to."""
    return "".join([delta.get("content") or "" for delta in deltas])
