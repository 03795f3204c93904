"""Conversations as a chat template writes them. Imports nothing heavy: tokenizers are the caller's.

What a template gets of a conversation depends on the template in six things, which are found out here:

- Role "developer": a template that names it gets it, others get "system".
- Content in parts: as one text, with a line feed between parts; as a list of parts for a template that only
  loops over them.
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
from collections.abc import Mapping, Sequence
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

    @functools.cached_property
    def wants_parts(self) -> bool:
        """Whether it loops over a content and never asks whether that is a text."""
        loops = re.search(r"""\bfor\s+\w+\s+in\s+\w+(\.content\b|\[['"]content['"]\])""", self.text)
        asks = re.search(
            r"""\bcontent['"]?\]?\s+is\s+(not\s+)?(string|iterable|sequence|mapping)""", self.text
        )
        return loops is not None and asks is None


def template_of(tokenizer: Any, chat_template: str | None, tools: object = None) -> Template | None:
    """Return the template that a conversation is written by; None where there is none.

    `chat_template` is a text in place of the tokenizer's own, or the name of one of those.
    """
    own = getattr(tokenizer, "chat_template", None)
    if isinstance(own, dict):
        name = (
            chat_template
            if chat_template in own
            else "tool_use"
            if tools and "tool_use" in own
            else "default"
        )
        own = own.get(name)
        chat_template = None if chat_template == name else chat_template
    text = chat_template or own
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
    write = functools.partial(
        tokenizer.apply_chat_template,
        tools=[dict(tool) for tool in tools] if tools else None,
        chat_template=template.text,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **(kwargs or {}),
    )
    as_parts = template.wants_parts if content_format == "auto" else content_format == "openai"
    first: Exception | None = None
    way = _way_of_calls(tokenizer, template, read)
    if not way.takes_several:
        read = _one_call_a_message(read)
    for form in way.forms:
        try:
            return str(write([_for_template(message, template, as_parts, form) for message in read]))
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


def _way_of_calls(tokenizer: Any, template: Template, messages: Sequence[Message]) -> CallsWay:
    """Return how to write calls for the template, found out by short conversations, once a template."""
    if not any(message.get("tool_calls") for message in messages):
        return CallsWay()
    known = _WAYS.get(template)
    if known is None:
        as_object, as_text, several = (
            _probed(tokenizer, template, arguments)
            for arguments in ([PROBE], [PROBE_TEXT], [PROBE_TEXT, SECOND_TEXT])
        )
        if SECOND_TEXT not in several:
            several = _probed(tokenizer, template, [PROBE, {"k": SECOND_TEXT}])
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
        _WAYS[template] = known
    return known


PROBE, PROBE_TEXT, SECOND_TEXT = {"probe_key": "probe value"}, "probe text", "second probe"
_WAYS: dict[Template, CallsWay] = {}


def _probed(tokenizer: Any, template: Template, arguments: Sequence[object]) -> str:
    """Return what the template makes of a conversation with these calls; "" where it fails."""
    # Mistral's templates take ids of nine letters alone.
    ids = [f"abcdefgh{i}" for i in range(len(arguments))]
    calls = [
        {"id": each, "type": "function", "function": {"name": "f", "arguments": its}}
        for each, its in zip(ids, arguments, strict=True)
    ]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None if template.asks_for_none else "", "tool_calls": calls},
        *[{"role": "tool", "content": "b", "tool_call_id": each, "name": "f"} for each in ids],
    ]
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template.text, tokenize=False))
    except Exception:  # templates raise errors of their own
        return ""


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
            if (own := outputs.pop(call.get("id"), None)) is not None:
                made.append(own)
        made += outputs.values()
    return made


def _for_template(
    message: Message, template: Template, as_parts: bool, form: ArgumentsForm
) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if key != "reasoning"}
    if made["role"] == "developer" and not template.names_developer:
        made["role"] = "system"
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
    elif as_parts:
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
