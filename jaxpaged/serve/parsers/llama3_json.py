"""Calls as Llama 3 writes them: an answer that is nothing but JSON objects, with semicolons between them."""

import re

from jaxpaged.serve.parsers.base import Marks, Parser, Reads, Source, Text
from jaxpaged.serve.parsers.json_calls import call_object
from jaxpaged.serve.parsers.registry import tool_parser

BEGIN = "<|python_tag|>"
AT_BEGIN = Marks(BEGIN)
BETWEEN = re.compile(r"[ \t\r\n;,]*")


@tool_parser("llama3_json", "llama4_json")
class Llama3Json(Parser):
    """Plain JSON may be an answer, so an object without arguments is no call."""

    signs = (BEGIN,)

    def read(self, source: Source) -> Reads[None]:
        """Yield the calls with which the answer begins, then text up to a mark, and the calls behind it."""
        mark = ""
        while True:
            before = yield from self._calls(source, mark)
            if before:
                yield Text(before)
            _, mark = yield from source.until(AT_BEGIN, Text)
            if not mark:
                return

    @staticmethod
    def _calls(source: Source, mark: str) -> Reads[str]:
        """Read objects as long as they are calls. Return what was read behind the last one, as text."""
        while True:
            source.record()
            yield from source.run(BETWEEN)
            if not mark and (yield from source.takes(BEGIN)):
                mark = BEGIN
                yield from source.run(BETWEEN)
                continue
            if not (yield from call_object(source, needs_arguments=True)):
                text = source.recorded()
                source.forget()
                return mark + text
            mark = ""
