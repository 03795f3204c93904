"""Calls as Hermes and Qwen write them: a JSON object between <tool_call> and </tool_call>."""

from jaxpaged.serve.parsers.base import SPACE, CallMarks, Marks, Parser, Reads, Source, Text
from jaxpaged.serve.parsers.json_calls import call_object
from jaxpaged.serve.parsers.registry import tool_parser

BEGIN, END = "<tool_call>", "</tool_call>"
AT_BEGIN, AT_EITHER = Marks(BEGIN), Marks(BEGIN, END)


@tool_parser("hermes")
class Hermes(Parser):
    """Several objects may stand between two marks. A call whose last brace or mark is missing is one, too."""

    signs = (BEGIN,)
    call_marks = CallMarks(BEGIN, f'{BEGIN}\n{{"name": ', ', "arguments": ', f"}}\n{END}")

    def read(self, source: Source) -> Reads[None]:
        """Yield text up to a mark, then the calls behind it."""
        mark = ""
        while True:
            if not mark:
                _, mark = yield from source.until(AT_BEGIN, Text)
                if not mark:
                    return
            mark = yield from self._block(source)

    def _block(self, source: Source) -> Reads[str]:
        """Read from behind <tool_call> on. Return <tool_call> if another one was read, else ""."""
        source.record()
        yield from source.run(SPACE)
        if not (yield from call_object(source)):
            yield Text(BEGIN + source.recorded())
            source.forget()
            return ""
        while True:
            yield from source.run(SPACE)
            if (yield from source.takes(END)):
                return ""
            if (yield from source.peek()) != "{":
                break
            source.record()
            if not (yield from call_object(source)):
                yield Text(source.recorded())
                source.forget()
                break
        # Something else: text, but the mark that belongs to the call is not.
        _, mark = yield from source.until(AT_EITHER, Text)
        return "" if mark == END else mark
