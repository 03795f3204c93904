"""/v1/chat/completions."""

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.checks import InputError
from jaxpaged.serve.json_route import JsonRoute
from jaxpaged.serve.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from jaxpaged.serve.replies import DONE, ApiError, event, reply
from jaxpaged.serve.schemas import ChatRequest
from jaxpaged.serve.service import Choice, Run, Service, service_of
from jaxpaged.serve.tools import ToolDeltas, contents, reasoning_fields

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    service = service_of(request)
    writer = Writer(body, service)
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
    params = body.params(
        service.defaults,
        max_tokens=body.most_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        # The marks of calls and reasoning are special tokens of some models.
        skip_special_tokens=body.skip_special_tokens and writer.is_plain,
    )
    writer.answers(prompt["prompt"])
    run = await service.start(request, body, "chatcmpl", [prompt], params)
    if body.stream:
        return service.stream(run, writer.events(run))
    choices = await service.whole(request, run)
    return reply(writer.whole(run, choices))


class Writer:
    """Writes one request's answers down."""

    def __init__(self, body: ChatRequest, service: Service) -> None:
        self._body = body
        self._model = service.check_model(body.model)
        self._names = TokenNames(service.llm.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._form = service.chat_prompts.form(
            body.tools,
            body.tool_choice,
            parallel=body.parallel_tool_calls,
            includes_reasoning=body.include_reasoning,
        )
        # Whose turn the answer is, and what it begins with.
        last = body.messages[-1]
        is_continued = not body.add_generation_prompt
        self._role = str(last.get("role")) if is_continued else "assistant"
        told = last.get("content") if body.echo and is_continued else ""
        self._told = told if isinstance(told, str) else ""

    def answers(self, prompt: str) -> None:
        """Take in the text that the answers follow, which tells how they begin."""
        content = self._body.messages[-1].get("content") if self._body.continue_final_message else ""
        begun = content if isinstance(content, str) else ""
        self._form = dataclasses.replace(self._form, prompt=prompt, begun=begun)

    @property
    def is_plain(self) -> bool:
        """Whether answers are text, in which neither calls nor reasoning are looked for."""
        return self._form.is_plain

    def _deltas(self) -> ToolDeltas | None:
        return None if self._form.is_plain else ToolDeltas(self._form)

    def whole(self, run: Run, choices: list[Choice]) -> dict[str, Any]:
        body, written = self._body, []
        for choice in choices:
            calls: list[dict[str, Any]] = []
            content: str | None = choice.text
            reasoning = ""
            if (deltas := self._deltas()) is not None:
                content = contents(deltas.feed(choice.text, is_last=True))
                calls, reasoning = deltas.calls, deltas.reasoning
                content = content if content or not (calls or reasoning) else None
            message: dict[str, Any] = {
                "role": self._role,
                "content": self._told + content if content is not None else None,
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
                "finish_reason": _reason(choice, bool(calls)),
                "stop_reason": choice.stop_reason,
            }
            if body.return_token_ids:
                each["token_ids"] = choice.token_ids
            written.append(each)
        made = self._chunk(run, "chat.completion", written) | {"usage": run.usage()}
        if body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs)
        if body.return_token_ids:
            made["prompt_token_ids"] = run.prompts[0].prompt_token_ids.tolist()
        return made

    async def events(self, run: Run) -> AsyncGenerator[bytes]:
        body, kind = self._body, "chat.completion.chunk"
        deltas = [self._deltas() for _ in range(run.params.n)]
        is_first = True
        try:
            async with aclosing(run.outputs()) as outputs:
                async for _, output, answer in outputs:
                    if is_first:
                        for index in range(run.params.n):
                            yield self._event(run, self._begun(run, index, is_first=not index))
                        is_first = False
                    choice = Choice(answer.index)
                    choice.add(output, answer)
                    its = deltas[answer.index]
                    text, is_last = choice.text, choice.finish_reason is not None
                    parts = (
                        [{"content": text}]
                        if its is None
                        else [*its.feed(text, is_last=is_last)] or [{"content": ""}]
                    )
                    for place, delta in enumerate(parts):
                        ends = place == len(parts) - 1  # tokens and reason go with what is told last
                        is_nothing = not any(delta.values()) and not (ends and choice.logprobs)
                        if is_nothing and not (ends and (is_last or body.return_token_ids)):
                            continue
                        each: dict[str, Any] = {
                            "index": choice.index,
                            "delta": delta,
                            "logprobs": self._logprobs(choice.token_ids, choice.logprobs) if ends else None,
                            "finish_reason": _reason(choice, bool(its and its.has_calls)) if ends else None,
                        }
                        if ends and is_last:
                            each["stop_reason"] = choice.stop_reason
                        if ends and body.return_token_ids:
                            each["token_ids"] = choice.token_ids
                        yield self._event(run, self._chunk(run, kind, [each]))
            if body.includes_usage:
                yield event(self._chunk(run, kind, []) | {"usage": run.usage()})
        except ApiError as error:
            yield event(error.body)
        yield DONE

    def _begun(self, run: Run, index: int, *, is_first: bool) -> dict[str, Any]:
        delta = {"role": self._role, "content": self._told}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._chunk(run, "chat.completion.chunk", [choice])
        if is_first and self._body.return_token_ids:
            chunk["prompt_token_ids"] = run.prompts[0].prompt_token_ids.tolist()
        return chunk

    def _event(self, run: Run, chunk: dict[str, Any]) -> bytes:
        return event(chunk | {"usage": run.usage()} if self._body.continuous_usage else chunk)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._names, self._body.top_logprobs or 0, token_ids, logprobs)

    def _chunk(self, run: Run, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": run.id,
            "object": kind,
            "created": run.created,
            "model": self._model,
            "choices": choices,
        }


def _reason(choice: Choice, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and choice.finish_reason == "stop" else choice.finish_reason
