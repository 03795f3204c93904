"""Answers as gpt-oss writes them, in the form that is called harmony: messages in channels.

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{"key": "value"}<|call|>
<|start|>assistant<|channel|>final<|message|>answer<|return|>
"""

import re

from jaxpaged.serve.parsers.base import (
    SPACE,
    Arguments,
    Begin,
    Give,
    Marks,
    Parser,
    Reads,
    Reasoning,
    Source,
    Text,
)
from jaxpaged.serve.parsers.json_calls import object_text
from jaxpaged.serve.parsers.registry import reasoning_parser, tool_parser

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
AT_HEADER = Marks(START, CHANNEL, *ENDS)
AT_MESSAGE = Marks(MESSAGE)
AT_END = Marks(START, *ENDS)
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."


@tool_parser("openai")
@reasoning_parser("openai_gptoss")
class Harmony(Parser):
    """Channel "analysis" is reasoning, a message to a function is a call, all else the answer's text.

    Both parsers' names mean this class: the form can't be read in halves.
    """

    signs = (CHANNEL, MESSAGE)

    def read(self, source: Source) -> Reads[None]:
        """Yield the contents of the messages in their order; a line feed separates two of one kind."""
        names = {(tool.get("function") or {}).get("name") for tool in self.tools}
        given: set[Give] = set()
        mark = ""
        while True:
            if mark not in (START, CHANNEL):
                _, mark = yield from source.until(AT_HEADER, Text)
                if not mark:
                    return
                continue
            header, end = yield from source.until(AT_MESSAGE)
            if not end:
                return  # the answer was cut within a header
            header = mark + header
            recipient = RECIPIENT.search(header)
            name = recipient[1] if recipient else ""
            if name.startswith(FUNCTIONS) or name in names:
                yield Begin(name.removeprefix(FUNCTIONS))
                mark = yield from self._arguments(source)
                continue
            channel = CHANNEL_NAME.search(header)
            give: Give = Reasoning if channel is not None and channel[1] == "analysis" else Text
            if give in given:
                yield give("\n")
            given.add(give)
            _, mark = yield from source.until(AT_END, give)

    @staticmethod
    def _arguments(source: Source) -> Reads[str]:
        """Give the body of a call. Return the mark that ended it."""
        yield from source.run(SPACE)
        if (yield from source.peek()) == "{":
            _, mark = yield from source.until(AT_END, Arguments)
        else:
            text, mark = yield from source.until(AT_END)
            yield Arguments(object_text(text.strip()))
        return mark
