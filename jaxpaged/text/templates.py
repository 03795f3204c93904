"""Conversations as a chat template writes them. Imports nothing heavy: tokenizers are the caller's.

What a template gets of a conversation depends on the template in six things, which are found out here:

- Role "developer": a template that names it gets it, others get "system".
- Content, by role: as one text, with a line feed between parts; as a list of parts where a template writes a
  text's letters only if they come in parts.
- Content of an assistant that only calls: None for a template that asks whether it is none, else "".
- Arguments of calls: as objects; as their JSON text for a template that fails with an object or writes it as
  Python does. Arguments that are no JSON object are the text that they are, or, for a template that can't
  write a text, an object with the text as its only member, "arguments".
- Several calls in a message: as several messages with a call each, every one before the output of its call,
  for a template that refuses or forgets all but one.
- Reasoning: as `reasoning_content` and `reasoning`, and as `thinking` for a template that names that one.
"""

import collections
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from jaxpaged.checks import InputError, checked_choice
from jaxpaged.text.conversations import Message, check_tools, joined, read_messages

__all__ = [
    "CONTENT_FORMATS",
    "ContentFormat",
    "Message",
    "Template",
    "check_tools",
    "read_messages",
    "render",
]

ContentFormat = Literal["auto", "string", "openai"]
CONTENT_FORMATS = get_args(ContentFormat)
# What only we may say to a template.
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tools",
    }
)


@dataclasses.dataclass(frozen=True)
class Template:
    """A chat template's text, and what it does with conversations, found in it by patterns."""

    text: str

    @functools.cached_property
    def takes_tools(self) -> bool:
        return re.search(r"\btools\b", self.text) is not None

    @functools.cached_property
    def takes_documents(self) -> bool:
        return re.search(r"\bdocuments\b", self.text) is not None

    @functools.cached_property
    def names_developer(self) -> bool:
        return re.search(r"""['"]developer['"]""", self.text) is not None

    @functools.cached_property
    def names_thinking(self) -> bool:
        return re.search(r"""\.thinking\b|\[['"]thinking['"]\]""", self.text) is not None

    @functools.cached_property
    def asks_for_none(self) -> bool:
        return re.search(r"""\bcontent['"]?\]?\s+is\s+(not\s+)?none""", self.text) is not None


def template_of(tokenizer: Any, chat_template: str | None, tools: object = None) -> Template | None:
    """Return the template that a conversation is written by; None where there is none.

    `chat_template` is a text in place of the tokenizer's own, or the name of one of those.
    """
    tokenizer_template = getattr(tokenizer, "chat_template", None)
    if isinstance(tokenizer_template, dict):
        name = (
            chat_template
            if chat_template in tokenizer_template
            else "tool_use"
            if tools and "tool_use" in tokenizer_template
            else "default"
        )
        tokenizer_template = tokenizer_template.get(name)
        chat_template = None if chat_template == name else chat_template
    text = chat_template or tokenizer_template
    return _template(text) if text else None


_template = functools.lru_cache(maxsize=16)(Template)


