"""Conversations, with tools, as prompts; and by which parsers their answers are read."""

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.api.async_llm import TOKENIZED_HERE, AsyncLLM
from jaxpaged.checks import InputError
from jaxpaged.serve.bounds import size_of
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.parsers import REASONING_PARSERS, TOOL_PARSERS, detected
from jaxpaged.serve.structured import forced, strict_calls
from jaxpaged.serve.tools import Form
from jaxpaged.text.conversations import check_tools, read_messages
from jaxpaged.text.templates import Template, render

MANY = 64  # messages: more, and calls, whose arguments may be long, are written in another thread
HARMONY = "openai_gptoss"  # the one form in which even a plain answer can't be read without a parser


class ChatPrompts:
    """The prompts of one model's server, by its own chat template or the one of the options."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self._llm, self._own = llm, options.chat_template
        self._content_format = options.chat_template_content_format
        given = self._own or getattr(llm.tokenizer, "chat_template", None) or ""
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        self.takes_tools = Template(text).takes_tools
        self.parser: str | None = options.tool_call_parser
        if options.tool_call_parser == "auto":
            # Without a sign in a template that takes tools, Llama 3's plain JSON.
            self.parser = detected(TOOL_PARSERS, text) or ("llama3_json" if self.takes_tools else None)
        self.reasoning_parser: str | None = options.reasoning_parser
        if options.reasoning_parser in ("auto", "none"):
            is_harmony = detected(REASONING_PARSERS, text) == HARMONY
            self.reasoning_parser = HARMONY if is_harmony and options.reasoning_parser == "auto" else None

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
        read = read_messages(messages)
        write = functools.partial(
            render,
            self._llm.tokenizer,
            read,
            chat_template=self._own,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=self._content_format,
            kwargs=kwargs,
        )
        is_long = size_of((read, tools, kwargs)) > TOKENIZED_HERE
        text = await asyncio.to_thread(write) if is_long else write()
        # The template writes the special tokens itself.
        ids = await self._llm.tokenize(text, add_special_tokens=add_special_tokens, cuts=cuts)
        return {"prompt": text, "prompt_token_ids": ids}

    def form(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: object,
        *,
        parallel: bool | None = True,
        includes_reasoning: bool | None = True,
    ) -> Form:
        """Return how the answer to a request with these tools is read. Raises `InputError`."""
        check_tools(tools)
        if tool_choice not in (None, "none", "auto"):
            calls, its_tools, constraint = forced(tools or (), tool_choice, parallel=parallel is not False)
            return Form(
                calls=calls,
                reasoning=self.reasoning_parser,
                tools=its_tools,
                parallel=parallel is not False,
                includes_reasoning=includes_reasoning is not False,
                constraint=constraint,
            )
        if tool_choice == "auto" and not tools:
            raise InputError("tool_choice must be left out unless tools are given")
        has_calls = bool(tools) and tool_choice != "none"
        parser = self.parser if has_calls else None
        if has_calls and parser is None:
            raise InputError("tools: it is not known how the model writes calls; give --tool-call-parser")
        # Without room for automata, strict tools are as others are.
        strict = None
        if parser is not None and self._llm.engine.config.most_arena_words:
            tool_parser = TOOL_PARSERS[parser]
            strict = strict_calls(
                tool_parser, tools or (), self._llm.tokenizer, parallel=parallel is not False
            )
        return Form(
            calls=parser,
            reasoning=self.reasoning_parser,
            tools=tools or () if has_calls else (),
            parallel=parallel is not False,
            includes_reasoning=includes_reasoning is not False,
            strict=strict,
        )
