"""Calls as Kimi K2 writes them, each with an id that has the function's name in it.

<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{"key": "value"}
<|tool_call_end|><|tool_calls_section_end|>
"""

from jaxpaged.serve.parsers.base import SPACE, Begin, Marks, Reads, Source
from jaxpaged.serve.parsers.json_calls import arguments_value
from jaxpaged.serve.parsers.marked_calls import MarkedCalls
from jaxpaged.serve.parsers.registry import tool_parser

ALL_BEGIN, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENT, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SINGULAR = ("<|tool_call_section_begin|>", "<|tool_call_section_end|>")  # which the model writes at times
AT_ARGUMENT = Marks(ARGUMENT, END, ALL_END)


@tool_parser("kimi_k2")
class KimiK2(MarkedCalls):
    """The id stays the call's own, for the template writes it again."""

    signs = (ALL_BEGIN,)
    begin, around = BEGIN, (ALL_BEGIN, ALL_END, *SINGULAR, END)

    def call(self, source: Source) -> Reads[bool]:
        """Read and give a call from behind its first mark on. Return whether it is one."""
        written, mark = yield from source.until(AT_ARGUMENT)
        call_id = written.strip()
        name, colon, number = call_id.removeprefix("functions.").rpartition(":")
        name = name if colon and number.isdigit() else call_id.removeprefix("functions.")
        if mark != ARGUMENT or not name:
            return False
        source.forget()
        yield Begin(name, call_id)
        yield from source.run(SPACE)
        yield from arguments_value(source)
        return True
