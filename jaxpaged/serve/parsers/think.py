"""Reasoning between <think> and </think> before the answer, as Qwen3, DeepSeek R1, GLM-4.5, Kimi write it."""

import itertools
import re
from typing import ClassVar

from jaxpaged.serve.parsers.base import Marks, Parser, Reads, Reasoning, Reasons, Source, Text, without_end
from jaxpaged.serve.parsers.kimi_k2 import ALL_BEGIN
from jaxpaged.serve.parsers.registry import reasoning_parser

BEGIN, END = "<think>", "</think>"
LINES, SPACE = re.compile(r"[\r\n]*"), re.compile(r"[ \t\r\n]*")


@reasoning_parser("qwen3", "glm45", "deepseek_v3")
class Qwen3(Parser):
    """Reads reasoning where the answer begins with <think>, or the prompt ends with it.

    Line feeds beside the marks belong to them, as in the models' templates, and are not given. An answer that
    ends before </think> is all reasoning. Where </think> is a token, its letters alone end nothing.
    """

    end_mark: ClassVar[str | None] = END
    begin_mark: ClassVar[str | None] = BEGIN
    is_open: ClassVar[bool] = False  # where neither prompt nor answer has a mark
    other_ends: ClassVar[tuple[str, ...]] = ()  # marks of what comes behind the reasoning, without </think>

    @classmethod
    def reasons(cls, prompt: str, begun: str) -> Reasons:
        """Return whether reasoning follows a prompt, of which `begun` is the answer's own beginning."""
        prompt, begun = prompt.rstrip(), begun.strip()
        if begun:
            is_open = END not in begun and (cls.is_open or begun.startswith(BEGIN))
            return Reasons.NOW if is_open else Reasons.NO_MORE
        if prompt.endswith(BEGIN) or (cls.is_open and not prompt.endswith(END)):
            return Reasons.NOW
        return Reasons.NO_MORE if prompt.endswith(END) else Reasons.PERHAPS

    def read(self, source: Source) -> Reads[None]:
        """Yield the reasoning, if there is any, then the answer's text."""
        is_open, space = self.reasons(self.prompt, self.begun) is Reasons.NOW, ""
        if not self.begun.strip():
            space = yield from source.run(SPACE)
            if (yield from source.takes(BEGIN)):
                is_open = True
                yield from source.run(SPACE)
        if is_open:
            mark = yield from without_end(self.until_end(source), Reasoning, "\r\n")
            if mark in self.other_ends:
                yield Text(mark)
            else:
                yield from source.run(LINES)
        elif space:
            yield Text(space)
        yield from source.rest(Text)

    def until_end(self, source: Source) -> Reads[str]:
        """Give the reasoning's text, and return the mark that ends it, "" at the answer's end."""
        at_end = Marks(END, *self.other_ends)
        for num in itertools.count(1):
            _, mark = yield from source.until(at_end, Reasoning)
            if mark != END or self.is_end is None or self.is_end(num):
                return mark
            yield Reasoning(mark)
        raise AssertionError


@reasoning_parser("deepseek_r1")
class DeepSeekR1(Qwen3):
    """Reads all up to </think> as reasoning, <think> or not, unless the prompt ends with </think>."""

    is_open = True


@reasoning_parser("kimi_k2")
class KimiK2Thinking(Qwen3):
    """Calls may begin within the reasoning, and end it."""

    other_ends = (ALL_BEGIN,)
