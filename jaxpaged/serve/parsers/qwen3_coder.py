"""Calls as Qwen3-Coder writes them: a function's name, and values as plain text, in tags.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Values become JSON by the tool's schema; what the schema does not know is a string.
"""

import json
import re

from jaxpaged.serve.parsers.base import (
    SPACE,
    Arguments,
    Begin,
    Marks,
    Parser,
    Reads,
    Source,
    Text,
    without_end,
)
from jaxpaged.serve.parsers.registry import tool_parser
from jaxpaged.serve.parsers.values import ParameterTypes, as_string

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
AT_BEGIN = Marks(BEGIN, FUNCTION)
AT_PARAMETER = Marks(PARAMETER, FUNCTION_END, END)
# The next parameter or the function's end close a value whose own end is missing.
AT_VALUE_END = Marks(PARAMETER_END, PARAMETER, FUNCTION_END)
NAME = re.compile(r"[^<>=\s\"']*")


@tool_parser("qwen3_coder", "qwen3_xml")
class Qwen3Coder(Parser):
    """<tool_call> may be missing, as the model often leaves it out."""

    signs = (BEGIN, FUNCTION)

    def read(self, source: Source) -> Reads[None]:
        """Yield text up to a mark, then the call behind it."""
        types = ParameterTypes(self.tools)
        while True:
            _, mark = yield from source.until(AT_BEGIN, Text)
            if not mark:
                return
            source.record()
            if mark == BEGIN:
                yield from source.run(SPACE)
            if mark == FUNCTION or (yield from source.takes(FUNCTION)):
                name = yield from source.run(NAME)
                if name and (yield from source.takes(">")):
                    source.forget()
                    yield Begin(name)
                    yield from self._parameters(source, types, name)
                    yield from self._end(source)
                    continue
            yield Text(mark + source.recorded())
            source.forget()

    @staticmethod
    def _end(source: Source) -> Reads[None]:
        """Read the marks behind a call, as many of them as there are."""
        source.record()
        yield from source.run(SPACE)
        if not (yield from source.takes(END)):
            yield Text(source.recorded())
        source.forget()

    @staticmethod
    def _parameters(source: Source, types: ParameterTypes, function: str) -> Reads[None]:
        """Give the parameters as members of an object; text between them is dropped."""
        before, mark = "{", ""
        while True:
            if mark != PARAMETER:
                between, mark = yield from source.until(AT_PARAMETER)
                if not mark:
                    yield Text(between)
                    return  # the answer was cut: so are the arguments
            if mark != PARAMETER:
                break
            key = yield from source.run(NAME)
            yield from source.takes(">")
            yield from source.takes("\r\n", "\n")
            yield Arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if types.is_text(function, key):
                yield Arguments('"')
                value = source.until(AT_VALUE_END, Arguments)
                _, mark = yield from without_end(value, as_string, "\n", max_chars=1)
                yield Arguments('"' if mark else "")
            else:
                text, mark = yield from source.until(AT_VALUE_END)
                yield Arguments(types.json(function, key, text.removesuffix("\n")) if mark else text)
            if not mark:
                return
            if mark == FUNCTION_END:
                break
        yield Arguments("{}" if before == "{" else "}")
