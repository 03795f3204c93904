"""Conversations of Anthropic's Messages API in the form of chat completions, and their cache breakpoints.

A block `tool_use` becomes a call of the assistant's message, `thinking` its reasoning, and `tool_result` a
message of the role "tool". Signatures are not checked. A `redacted_thinking` has no text and is left out, and
so is a system block for billing, in which a client writes another number with each request.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.checks import InputError, check, checked_number
from jaxpaged.contracts.block_stores import MOST_KEPT_SECONDS
from jaxpaged.serve.message_schemas import MessagesRequest

MAX_BREAKPOINTS = 4
SECONDS = {"5m": 300.0, "1h": 3600.0}
ROLES = ("user", "assistant", "system")
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
CHOICES = ("auto", "any", "tool", "none")
FREE = ("auto", "none")  # choices that need no tools
BILLING = "x-anthropic-billing-header"  # how a system block begins that is for no model
CHANGED = "\x1f"  # text that stands in place of what follows a breakpoint


@dataclasses.dataclass(frozen=True)
class Breakpoint:
    """A place in a conversation up to which the caches keep it, and for how many seconds.

    num_messages: whole messages, in the form of chat completions, that lie before it.
    num_parts: parts of the next message's content that lie before it, too.
    is_end: whether it is the end of the prompt.
    """

    seconds: float
    num_messages: int = 0
    num_parts: int = 0
    is_end: bool = False


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A request's messages and tools in the form of chat completions, and its breakpoints."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel: bool
    breakpoints: tuple[Breakpoint, ...]

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message, which is the assistant's."""
        return self.messages[-1]["role"] == "assistant"

    def until(self, place: Breakpoint, *, ends: bool = False) -> list[dict[str, Any]]:
        """Return the messages up to a breakpoint, one of other text behind it, and those that follow.

        The beginning that their prompt has in common with the conversation's is what the breakpoint covers.
        ends: whether none follow. Templates write earlier turns by what follows, but may refuse it behind a
            turn without its calls.
        """
        kept, after = self.messages[: place.num_messages], self.messages[place.num_messages]
        changed = {name: value for name, value in after.items() if name not in ("tool_calls", "reasoning")}
        parts = after["content"][: place.num_parts] if place.num_parts else []
        changed["content"] = [*parts, CHANGED] if parts else CHANGED
        return [*kept, changed, *(() if ends else self.messages[place.num_messages + 1 :])]


