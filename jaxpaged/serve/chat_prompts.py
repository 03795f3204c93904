"""Conversations, with tools, as the model's chat template writes them."""

import asyncio
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.engine.async_llm import TOKENIZED_HERE, AsyncLLM

# By what a template must have in it, if its model writes calls in that form.
SIGNS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}
TEXT_PARTS = ("text", "input_text", "output_text")
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


class ChatPrompts:
    """`template`: its text, in place of the model's own."""

    def __init__(self, llm: AsyncLLM, template: str | None, parser: str) -> None:
        self._llm, self._own = llm, template
        given = template or getattr(llm.tokenizer, "chat_template", None) or ""
        text = given if isinstance(given, str) else json.dumps(given)
        self.takes_tools = re.search(r"\btools\b", text) is not None
        self.takes_documents = re.search(r"\bdocuments\b", text) is not None
        found = [name for name, sign in SIGNS.items() if sign in text]
        # Without its sign in a template that takes tools, Llama 3's plain JSON.
        detected = found[0] if found else "llama3_json" if self.takes_tools else None
        self.parser = detected if parser == "auto" else parser

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        cuts: str | None = None,
    ) -> dict[str, Any]:
        """Return the prompt, as text and as token ids. Raises `InputError`.

        `cuts`: the end, "left" or "right", that the text may lose where it is far too long for the model.
        """
        tokenizer = self._llm.tokenizer
        if tokenizer is None or not (self._own or tokenizer.chat_template):
            raise InputError("messages: the model must have a chat template; give one by --chat-template")
        if tools and not self.takes_tools:
            raise InputError(
                "tools: the model's chat template has no place for them; give another by --chat-template"
            )
        if (kwargs or {}).get("documents") and not self.takes_documents:
            raise InputError("documents: the model's chat template has no place for them")
        for name in kwargs or {}:
            if name in RESERVED:
                raise InputError(f"chat_template_kwargs: {name!r} must be left out")
        if continue_final_message and add_generation_prompt:
            raise InputError("continue_final_message must be false with add_generation_prompt")
        conversation = [_message(message, place) for place, message in enumerate(messages)]
        write = functools.partial(
            tokenizer.apply_chat_template,
            conversation,
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template=self._own,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(kwargs or {}),
        )
        is_long = sum(len(message["content"]) for message in conversation) > TOKENIZED_HERE
        try:
            text = await asyncio.to_thread(write) if is_long else write()
        except Exception as error:  # templates raise errors of their own
            raise InputError(f"messages: the chat template refuses them: {error}") from error
        # The template writes the special tokens itself.
        ids = await self._llm.encode(text, add_special_tokens=add_special_tokens, cuts=cuts)
        return {"prompt": text, "prompt_token_ids": ids}


def _message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    """A message as templates take it: its content a text, arguments of calls as objects."""
    name = f"messages.{place}"
    role = message.get("role")
    if not isinstance(role, str):
        raise InputError(f"{name}.role={shown(role)} must be a string")
    made = {key: value for key, value in message.items() if value is not None}
    calls = made.get("tool_calls")
    if calls is not None:
        made["tool_calls"] = [_call(call, f"{name}.tool_calls") for call in _listed(calls, name)]
    made["content"] = _content(message.get("content"), f"{name}.content", is_needed=not calls)
    return made


def _content(content: Any, name: str, *, is_needed: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and not is_needed:
        return ""
    if not isinstance(content, list):
        raise InputError(f"{name}={shown(content)} must be a string or a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in TEXT_PARTS else None
        if not isinstance(text, str):
            raise InputError(f"{name}: part {shown(part)} must be {{'type': 'text', 'text': ...}}")
        texts.append(text)
    return "\n".join(texts)


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{name}.tool_calls={shown(value)} must be a list")
    return value


def _call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(f"{name}: {shown(call)} must have a function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InputError(f"{name}: arguments={shown(arguments)} must be JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise `InputError` unless each is {"type": "function", "function": {"name": ..., ...}}."""
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        is_one = tool.get("type") == "function" and isinstance(function, Mapping)
        if not is_one or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(
                f"tools.{i}={shown(tool)} must be {{'type': 'function', 'function': {{'name': ...}}}}"
            )
