"""Conversations as clients write them, read by one rule at every door. Imports nothing heavy.

A message is read as follows; what breaks a rule is an `InputError` that begins with the path to it.

- `role` is a non-empty string. "function", OpenAI's older name, is read as "tool".
- `content` is a text or a list of parts. A part is a text, or an object of one of the types in `TEXT_PARTS`
  with its text. Parts of other kinds, such as images, are refused.
- `content` may be null or missing in a message of the assistant. A `refusal` then stands in its place.
- `tool_calls` that are null or an empty list are left out. Arguments that are a JSON object become that
  object; null and an empty text become an empty object; anything else stays the text that it is, for it
  may be an earlier answer that was cut. `function_call`, OpenAI's older form, is read as one call.
- `reasoning_content`, `reasoning` and `thinking` are names of the same text: the reasoning of an assistant.
- Other fields go to the template as they are; those that are null are left out.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.checks import InputError, check, shown

type Message = Mapping[str, Any]

# The types of parts that are text, and the field that has it.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "reasoning_text": "text",
    "thinking": "thinking",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
# The items of a response's input, beside messages.
ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def read_messages(messages: object, paths: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the messages of a conversation in their plain form, by the rule of this module.

    In the plain form `content` is a text, a list of texts, or None; `arguments` of calls are a dict or a
    text; `reasoning` is a text. `paths` names each message for errors. Raises `InputError`.
    """
    ok = isinstance(messages, Sequence) and not isinstance(messages, str) and bool(messages)
    check("messages", messages, "a list with at least one message", ok)
    assert isinstance(messages, Sequence)
    names = paths or [f"messages.{i}" for i in range(len(messages))]
    return [_message(message, name) for message, name in zip(messages, names, strict=True)]


def read_items(items: Sequence[object], name: str = "input") -> list[dict[str, Any]]:
    """Return the messages that the items of a response's input stand for, in their plain form.

    Reasoning, texts and calls of the assistant that follow one another are one message, so far as there is
    one text; an output of a call is a message of the role "tool". Raises `InputError`.
    """
    messages: list[dict[str, Any]] = []
    paths: list[str] = []
    turn: dict[str, Any] | None = None  # the assistant's message that further items belong to
    for i, item in enumerate(items):
        path = f"{name}.{i}"
        check(path, item, "an object", isinstance(item, Mapping))
        assert isinstance(item, Mapping)
        kind = item.get("type") or "message"
        if kind not in ITEMS:
            raise InputError(f"{path}.type={shown(kind)} must be one of {', '.join(ITEMS)}")
        made = _ITEM_READERS[kind](item, path)
        is_turn = made.get("role") == "assistant"
        if is_turn:
            made["reasoning"] = [made["reasoning"]] if made.get("reasoning") else []
        if turn is not None and is_turn and _joins(turn, made):
            turn["reasoning"] += made["reasoning"]
            turn.setdefault("tool_calls", []).extend(made.get("tool_calls", ()))
            turn["content"] = made["content"] if turn["content"] is None else turn["content"]
            continue
        turn = made if is_turn else None
        messages.append(made)
        paths.append(path)
    return read_messages(messages, paths)


def _joins(turn: Message, more: Message) -> bool:
    """Return whether an item continues the assistant's turn: a text follows reasoning only, and is one."""
    if more.get("content") is not None:
        return turn.get("content") is None and not turn.get("tool_calls")
    return bool(more.get("tool_calls")) or (turn.get("content") is None and not turn.get("tool_calls"))


def _message_item(item: Message, path: str) -> dict[str, Any]:
    made = {key: value for key, value in item.items() if key not in ("type", "id", "status", "phase")}
    return _message(made, path)


def _call_item(item: Message, path: str) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    check(f"{path}.name", function["name"], "a string", isinstance(function["name"], str))
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _output_item(item: Message, path: str) -> dict[str, Any]:
    call_id = item.get("call_id")
    check(f"{path}.call_id", call_id, "a string", isinstance(call_id, str))
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "content": _content(item.get("output"), f"{path}.output"),
    }