def template_kwargs(
    given: Mapping[str, Any] | None, effort: str | None, documents: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the variables of a chat template under vLLM's names; an effort also sets whether to think."""
    kwargs = dict(given or {})
    if effort is not None:
        kwargs = {"enable_thinking": effort != "none"} | kwargs | {"reasoning_effort": effort}
    return kwargs if documents is None else kwargs | {"documents": documents}


def render(
    tokenizer: Any,
    messages: object,
    *,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    content_format: str = "auto",
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the text that a chat template makes of a conversation.

    `tokenizer` is a transformers tokenizer; the other names are those of vLLM's `LLM.chat`. `messages` are as
    clients write them, or as `read_messages` gives them. `kwargs` are variables for the template. Raises
    `InputError` for what breaks the rule of `conversations`, and for what the template refuses.
    """
    checked_choice("chat_template_content_format", content_format, CONTENT_FORMATS)
    template = template_of(tokenizer, chat_template, tools)
    if template is None:
        raise InputError(
            "chat: the model must have a chat template; a server may be given one by --chat-template"
        )
    check_tools(tools)
    if tools and not template.takes_tools:
        raise InputError("tools: the model's chat template has no place for them; give another template")
    if (kwargs or {}).get("documents") and not template.takes_documents:
        raise InputError("documents: the model's chat template has no place for them; give another template")
    for name in kwargs or {}:
        if name in RESERVED:
            raise InputError(f"chat_template_kwargs: {name!r} must be left out")
    if continue_final_message and add_generation_prompt:
        raise InputError("continue_final_message must be false with add_generation_prompt")
    read = read_messages(messages)
    variables = {"tools": [dict(tool) for tool in tools] if tools else None, **(kwargs or {})}
    write = functools.partial(
        tokenizer.apply_chat_template,
        chat_template=template.text,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **variables,
    )
    if content_format == "auto":
        in_parts = _roles_in_parts(tokenizer, template, read, variables)
    else:
        in_parts = _roles(read, template) if content_format == "openai" else frozenset[str]()
    way = _way_of_calls(tokenizer, template, read, in_parts)
    first: Exception | None = None
    if not way.takes_several:
        read = _one_call_a_message(read)
    for form in way.forms:
        try:
            return str(write([_for_template(message, template, in_parts, form) for message in read]))
        except Exception as error:  # templates raise errors of their own, and are wrong about types
            first = first or error
    raise InputError(f"messages: the model's chat template refuses them: {first}") from first


def has_template(tokenizer: Any, chat_template: str | None = None) -> bool:
    """Return whether conversations can be written at all."""
    return tokenizer is not None and template_of(tokenizer, chat_template) is not None


ArgumentsForm = Literal["object", "text", "member"]


@dataclasses.dataclass(frozen=True)
class CallsWay:
    """Rules by which a template takes calls: the forms of arguments, best first, and whether several calls
    fit.
    """

    forms: tuple[ArgumentsForm, ...] = ("object",)
    takes_several: bool = True


def _way_of_calls(
    tokenizer: Any, template: Template, messages: Sequence[Message], in_parts: frozenset[str]
) -> CallsWay:
    """Return how to write calls for the template, found out by short conversations, once a template."""
    if not any(message.get("tool_calls") for message in messages):
        return CallsWay()
    key = template, in_parts & {"user", "assistant"}
    known = _WAYS.get(key)
    if known is None:

        def probed(*arguments: object) -> str:
            asked = _asked(arguments)
            return _written(tokenizer, template, asked, in_parts) or _written(
                tokenizer, template, asked, in_parts ^ {"tool"}
            )

        as_object, as_text, several = probed(PROBE), probed(PROBE_TEXT), probed(PROBE_TEXT, SECOND_TEXT)
        if SECOND_TEXT not in several:
            several = probed(PROBE, {"k": SECOND_TEXT})
        # Some templates write an object as Python does; some loop over a text character by character.
        takes_objects = PROBE["probe_key"] in as_object and repr(PROBE) not in as_object
        takes_texts = PROBE_TEXT in as_text
        forms: tuple[ArgumentsForm, ...]
        if takes_objects:
            forms = ("object", "member", "text") if takes_texts else ("member", "object", "text")
        else:
            forms = ("text", "object", "member") if takes_texts else ("object", "text", "member")
        known = CallsWay(forms, SECOND_TEXT in several or not (as_object or as_text))
        if len(_WAYS) >= 64:
            _WAYS.clear()
        _WAYS[key] = known
    return known


PROBE, PROBE_TEXT, SECOND_TEXT = {"probe_key": "probe value"}, "probe text", "second probe"
_WAYS: dict[tuple[Template, frozenset[str]], CallsWay] = {}


def _asked(arguments: Iterable[object], output: str = "b") -> list[Message]:
    """Return a conversation in its plain form with calls of these arguments, and their outputs."""
    # Mistral's templates take ids of nine letters alone.
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "f", "arguments": call_arguments}}
        for i, call_arguments in enumerate(arguments)
    ]
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *[{"role": "tool", "content": output, "tool_call_id": call["id"], "name": "f"} for call in calls],
    ]


def _written(
    tokenizer: Any,
    template: Template,
    messages: Sequence[Message],
    in_parts: frozenset[str],
    form: ArgumentsForm = "object",
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a conversation in plain form by the template; "" if the template fails."""
    try:
        return str(
            tokenizer.apply_chat_template(
                [_for_template(message, template, in_parts, form) for message in messages],
                chat_template=template.text,
                tokenize=False,
                **(variables or {}),
            )
        )
    except Exception:  # templates raise errors of their own, and are wrong about types
        return ""


def _roles(messages: Iterable[Message], template: Template) -> frozenset[str]:
    return frozenset(_role(message, template) for message in messages)


def _role(message: Message, template: Template) -> str:
    """Return the role that the template is given for a message."""
    role = str(message["role"])
    return "system" if role == "developer" and not template.names_developer else role


def _roles_in_parts(
    tokenizer: Any, template: Template, messages: Sequence[Message], variables: Mapping[str, Any]
) -> frozenset[str]:
    """Return the roles whose content the template accepts only as parts, by rendering short conversations.

    What is found without a client's variables is kept, once a template and role. Roles of which nothing is
    written without them are tried with them, and that is not kept: one client's are not another's.
    """
    # Other roles' conversations need a user who is heard, and outputs of calls an assistant.
    roles = sorted(_roles(messages, template) | {"user"}, key=lambda role: (role != "user", role == "tool"))
    parts_by_role: dict[str, bool | None] = {}

    def takes_parts(role: str, variables: Mapping[str, Any]) -> bool | None:
        known = frozenset(each for each, in_parts in parts_by_role.items() if in_parts and each != role)
        return _takes_parts(tokenizer, template, role, known, variables)

    for role in roles:
        key = template, role
        if key in (kept := _IN_PARTS):
            parts_by_role[role] = kept.get(key)
            continue
        parts_by_role[role] = takes_parts(role, {})
        if len(kept) >= 256:
            kept.clear()
        kept[key] = parts_by_role[role]
    for role in roles:
        if parts_by_role[role] is None:
            parts_by_role[role] = takes_parts(role, variables)
    return frozenset(role for role, in_parts in parts_by_role.items() if in_parts)


_IN_PARTS: dict[tuple[Template, str], bool | None] = {}
CONTENT = "ProbeOfContent"  # one word: filters of white space, digits and marks leave it alone
# How Python and JSON, also inside of JSON, begin the text of a part: such a list is no text.
A_LIST = re.compile(r"""text\\?['"]\s*:\s*\\?['"]$""")


def _takes_parts(
    tokenizer: Any, template: Template, role: str, known: frozenset[str], variables: Mapping[str, Any]
) -> bool | None:
    """Return whether a role's content is lost as a text, and kept in parts; None where both are lost."""
    user, message = {"role": "user", "content": "a"}, {"role": role, "content": CONTENT}
    conversations: dict[str, list[list[Message]]] = {
        "user": [[message]],
        "system": [[message, user]],
        "developer": [[message, user]],
        "assistant": [[user, message, user], [user, message]],
        "tool": [_asked([{"k": "v"}], CONTENT), [user, message]],
    }
    for in_parts in (False, True):
        form: frozenset[str] = known | {role} if in_parts else known
        for messages in conversations.get(role, [[user, message]]):
            calls = _way_of_calls(tokenizer, template, messages, form).forms[0]
            text = _written(tokenizer, template, messages, form, calls, variables).lower()
            before, is_there, _ = text.partition(CONTENT.lower())
            if is_there and not (in_parts and A_LIST.search(before)):
                return in_parts
    return None


def _one_call_a_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with a message for each call, each followed by the output of its call."""
    made: list[dict[str, Any]] = []
    rest = collections.deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            made.append(message)
            continue
        outputs: dict[object, dict[str, Any]] = {}
        while rest and rest[0]["role"] == "tool" and rest[0].get("tool_call_id") not in outputs:
            output = rest.popleft()
            outputs[output.get("tool_call_id")] = output
        for i, call in enumerate(calls):
            others = {"role": "assistant", "content": None} if i else message
            made.append({**others, "tool_calls": [call]})
            if (tool_message := outputs.pop(call.get("id"), None)) is not None:
                made.append(tool_message)
        made += outputs.values()
    return made


def _for_template(
    message: Message, template: Template, in_parts: frozenset[str], form: ArgumentsForm
) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if key != "reasoning"}
    made["role"] = _role(message, template)
    content, reasoning = message["content"], message.get("reasoning")
    calls = message.get("tool_calls")
    if reasoning:
        if template.names_thinking and calls and joined(content):  # which gpt-oss' template wants in one
            reasoning, content = f"{reasoning}\n{joined(content)}", ""
        made |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if template.names_thinking:
            made["thinking"] = reasoning
    if calls and not content and template.asks_for_none:
        made["content"] = None
    elif made["role"] in in_parts:
        parts = [content] if isinstance(content, str) else content or ()
        made["content"] = [{"type": "text", "text": text} for text in parts]
    else:
        made["content"] = joined(content)
    if calls:
        made["tool_calls"] = [_call(call, form) for call in calls]
    return made


def _call(call: Message, form: ArgumentsForm) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if form == "text" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif form == "member" and isinstance(arguments, str):
        arguments = {"arguments": arguments}
    return {**call, "function": {**call["function"], "arguments": arguments}}
