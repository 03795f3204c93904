"""/v1/responses: created and streamed. Nothing is kept: a conversation is sent whole each time."""

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.checks import InputError, checked_int, shown
from jaxpaged.serve.json_route import JsonRoute
from jaxpaged.serve.logprobs import TokenNames, chat_logprobs
from jaxpaged.serve.replies import ApiError, event, reply
from jaxpaged.serve.response_items import Event, Items, chat_tools
from jaxpaged.serve.schemas import ResponsesRequest
from jaxpaged.serve.service import Choice, Run, Service, service_of
from jaxpaged.serve.structured import constraint_of, response_format_of
from jaxpaged.serve.tools import AnswerFragments, Form, ReasoningTokens
from jaxpaged.text.conversations import read_items

router = APIRouter(route_class=JsonRoute)

GIVEN_UP = "the answer was given up before its end"
UNCONSTRAINED = "the answer could not be constrained any further"
LOGPROBS = "message.output_text.logprobs"
# What may be asked to be included: all but the first is of tools and inputs that are not there.
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    service = service_of(request)
    model = service.check_model(body.model)
    _refuse_missing(body)
    tools = chat_tools(body.tools)
    # "auto" is the default of OpenAI's clients, with tools and without.
    tool_choice = None if body.tool_choice == "auto" and not tools else body.tool_choice
    form = service.chat_prompts.form(tools, tool_choice, parallel=body.parallel_tool_calls)
    prompt = await service.chat_prompts.render(
        _messages(body),
        tools=tools if tool_choice != "none" else None,
        kwargs=body.template_kwargs,
        cuts=body.cuts,
    )
    form = dataclasses.replace(form, prompt=prompt["prompt"])
    params = body.params(
        service.defaults,
        max_tokens=body.max_output_tokens,
        logprobs=_num_top(body),
        structured_outputs=constraint_of(body, response_format_of(body.text), form, service.llm.tokenizer),
        skip_special_tokens=body.skip_special_tokens and form.is_plain,
    )
    run = await service.start(request, body, "resp", [prompt], params)
    writer = ResponseWriter(body, model, run, service, form)
    if body.stream:
        return service.stream(run, writer.events())
    [choice] = await service.whole(request, run)
    return reply(writer.whole(choice))


@router.get("/v1/responses/{response_id}")
@router.post("/v1/responses/{response_id}/cancel")
async def find_response(response_id: str) -> Response:
    """Answer 404: no response is kept."""
    raise ApiError(404, f"response {shown(response_id)} is not there: none is kept")


def _refuse_missing(body: ResponsesRequest) -> None:
    """Raise `InputError` for what would change the answer, and is not there."""
    for name, is_asked in (
        ("previous_response_id", body.previous_response_id is not None),
        ("background", bool(body.background)),
        ("prompt", body.prompt is not None),
    ):
        if is_asked:
            raise InputError(f"{name} is not supported: leave it out")
    if body.truncation not in (None, "disabled"):
        raise InputError(f"truncation={shown(body.truncation)} must be 'disabled'")
    for i, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise InputError(f"include.{i}={shown(name)} must be one of {', '.join(INCLUDABLE)}")


def _num_top(body: ResponsesRequest) -> int | None:
    """Return how many of the likeliest tokens are asked for; None where no log-probabilities are."""
    if LOGPROBS not in (body.include or ()) and not body.top_logprobs:
        return None
    return checked_int("top_logprobs", body.top_logprobs or 0, "an int in [0, 20]", 0, 20)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the conversation of the input: a text, or items."""
    first: list[dict[str, Any]] = []
    if body.instructions:
        first = [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*first, {"role": "user", "content": body.input}]
    return [*first, *read_items(body.input)]


class ResponseWriter:
    """Writer of one response, whole or as events."""

    def __init__(self, body: ResponsesRequest, model: str, run: Run, service: Service, form: Form) -> None:
        self._body, self._model, self._run = body, model, run
        self._names = TokenNames(service.llm.tokenizer, as_ids=False)
        self._num_top = _num_top(body)
        self._reasoned = ReasoningTokens(form.reasoning, service.llm.tokenizer)
        self._fragments, self._items = AnswerFragments(form, self._reasoned), Items()
        self._sequence_number = -1

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return the response to a request that does not stream."""
        for _ in [*self._add(choice), *self._items.end(_item_status(choice))]:
            pass
        return self._ended(choice)

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of one that does."""
        begun = self._response("in_progress", [])
        yield self._event("created", {"response": begun})
        yield self._event("in_progress", {"response": begun})
        last = Choice(0)
        try:
            async with aclosing(self._run.choices()) as news:
                async for last in news:
                    for change in self._add(last):
                        yield self._event(*change)
        except ApiError as error:
            failed = {"code": "server_error", "message": error.message}
            response = self._response("failed", []) | {"error": failed}
            yield self._event("failed", {"response": response})
            return
        for change in self._items.end(_item_status(last)):
            yield self._event(*change)
        ended = self._ended(last)
        yield self._event(ended["status"], {"response": ended})

    def _add(self, choice: Choice) -> list[Event]:
        logprobs: list[Any] = []
        if self._num_top is not None:
            names, ids, entries = self._names, choice.token_ids, choice.logprobs
            logprobs = chat_logprobs(names, self._num_top, ids, entries)["content"]
        self._reasoned.note_tokens(choice.token_ids)
        fragments = self._fragments.feed(choice.text, is_last=choice.finish_reason is not None)
        return [*self._items.add(fragments, logprobs)]

    def _ended(self, choice: Choice) -> dict[str, Any]:
        status, usage = _status(choice), self._run.usage()
        is_whole = status == "completed"
        return self._response(status, self._items.output) | {
            "completed_at": int(time.time()) if is_whole else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": _error(choice) if status == "failed" else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": self._run.num_cached_tokens,
                    "cache_write_tokens": self._run.num_written_tokens,
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._reasoned.num},
                "total_tokens": usage["total_tokens"],
            },
        }

    def _event(self, kind: str, value: dict[str, Any]) -> bytes:
        self._sequence_number += 1
        name = f"response.{kind}"
        return event({"type": name, "sequence_number": self._sequence_number} | value, name)

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body, params = self._body, self._run.params
        nothing = {"description": None, "parameters": None, "strict": None}
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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": body.reasoning,
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or ("auto" if body.tools else "none"),
            "tools": [nothing | tool for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _status(choice: Choice) -> str:
    """Return a response's status. What the engine has given up, as for new weights, is failed."""
    return {"stop": "completed", "length": "incomplete"}.get(choice.finish_reason or "", "failed")


def _error(choice: Choice) -> dict[str, str]:
    """Return why a response has failed, in OpenAI's form."""
    message = UNCONSTRAINED if choice.finish_reason == "error" else GIVEN_UP
    return {"code": "server_error", "message": message}


def _item_status(choice: Choice) -> str:
    return "completed" if choice.finish_reason == "stop" else "incomplete"