def _reasoning_item(item: Message, path: str) -> dict[str, Any]:
    for field in ("content", "summary"):
        if item.get(field):
            text = joined(_content(item[field], f"{path}.{field}"))
            return {"role": "assistant", "content": None, "reasoning": text}
    return {"role": "assistant", "content": None, "reasoning": ""}


_ITEM_READERS = {
    "message": _message_item,
    "function_call": _call_item,
    "function_call_output": _output_item,
    "reasoning": _reasoning_item,
}


def joined(content: str | list[str] | None) -> str:
    """Return a content as one text: its parts with a line feed between, as in vLLM."""
    return content if isinstance(content, str) else "\n".join(content or ())


def _message(message: object, name: str) -> dict[str, Any]:
    check(name, message, "an object with a role and a content", isinstance(message, Mapping))
    assert isinstance(message, Mapping)
    role = message.get("role")
    check(f"{name}.role", role, "a string that is not empty", isinstance(role, str) and role != "")
    taken = ("content", "tool_calls", "function_call", "refusal", *REASONING)
    made = {key: value for key, value in message.items() if key not in taken and value is not None}
    made["role"] = "tool" if role == "function" else role
    calls = _calls(message, name)
    if calls:
        made["tool_calls"] = calls
    content, refusal = message.get("content"), message.get("refusal")
    if content is None and role == "assistant":
        check(f"{name}.refusal", refusal, "a string or null", refusal is None or isinstance(refusal, str))
        made["content"] = refusal
    else:
        made["content"] = _content(content, f"{name}.content")
    for field in REASONING:
        reasoning = message.get(field)
        text = "" if reasoning is None else joined(_content(reasoning, f"{name}.{field}"))
        if text:
            made.setdefault("reasoning", text)
    return made


def _content(content: object, name: str) -> str | list[str]:
    if isinstance(content, str):
        return content
    check(name, content, "a string or a list of parts", isinstance(content, list | tuple))
    assert isinstance(content, list | tuple)
    return [_part(part, f"{name}.{i}") for i, part in enumerate(content)]


def _part(part: object, name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if isinstance(kind, str) and field is None:
        rule = "{'type': 'text', 'text': ...}: of models of images and sounds the text part alone is served"
        check(name, part, rule, False)
    text = part.get(field) if isinstance(part, Mapping) and field else None
    check(name, part, "a text, or a part such as {'type': 'text', 'text': ...}", isinstance(text, str))
    return str(text)


def _calls(message: Message, name: str) -> list[dict[str, Any]]:
    calls, single = message.get("tool_calls"), message.get("function_call")
    rule = "a list of calls, or null"
    check(f"{name}.tool_calls", calls, rule, calls is None or isinstance(calls, list | tuple))
    made = [_call(call, f"{name}.tool_calls.{i}") for i, call in enumerate(calls or ())]
    if single is not None and not made:
        made = [_call({"function": single}, f"{name}.function_call")]
    return made


def _call(call: object, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    ok = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    check(name, call, "an object that has a function with a name", ok)
    assert isinstance(call, Mapping)
    assert isinstance(function, Mapping)
    fields = {key: value for key, value in call.items() if value is not None}
    arguments = _arguments(function.get("arguments"), f"{name}.function.arguments")
    return {"type": "function", **fields, "function": {**function, "arguments": arguments}}


def _arguments(arguments: object, name: str) -> dict[str, Any] | str:
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    check(name, arguments, "a text or an object", isinstance(arguments, str))
    text = str(arguments)
    try:
        value = strict_json(text or "{}")
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value if isinstance(value, dict) else text


def strict_json(text: str) -> Any:
    """Parse JSON; raise ValueError for what is none, NaN and infinity with it, RecursionError if too deep."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def check_tools(tools: object) -> None:
    """Raise `InputError` unless tools are None or a list of functions, as chat completions have them."""
    check("tools", tools, "a list of tools, or null", tools is None or isinstance(tools, list | tuple))
    assert tools is None or isinstance(tools, list | tuple)
    for i, tool in enumerate(tools or ()):
        function = (
            tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        )
        ok = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        check(f"tools.{i}", tool, "{'type': 'function', 'function': {'name': ...}}", ok)
