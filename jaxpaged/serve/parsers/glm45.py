"""Calls as GLM-4.5 and later write them: a name, then each argument as a key and a value in tags.

    <tool_call>name
    <arg_key>key</arg_key>
    <arg_value>value</arg_value>
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
)
from jaxpaged.serve.parsers.registry import tool_parser
from jaxpaged.serve.parsers.values import ParameterTypes, as_string

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
AT_BEGIN, AT_KEY, AT_KEY_END = Marks(BEGIN), Marks(KEY, END), Marks(KEY_END, END)
# The next key or the call's end close a value whose own end is missing.
AT_VALUE_END = Marks(VALUE_END, KEY, END)
NAME = re.compile(r"[A-Za-z0-9_.:/-]*")


@tool_parser("glm45", "glm47")
class Glm45(Parser):
    """Line feeds between the tags may be missing: GLM-4.7 writes none."""

    signs = (BEGIN, KEY)

    def read(self, source: Source) -> Reads[None]:
        """Yield text up to a mark, then the call behind it."""
        types = ParameterTypes(self.tools)
        while True:
            _, mark = yield from source.until(AT_BEGIN, Text)
            if not mark:
                return
            source.record()
            yield from source.run(SPACE)
            name = yield from source.run(NAME)
            yield from source.run(SPACE)
            mark = (yield from source.takes(KEY, END)) if name else ""
            if mark:
                source.forget()
                yield Begin(name)
                yield from self._arguments(source, types, name, mark)
            else:
                yield Text(BEGIN + source.recorded())
                source.forget()

    @staticmethod
    def _arguments(source: Source, types: ParameterTypes, function: str, mark: str) -> Reads[None]:
        """Give the arguments as members of an object, from behind the first mark on."""
        before = "{"
        while mark == KEY:
            key, mark = yield from source.until(AT_KEY_END)
            yield from source.run(SPACE)
            if mark != KEY_END or not (yield from source.takes(VALUE)):
                break
            yield Arguments(f"{before}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            before = ", "
            if types.is_text(function, key.strip()):
                yield Arguments('"')
                _, mark = yield from source.until(AT_VALUE_END, as_string)
                yield Arguments('"' if mark else "")
            else:
                text, mark = yield from source.until(AT_VALUE_END)
                yield Arguments(types.json(function, key.strip(), text) if mark else text)
            if mark == VALUE_END:
                between, mark = yield from source.until(AT_KEY)
                if not mark:
                    yield Text(between)
            if not mark:
                return  # the answer was cut: so are the arguments
        yield Arguments("{}" if before == "{" else "}")
