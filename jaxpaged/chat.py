"""Conversations: what they must look like, and as a chat template writes them. Imports nothing heavy."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from jaxpaged.checks import InputError, check, checked_choice, shown

Message = Mapping[str, Any]
ContentFormat = Literal["auto", "string", "openai"]


def check_messages(messages: object) -> None:
    """Raise `InputError` unless `messages` is a non-empty list of {"role": str, "content": str}."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(f"messages={messages!r} must be a list with at least one message")
    for message in messages:
        texts = [message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content")]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"message {message!r} must have a 'role' and a 'content', both strings")


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
    """Return the text that a chat template makes of a conversation. Raises `InputError`."""
    checked_choice("chat_template_content_format", content_format, get_args(ContentFormat))
    if tokenizer is None or not (chat_template or tokenizer.chat_template):
        raise InputError("chat: the model must have a chat template; give one")
    if tools and not re.search(r"\btools\b", str(chat_template or tokenizer.chat_template)):
        raise InputError("tools: the model's chat template has no place for them; give another template")
    if continue_final_message and add_generation_prompt:
        raise InputError("continue_final_message must be false with add_generation_prompt")
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    check("messages", messages, "a list with at least one message", is_list and bool(messages))
    assert isinstance(messages, Sequence)
    for message in messages:
        is_one = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_one or not isinstance(message.get("content"), str | list):
            raise InputError(f"message {shown(message)} must have a 'role' and a 'content'")
    made = [
        {**message, "content": _content(message.get("content"), f"messages.{i}", content_format == "openai")}
        for i, message in enumerate(messages)
    ]
    try:
        return str(
            tokenizer.apply_chat_template(
                made,
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(kwargs or {}),
            )
        )
    except Exception as error:  # templates raise errors of their own, for example about the order of roles
        raise InputError(f"messages: the model's chat template refuses them: {error}") from error


def _content(content: Any, name: str, as_parts: bool) -> Any:
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InputError(f"{name}.content={shown(content)} must be a string or a list of parts")
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise InputError(f"{name}.content: part {shown(part)} must be {{'type': 'text', 'text': ...}}")
        texts.append(text)
    return [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
