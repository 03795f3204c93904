"""Calls between marks that are tokens of their own, which no other text has: what DeepSeek and Kimi share."""

from typing import ClassVar

from jaxpaged.serve.parsers.base import Marks, Parser, Reads, Source, Text


class MarkedCalls(Parser):
    """A call stands behind `begin`; the marks `around` calls are left out wherever they are."""

    begin: ClassVar[str]
    around: ClassVar[tuple[str, ...]]

    def read(self, source: Source) -> Reads[None]:
        """Yield text up to a mark, then the call behind it."""
        marks = Marks(self.begin, *self.around)
        while True:
            _, mark = yield from source.until(marks, Text)
            if not mark:
                return
            if mark == self.begin:
                source.record()
                if not (yield from self.call(source)):
                    yield Text(self.begin + source.recorded())
                source.forget()

    def call(self, source: Source) -> Reads[bool]:
        """Read and give a call from behind its first mark on. Return whether it is one."""
        raise NotImplementedError
