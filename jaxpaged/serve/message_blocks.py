"""Content blocks of a message, and the events that tell of them as they come, in Anthropic's order."""

from collections.abc import Iterable, Iterator
from typing import Any

from jaxpaged.serve.parsers.base import Arguments, Begin, Fragment, Reasoning
from jaxpaged.serve.turns import text_digest
from jaxpaged.text.conversations import strict_json


class OpenBlock:
    """A block under way."""

    def __init__(self, fragment: Fragment) -> None:
        self._begin = fragment
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Text that has come so far; of a call, the JSON of its arguments."""
        return "".join(self._texts)

    def takes(self, fragment: Fragment) -> bool:
        """Tell whether a fragment belongs to the block."""
        kind = Arguments if isinstance(self._begin, Begin) else type(self._begin)
        return isinstance(fragment, kind)

    @property
    def start(self) -> dict[str, Any]:
        """The block as it begins: empty."""
        begin = self._begin
        if isinstance(begin, Begin):
            return {"type": "tool_use", "id": begin.id, "name": begin.name, "input": {}}
        if isinstance(begin, Reasoning):
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    @property
    def whole(self) -> dict[str, Any]:
        """The block, complete."""
        begin = self._begin
        if isinstance(begin, Begin):
            return self.start | {"input": _input(self.text)}
        if isinstance(begin, Reasoning):
            return self.start | {"thinking": self.text, "signature": self.signature}
        return self.start | {"text": self.text}

    @property
    def signature(self) -> str:
        """Signature of reasoning, which clients send back; nothing checks it."""
        return text_digest(self.text).hex()

    def add(self, text: str) -> dict[str, Any]:
        """Return the delta of more of its text."""
        self._texts.append(text)
        if isinstance(self._begin, Begin):
            return {"type": "input_json_delta", "partial_json": text}
        if isinstance(self._begin, Reasoning):
            return {"type": "thinking_delta", "thinking": text}
        return {"type": "text_delta", "text": text}

    def last(self) -> dict[str, Any] | None:
        """Return the delta at the block's end; None if there is none."""
        if isinstance(self._begin, Reasoning):
            return {"type": "signature_delta", "signature": self.signature}
        return None


class Blocks:
    """The content of one message. `content` has the blocks that are complete."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._open: OpenBlock | None = None

    @property
    def has_calls(self) -> bool:
        """Whether any block is a call that is complete."""
        return any(block["type"] == "tool_use" for block in self.content)

    def add(self, fragments: Iterable[Fragment]) -> Iterator[dict[str, Any]]:
        """Yield the events of more fragments."""
        for fragment in fragments:
            if self._open is None or not self._open.takes(fragment):
                yield from self.end()
                self._open = OpenBlock(fragment)
                yield self._event("content_block_start", content_block=self._open.start)
            if not isinstance(fragment, Begin) and fragment.text:
                yield self._event("content_block_delta", delta=self._open.add(fragment.text))

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the end of the last block."""
        if self._open is None:
            return
        if (delta := self._open.last()) is not None:
            yield self._event("content_block_delta", delta=delta)
        yield self._event("content_block_stop")
        self.content.append(self._open.whole)
        self._open = None

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self.content), **fields}


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call: what is no JSON object, as a call that was cut, is one text in it."""
    try:
        value = strict_json(text or "{}")
    except (ValueError, RecursionError):
        value = text
    return {} if value is None else value if isinstance(value, dict) else {"arguments": text}
