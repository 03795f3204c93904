"""Calls as DeepSeek V3 and R1 write them, with the arguments in a block of code, and V3.1, without.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name
    ```json
    {"key": "value"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 has the name before the separator, and the arguments behind it.
"""

import re

from jaxpaged.serve.parsers.base import SPACE, Begin, Marks, Reads, Source
from jaxpaged.serve.parsers.json_calls import arguments_value
from jaxpaged.serve.parsers.marked_calls import MarkedCalls
from jaxpaged.serve.parsers.registry import tool_parser

ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
AT_SEPARATOR = Marks(SEPARATOR, END, ALL_END)
NAME = re.compile(r"[A-Za-z0-9_.:/-]*")


@tool_parser("deepseek_v3", "deepseek_v31")
class DeepSeekV3(MarkedCalls):
    """Both forms are read by what stands behind the separator."""

    signs = (ALL_BEGIN, SEPARATOR)
    begin, around = BEGIN, (ALL_BEGIN, ALL_END, END)

    def call(self, source: Source) -> Reads[bool]:
        """Read and give a call from behind its first mark on. Return whether it is one."""
        name, mark = yield from source.until(AT_SEPARATOR)
        if mark != SEPARATOR:
            return False
        yield from source.run(SPACE)
        if (yield from source.peek()) != "{":
            name = yield from source.run(NAME)
            yield from source.run(SPACE)
            if (yield from source.takes("```")):
                yield from source.takes("json")
            yield from source.run(SPACE)
        if not name.strip() or (yield from source.peek()) != "{":
            return False
        source.forget()
        yield Begin(name.strip())
        yield from arguments_value(source)
        yield from source.run(SPACE)
        yield from source.takes("```")
        return True
