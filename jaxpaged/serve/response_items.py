"""The items of a response's output, and the events that tell of them as they come, in OpenAI's order."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpaged.checks import InputError, check, shown
from jaxpaged.serve.parsers.base import Arguments, Begin, Fragment, Reasoning, Text

# An event's name without "response.", and what it says.
type Event = tuple[str, dict[str, Any]]


class OpenItem:
    """Item of a response that is not complete, and the names of its events."""

    kind: str
    prefix: str
    delta: str

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.index = index
        self._texts: list[str] = []

    @property
    def at(self) -> dict[str, Any]:
        """Fields of an event that locate the item."""
        return {"item_id": self.id, "output_index": self.index}

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def item(self, status: str) -> dict[str, Any]:
        """Return the item, complete so far."""
        raise NotImplementedError

    def begin(self) -> Iterator[Event]:
        """Yield the events of the item's beginning."""
        yield "output_item.added", {"output_index": self.index, "item": self.item("in_progress")}

    def add(self, text: str, more: dict[str, Any] | None = None) -> Event:
        """Return the event of a further piece of the item's text."""
        self._texts.append(text)
        return f"{self.delta}.delta", self.at | {"delta": text} | (more or {})

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events of the item's end."""
        yield "output_item.done", {"output_index": self.index, "item": self.item(status)}


class OpenPart(OpenItem):
    """An item with one part of text."""

    def part(self) -> dict[str, Any]:
        """Return the part, complete so far."""
        raise NotImplementedError

    def done(self) -> dict[str, Any]:
        """Return the fields of the event at the end of the item's text."""
        return self.at | {"text": self.text}

    @property
    def at(self) -> dict[str, Any]:
        return super().at | {"content_index": 0}

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield "content_part.added", self.at | {"part": self.part()}

    def end(self, status: str) -> Iterator[Event]:
        yield f"{self.delta}.done", self.done()
        yield "content_part.done", self.at | {"part": self.part()}
        yield from super().end(status)


class OpenMessage(OpenPart):
    """A message of text."""

    kind, prefix, delta = "message", "msg", "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.logprobs: list[Any] = []

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def done(self) -> dict[str, Any]:
        return super().done() | {"logprobs": self.logprobs}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": self.kind, "role": "assistant", "status": status, "content": content}


class OpenReasoning(OpenPart):
    """The reasoning before an answer."""

    kind, prefix, delta = "reasoning", "rs", "reasoning_text"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self.text}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.id, "type": self.kind, "summary": [], "status": status, "content": content}


class OpenCall(OpenItem):
    """A call of a function."""

    kind, prefix, delta = "function_call", "fc", "function_call_arguments"

    def __init__(self, index: int, call: Begin) -> None:
        super().__init__(index)
        self._call = call

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": self.kind,
            "call_id": self._call.id,
            "name": self._call.name,
            "arguments": self.text,
            "status": status,
        }

    def end(self, status: str) -> Iterator[Event]:
        yield f"{self.delta}.done", self.at | {"name": self._call.name, "arguments": self.text}
        yield from super().end(status)


class Items:
    """The output of one response. `output` has the items that are complete.

    Log-probabilities are those of all tokens of the answer: tokens go with the text that follows them, the
    last ones with the last message.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._logprobs: list[Any] = []

    def add(self, fragments: Iterator[Fragment], logprobs: Sequence[Any]) -> Iterator[Event]:
        """Yield the events of more fragments, and of the tokens that they came of."""
        self._logprobs += logprobs
        for fragment in fragments:
            if isinstance(fragment, Begin):
                yield from self._begin(OpenCall(len(self.output) + (self._open is not None), fragment))
            elif isinstance(fragment, Arguments):
                assert self._open is not None
                yield self._open.add(fragment.text)
            else:
                yield from self._text(fragment)

    def _text(self, fragment: Text | Reasoning) -> Iterator[Event]:
        kind = OpenMessage if isinstance(fragment, Text) else OpenReasoning
        if not isinstance(self._open, kind):
            yield from self._begin(kind(len(self.output) + (self._open is not None)))
        assert self._open is not None
        if isinstance(self._open, OpenMessage):
            logprobs, self._logprobs = self._logprobs, []
            self._open.logprobs += logprobs
            yield self._open.add(fragment.text, {"logprobs": logprobs})
        else:
            yield self._open.add(fragment.text)

    def _begin(self, item: OpenItem) -> Iterator[Event]:
        yield from self._end("completed")
        self._open = item
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self.output.append(self._open.item(status))
            self._open = None

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events of the answer's end. An answer of nothing has one empty message."""
        if self._open is None and not self.output:
            yield from self._begin(OpenMessage(0))
        if isinstance(self._open, OpenMessage):
            self._open.logprobs += self._logprobs
        yield from self._end(status)


def chat_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return a response's tools in the form of chat completions. Raises `InputError`."""
    made = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") != "function":
            raise InputError(f"tools.{i}.type={shown(tool.get('type'))} must be 'function'")
        check(f"tools.{i}.name", tool.get("name"), "a string", isinstance(tool.get("name"), str))
        names = ("name", "description", "parameters", "strict")
        fields = {name: tool[name] for name in names if tool.get(name) is not None}
        made.append({"type": "function", "function": fields})
    return made or None
