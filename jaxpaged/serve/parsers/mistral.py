"""Calls as Mistral's models write them: [TOOL_CALLS], and a list of objects, or a name and its arguments."""

import re

from jaxpaged.serve.parsers.base import SPACE, Begin, Marks, Parser, Reads, Source, Text
from jaxpaged.serve.parsers.json_calls import arguments_value, call_object
from jaxpaged.serve.parsers.registry import tool_parser

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
AT_BEGIN = Marks(BEGIN)
NAME = re.compile(r"[A-Za-z0-9_.-]*")
ID = re.compile(r"[A-Za-z0-9_-]*")


@tool_parser("mistral")
class Mistral(Parser):
    """The list is older; names are of 2025 and later, with [CALL_ID] and [ARGS] in some models."""

    signs = (BEGIN,)

    def read(self, source: Source) -> Reads[None]:
        """Yield text up to a mark, then the calls behind it."""
        while True:
            _, mark = yield from source.until(AT_BEGIN, Text)
            if not mark:
                return
            source.record()
            yield from source.run(SPACE)
            is_call = yield from (
                self._list(source) if (yield from source.takes("[")) else self._named(source)
            )
            if not is_call:
                yield Text(BEGIN + source.recorded())
            source.forget()

    @staticmethod
    def _list(source: Source) -> Reads[bool]:
        """Read objects up to a closing bracket. Return whether the first is a call."""
        yield from source.run(SPACE)
        if not (yield from call_object(source)):
            return False
        while True:
            source.record()
            yield from source.run(SPACE)
            if not (yield from source.takes(",")):
                yield from source.takes("]")
                return True
            yield from source.run(SPACE)
            if not (yield from call_object(source)):
                yield Text(source.recorded())
                return True

    @staticmethod
    def _named(source: Source) -> Reads[bool]:
        """Read a name and its arguments. Return whether there are both."""
        name = yield from source.run(NAME)
        yield from source.run(SPACE)
        call_id = None
        if (yield from source.takes(CALL_ID)):
            call_id = (yield from source.run(ID)) or None
        yield from source.takes(ARGS)
        yield from source.run(SPACE)
        if not name or (yield from source.peek()) != "{":
            return False
        source.forget()
        yield Begin(name, call_id)
        yield from arguments_value(source)
        return True