class ConversationReader:
    """Reader of one request's conversation."""

    def __init__(self, body: MessagesRequest) -> None:
        self._body = body
        self._messages: list[dict[str, Any]] = []
        self._breakpoints: list[Breakpoint] = []

    def read(self) -> Conversation:
        """Return the conversation. Raises `InputError`, which begins with the path to the mistake."""
        body = self._body
        self._system()
        tools = self._tools()  # behind the system prompt, beside which templates write them
        for i, message in enumerate(body.messages):
            self._message(message, f"messages.{i}")
        check("messages", body.messages, "a list with a message of a user's", bool(self._messages))
        last = self._messages[-1]
        if last["role"] == "assistant" and (last.get("tool_calls") or not last["content"]):
            raise InputError("messages: the last one must be a user's, or a text of the assistant's")
        if (seconds := _seconds(body.cache_control, "cache_control")) is not None:
            self._breakpoints.append(Breakpoint(seconds, is_end=True))
        num = len(self._breakpoints)
        if num > MAX_BREAKPOINTS:
            raise InputError(f"cache_control: {num} breakpoints are given, must be at most {MAX_BREAKPOINTS}")
        end = len(self._messages)
        places = tuple(
            Breakpoint(place.seconds, is_end=True) if place.num_messages >= end else place
            for place in self._breakpoints
        )
        choice, parallel = self._choice([tool["function"]["name"] for tool in tools or ()])
        return Conversation(self._messages, tools, choice, parallel, places)

    def _tools(self) -> list[dict[str, Any]] | None:
        read = []
        for i, tool in enumerate(self._body.tools or ()):
            path, kind = f"tools.{i}", tool.get("type")
            rule = "'custom' or left out: tools that the server or a model's maker defines are not served"
            check(f"{path}.type", kind, rule, kind in (None, "custom"))
            name, schema = tool.get("name"), tool.get("input_schema")
            check(f"{path}.name", name, "a string that is not empty", isinstance(name, str) and name != "")
            check(f"{path}.input_schema", schema, "a JSON schema of an object", isinstance(schema, Mapping))
            function = {"name": name, "parameters": schema}
            function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
            read.append({"type": "function", "function": function})
            self._note(tool, path)
        return read or None

    def _system(self) -> None:
        system = self._body.system
        if isinstance(system, str):
            if system:
                self._messages.append({"role": "system", "content": system})
            return
        blocks = [(f"system.{i}", block) for i, block in enumerate(system or ())]
        texts = {path: _text(block, path) for path, block in blocks}
        blocks = [(path, block) for path, block in blocks if not texts[path].startswith(BILLING)]
        for i, (path, block) in enumerate(blocks[:-1]):
            self._note(block, path, num_parts=i + 1)
        if blocks:
            path, last = blocks[-1]
            self._messages.append(
                {"role": "system", "content": _content([texts[name] for name, _ in blocks])}
            )
            self._note(last, path)

    def _message(self, message: Mapping[str, Any], path: str) -> None:
        role, content = message.get("role"), message.get("content")
        check(f"{path}.role", role, f"one of {', '.join(ROLES)}", role in ROLES)
        assert isinstance(role, str)
        if isinstance(content, str):
            self._messages.append({"role": role, "content": content})
            return
        check(f"{path}.content", content, "a string or a list of blocks", isinstance(content, list))
        assert isinstance(content, list)
        for i, block in enumerate(content):
            kind = block.get("type") if isinstance(block, Mapping) else None
            rule = f"one of {', '.join(BLOCKS[role])}: what is not text is not served"
            check(f"{path}.content.{i}.type", kind, rule, kind in BLOCKS[role])
        if role == "assistant":
            self._turn(content, f"{path}.content")
        else:
            self._results_and_texts(role, content, f"{path}.content")

    def _results_and_texts(self, role: str, blocks: Sequence[Mapping[str, Any]], path: str) -> None:
        """Add a user's message: results of tools, each a message, and texts, which are one where adjacent."""
        texts: list[str] = []
        for i, block in enumerate(blocks):
            is_text = block["type"] == "text"
            if is_text:
                texts.append(_text(block, f"{path}.{i}"))
            else:
                self._messages.append(_result(block, f"{path}.{i}"))
            is_end = i + 1 == len(blocks) or blocks[i + 1]["type"] != "text"
            if is_text and is_end:
                self._messages.append({"role": role, "content": _content(texts)})
                self._note(block, f"{path}.{i}")
                texts = []
            else:
                self._note(block, f"{path}.{i}", num_parts=len(texts))

    def _turn(self, blocks: Sequence[Mapping[str, Any]], path: str) -> None:
        """Add a message of the assistant's: its reasoning, its texts and its calls."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for i, block in enumerate(blocks):
            kind = block["type"]
            if kind == "text":
                texts.append(_text(block, f"{path}.{i}"))
            elif kind == "thinking":
                text = block.get("thinking")
                check(f"{path}.{i}.thinking", text, "a string", isinstance(text, str))
                thoughts.append(str(text))
            elif kind == "tool_use":
                calls.append(_call(block, f"{path}.{i}"))
        turn: dict[str, Any] = {"role": "assistant", "content": _content(texts) if texts else None}
        turn |= {"reasoning": "\n".join(thoughts)} if any(thoughts) else {}
        self._messages.append(turn | ({"tool_calls": calls} if calls else {}))
        for i, block in enumerate(blocks):
            self._note(block, f"{path}.{i}")

    def _note(self, block: Mapping[str, Any], path: str, *, num_parts: int = 0) -> None:
        """Note the breakpoints of a block, behind the messages so far.

        num_parts: texts of the next message that lie before them.
        """
        inner = block.get("content")
        parts = [part for part in inner if isinstance(part, Mapping)] if isinstance(inner, list) else []
        for part in (block, *parts):
            if (seconds := _seconds(part.get("cache_control"), f"{path}.cache_control")) is not None:
                self._breakpoints.append(Breakpoint(seconds, len(self._messages), num_parts))

    def _choice(self, names: Sequence[str]) -> tuple[str | dict[str, Any] | None, bool]:
        """Return the choice of tools in the form of chat completions, and whether calls may be several.

        names: those of the tools.
        """
        choice = self._body.tool_choice
        if choice is None:
            return None, True
        kind, name, single = choice.get("type"), choice.get("name"), choice.get("disable_parallel_tool_use")
        check("tool_choice.type", kind, f"one of {', '.join(CHOICES)}", kind in CHOICES)
        rule = "true, false or left out"
        check("tool_choice.disable_parallel_tool_use", single, rule, single in (None, True, False))
        check(
            "tools",
            self._body.tools,
            f"given where tool_choice.type is {kind!r}",
            bool(names) or kind in FREE,
        )
        if kind == "tool":
            check("tool_choice.name", name, f"the name of one of tools: {', '.join(names)}", name in names)
            return {"type": "function", "function": {"name": name}}, single is not True
        return {"any": "required"}.get(str(kind), str(kind)), single is not True


def _seconds(control: object, path: str) -> float | None:
    """Return for how long a `cache_control` asks; None where there is none. Raises `InputError`."""
    if control is None:
        return None
    kind = control.get("type") if isinstance(control, Mapping) else None
    check(path, control, "{'type': 'ephemeral'}, perhaps with a ttl", kind == "ephemeral")
    assert isinstance(control, Mapping)
    ttl = control.get("ttl")
    if ttl is None:
        return SECONDS["5m"]
    if isinstance(ttl, str) and ttl in SECONDS:
        return SECONDS[ttl]
    rule = f"'5m', '1h', or a number from 0 to {MOST_KEPT_SECONDS}, in seconds"
    return checked_number(f"{path}.ttl", ttl, rule, 0, MOST_KEPT_SECONDS)


def _text(block: Any, path: str) -> str:
    is_text = isinstance(block, Mapping) and block.get("type") == "text"
    text = block.get("text") if is_text else None
    check(path, block, "{'type': 'text', 'text': ...}", isinstance(text, str))
    return str(text)


def _content(texts: Sequence[str]) -> str | list[str]:
    """Return texts as a message's content: one as a string, as clients of chat completions send it."""
    return texts[0] if len(texts) == 1 else [*texts]


def _result(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    call_id, content = block.get("tool_use_id"), block.get("content")
    check(f"{path}.tool_use_id", call_id, "a string", isinstance(call_id, str))
    if content is None or isinstance(content, str):
        text: str | list[str] = content or ""
    else:
        check(f"{path}.content", content, "a string or a list of blocks", isinstance(content, list))
        texts = [_text(part, f"{path}.content.{i}") for i, part in enumerate(content)]
        text = _content(texts) if texts else ""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    check(f"{path}.id", block.get("id"), "a string", isinstance(block.get("id"), str))
    check(f"{path}.name", name, "a string", isinstance(name, str))
    check(f"{path}.input", arguments, "an object", isinstance(arguments, Mapping))
    return {"id": block["id"], "type": "function", "function": {"name": name, "arguments": arguments}}
