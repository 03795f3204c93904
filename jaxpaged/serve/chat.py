"""/v1/chat/completions."""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.checks import InputError
from jaxpaged.serve.chunks import ChunkWriter
from jaxpaged.serve.json_route import JsonRoute
from jaxpaged.serve.logprobs import chat_logprobs, prompt_logprobs
from jaxpaged.serve.schemas import ChatRequest
from jaxpaged.serve.service import Choice, Run, Service, service_of
from jaxpaged.serve.structured import constraint_of
from jaxpaged.serve.tools import Form, ReasoningTokens, ToolDeltas, contents, reasoning_fields

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    service = service_of(request)
    writer = ChatWriter(body, service)
    if body.chat_template is not None:
        raise InputError("chat_template is the server's own: give it by --chat-template")
    prompt = await service.chat_prompts.render(
        body.messages,
        tools=body.tools if body.tool_choice != "none" else None,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        kwargs=body.template_kwargs,
        cuts=body.cuts,
    )
    if body.top_logprobs and not body.logprobs:
        raise InputError("top_logprobs must be left out unless logprobs is true")
    writer.answers(prompt["prompt"])
    params = body.params(
        service.defaults,
        max_tokens=body.most_tokens,
        structured_outputs=constraint_of(body, body.response_format, writer.form, service.llm.tokenizer),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        # The marks of calls and reasoning are special tokens of some models.
        skip_special_tokens=body.skip_special_tokens and writer.is_plain,
    )
    run = await service.start(request, body, "chatcmpl", [prompt], params)
    return await writer.respond(request, run)


class ChatWriter(ChunkWriter[ChatRequest]):
    """Writer of one conversation's answers."""

    object_name = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, service: Service) -> None:
        super().__init__(body, service)
        self._form = service.chat_prompts.form(
            body.tools,
            body.tool_choice,
            parallel=body.parallel_tool_calls,
            includes_reasoning=body.include_reasoning,
        )
        self._reasoned: dict[int, ReasoningTokens] = {}  # of each answer
        # The role of the answer, and the text that it begins with.
        last = body.messages[-1]
        is_continued = not body.add_generation_prompt
        self._role = str(last.get("role")) if is_continued else "assistant"
        echo = last.get("content") if body.echo and is_continued else ""
        self._echo = echo if isinstance(echo, str) else ""

    def answers(self, prompt: str) -> None:
        """Keep the rendered prompt, and the unfinished message that the answers continue, for the parsers."""
        content = self._body.messages[-1].get("content") if self._body.continue_final_message else ""
        begun = content if isinstance(content, str) else ""
        self._form = dataclasses.replace(self._form, prompt=prompt, begun=begun)

    @property
    def is_plain(self) -> bool:
        """Whether answers are text, in which neither calls nor reasoning are looked for."""
        return self._form.is_plain

    def _deltas(self, index: int) -> ToolDeltas | None:
        if self._form.is_plain:
            return None
        reasoned = self._reasoned[index] = ReasoningTokens(self._form.reasoning, self._service.llm.tokenizer)
        return ToolDeltas(self._form, reasoned)

    def usage(self, run: Run) -> dict[str, Any]:
        num = sum(each.num for each in self._reasoned.values())
        return run.usage() | {"completion_tokens_details": {"reasoning_tokens": num}}

    def whole(self, run: Run, choices: list[Choice]) -> dict[str, Any]:
        body, written = self._body, []
        for choice in choices:
            calls: list[dict[str, Any]] = []
            content: str | None = choice.text
            reasoning = ""
            if (deltas := self._deltas(choice.index)) is not None:
                self._reasoned[choice.index].note_tokens(choice.token_ids)
                content = contents(deltas.feed(choice.text, is_last=True))
                calls, reasoning = deltas.calls, deltas.reasoning
                content = content if content or not (calls or reasoning) else None
            message: dict[str, Any] = {
                "role": self._role,
                "content": self._echo + content if content is not None else None,
                "refusal": None,
                "annotations": None,
            }
            if calls:
                message["tool_calls"] = calls
            if reasoning:
                message |= reasoning_fields(reasoning)
            each: dict[str, Any] = {
                "index": choice.index,
                "message": message,
                "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                "finish_reason": self._reason(choice, bool(calls)),
                "stop_reason": choice.stop_reason,
            }
            if body.return_token_ids:
                each["token_ids"] = choice.token_ids
            written.append(each | self.fields_at_end(run, choice.index))
        made = self.chunk(run, written) | {"object": "chat.completion", "usage": self.usage(run)}
        if body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs)
        if body.return_token_ids:
            made["prompt_token_ids"] = run.prompts[0].prompt_token_ids.tolist()
        return made

    async def chunks(self, run: Run) -> AsyncGenerator[dict[str, Any]]:
        body = self._body
        deltas = [self._deltas(index) for index in range(run.params.n)]
        is_first = True
        async with aclosing(run.choices()) as news:
            async for choice in news:
                if is_first:
                    for index in range(run.params.n):
                        yield self._begun(run, index, is_first=not index)
                    is_first = False
                if (tool_deltas := deltas[choice.index]) is not None:
                    self._reasoned[choice.index].note_tokens(choice.token_ids)
                text, is_last = choice.text, choice.finish_reason is not None
                parts = (
                    [{"content": text}]
                    if tool_deltas is None
                    else [*tool_deltas.feed(text, is_last=is_last)] or [{"content": ""}]
                )
                for place, delta in enumerate(parts):
                    ends = place == len(parts) - 1  # tokens and reason go with the last delta
                    is_nothing = not any(delta.values()) and not (ends and choice.logprobs)
                    if is_nothing and not (ends and (is_last or body.return_token_ids)):
                        continue
                    each: dict[str, Any] = {
                        "index": choice.index,
                        "delta": delta,
                        "logprobs": self._logprobs(choice.token_ids, choice.logprobs) if ends else None,
                        "finish_reason": self._reason(choice, bool(tool_deltas and tool_deltas.has_calls))
                        if ends
                        else None,
                    }
                    if ends and is_last:
                        each |= {"stop_reason": choice.stop_reason} | self.fields_at_end(run, choice.index)
                    if ends and body.return_token_ids:
                        each["token_ids"] = choice.token_ids
                    yield self.chunk(run, [each])

    def _begun(self, run: Run, index: int, *, is_first: bool) -> dict[str, Any]:
        delta = {"role": self._role, "content": self._echo}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self.chunk(run, [choice])
        if is_first and self._body.return_token_ids:
            chunk["prompt_token_ids"] = run.prompts[0].prompt_token_ids.tolist()
        return chunk

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._names, self._body.top_logprobs or 0, token_ids, logprobs)

    def _reason(self, choice: Choice, has_calls: bool) -> str | None:
        is_calls = has_calls and self._form.ends_with_calls and choice.finish_reason == "stop"
        return "tool_calls" if is_calls else choice.finish_reason

    @property
    def form(self) -> Form:
        """Form in which the answers are read."""
        return self._form
