"""/v1/responses: created and streamed, of text. Nothing is kept: a conversation is sent whole each time."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.checks import InputError, shown
from jaxpaged.serve.replies import ApiError, event, reply
from jaxpaged.serve.schemas import ResponsesRequest
from jaxpaged.serve.service import Choice, Run, service_of

router = APIRouter()


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    service = service_of(request)
    model = service.check_model(body.model)
    _refuse_missing(body)
    prompt = await service.chat_prompts.render(_messages(body), kwargs=body.template_kwargs, cuts=body.cuts)
    params = body.params(service.defaults, max_tokens=body.max_output_tokens, logprobs=None)
    run = await service.start(request, body, "resp", [prompt], params)
    writer = Writer(body, model, run)
    if body.stream:
        return service.stream(run, writer.events())
    [choice] = await service.whole(request, run)
    return reply(writer.ended(choice))


@router.get("/v1/responses/{response_id}")
@router.post("/v1/responses/{response_id}/cancel")
async def find_response(response_id: str) -> Response:
    """Always 404."""
    raise ApiError(404, f"response {shown(response_id)} is not there: none is kept")


def _refuse_missing(body: ResponsesRequest) -> None:
    """Raise `InputError` for what would change the answer, and is not there."""
    kind = (body.text or {}).get("format")
    if kind is not None and not (isinstance(kind, Mapping) and kind.get("type") == "text"):
        raise InputError("text.format must be {'type': 'text'}: others are not supported yet")
    for name, is_asked in (
        ("previous_response_id", body.previous_response_id is not None),
        ("background", bool(body.background)),
        ("prompt", body.prompt is not None),
        ("top_logprobs", bool(body.top_logprobs)),
        ("tools", bool(body.tools) and body.tool_choice != "none"),
    ):
        if is_asked:
            raise InputError(f"{name} is not supported: leave it out")
    if body.truncation not in (None, "disabled"):
        raise InputError(f"truncation={shown(body.truncation)} must be 'disabled'")


def _messages(body: ResponsesRequest) -> list[Mapping[str, Any]]:
    """The conversation of the input: a text, or messages."""
    first: list[Mapping[str, Any]] = []
    if body.instructions:
        first = [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*first, {"role": "user", "content": body.input}]
    messages = []
    for i, item in enumerate(body.input):
        if item.get("type", "message") != "message":
            raise InputError(f"input.{i}.type={shown(item['type'])} must be 'message'")
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": item.get("content")})
    return [*first, *messages]


class Writer:
    """Writes one response down, whole or as events."""

    def __init__(self, body: ResponsesRequest, model: str, run: Run) -> None:
        self._body, self._model, self._run = body, model, run
        self._message_id = f"msg{run.id.removeprefix('resp')}"
        self._sequence_number = -1

    def ended(self, choice: Choice) -> dict[str, Any]:
        is_whole = choice.finish_reason == "stop"
        status = "completed" if is_whole else "incomplete"
        usage = self._run.usage()
        return self._response(status, [self._message(status, [_part(choice.text)])]) | {
            "completed_at": int(time.time()) if is_whole else None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": self._run.num_cached_tokens},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    async def events(self) -> AsyncGenerator[bytes]:
        at = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        item, choice = {"output_index": 0}, Choice(0)
        begun = self._response("in_progress", [])
        yield self._event("created", {"response": begun})
        yield self._event("in_progress", {"response": begun})
        yield self._event("output_item.added", item | {"item": self._message("in_progress", [])})
        yield self._event("content_part.added", at | {"part": _part("")})
        try:
            async with aclosing(self._run.outputs()) as outputs:
                async for _, output, answer in outputs:
                    choice.add(output, answer)
                    if answer.text:
                        delta = at | {"delta": answer.text, "logprobs": []}
                        yield self._event("output_text.delta", delta)
        except ApiError as error:
            failed = {"code": "server_error", "message": error.message}
            response = self._response("failed", []) | {"error": failed}
            yield self._event("failed", {"response": response})
            return
        ended = self.ended(choice)
        yield self._event("output_text.done", at | {"text": choice.text, "logprobs": []})
        yield self._event("content_part.done", at | {"part": _part(choice.text)})
        yield self._event("output_item.done", item | {"item": ended["output"][0]})
        yield self._event(ended["status"], {"response": ended})

    def _event(self, kind: str, value: dict[str, Any]) -> bytes:
        self._sequence_number += 1
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": self._sequence_number} | value, name)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self._run.params
        return {
            "id": self._run.id,
            "object": "response",
            "created_at": self._run.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "background": False,
            "frequency_penalty": params.frequency_penalty,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": True,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": None,
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
