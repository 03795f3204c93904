"""/v1/messages: Anthropic's Messages API, whole and streamed, with tools, thinking and cache control."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.api.async_llm import TOKENIZED_HERE
from jaxpaged.checks import InputError
from jaxpaged.serve.json_route import JsonRoute
from jaxpaged.serve.message_blocks import Blocks
from jaxpaged.serve.message_errors import message_error
from jaxpaged.serve.message_prompts import Breakpoint, Conversation, ConversationReader
from jaxpaged.serve.message_schemas import MessagesRequest
from jaxpaged.serve.pins import Span
from jaxpaged.serve.replies import ApiError, event, reply
from jaxpaged.serve.service import Choice, Run, Service, service_of
from jaxpaged.serve.structured import constraint_of
from jaxpaged.serve.tools import AnswerFragments, Form, ReasoningTokens
from jaxpaged.serve.turns import (
    SHOWN_CHARS,
    SHOWN_TOKENS,
    Difference,
    Fingerprint,
    Turn,
    num_alike,
    rejoined,
    text_digest,
)
from jaxpaged.text.vocabulary import vocabulary_of

router = APIRouter(route_class=JsonRoute)

PING_S = 15.0  # of silence in a stream
GIVEN_UP = "the answer was given up before its end"
UNCONSTRAINED = "the answer could not be constrained any further"
TTL_FIELDS = {300.0: "ephemeral_5m_input_tokens", 3600.0: "ephemeral_1h_input_tokens"}


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    body.check()
    service = service_of(request)
    model = service.check_model(body.model)
    conversation = ConversationReader(body).read()
    form = _form(body, conversation, service)
    prompt = await _render(body, conversation, service)
    scope = service.scope(request, body.cache_salt)
    read = functools.partial(Fingerprint.of, scope, model, conversation.tools, conversation.messages)
    fingerprint = await asyncio.to_thread(read) if len(prompt["prompt"]) > TOKENIZED_HERE else read()
    session = await Session.of(service, fingerprint, body.previous_message_id, prompt)
    prompt = session.prompt
    form = dataclasses.replace(form, prompt=prompt["prompt"], begun=_begun(conversation))
    params = body.params(
        service.defaults,
        max_tokens=1 if body.is_without_answer else body.max_tokens,
        logprobs=None,
        structured_outputs=constraint_of(body, body.response_format, form, service.llm.tokenizer),
        skip_special_tokens=body.skip_special_tokens and form.is_plain,
    )
    spans = await _spans(body, conversation, service, prompt)
    run = await service.start(request, body, "msg", [prompt], params, spans=spans)
    run.log_fields |= session.log_fields
    writer = MessageWriter(body, model, run, service, form, session)
    if body.stream:
        return service.stream(run, with_pings(writer.events()), _error_event)
    [choice] = await service.whole(request, run)
    return reply(writer.whole(choice))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: MessagesRequest, request: Request) -> Response:
    """Answer with the number of tokens that a conversation's prompt has."""
    body.check(counts=True)
    service = service_of(request)
    service.check_model(body.model)
    conversation = ConversationReader(body).read()
    _form(body, conversation, service)
    prompt = await _render(body, conversation, service)
    return reply({"input_tokens": len(prompt["prompt_token_ids"])})


def _form(body: MessagesRequest, conversation: Conversation, service: Service) -> Form:
    """Return how the answer is read. "auto" without tools asks for nothing. Raises `InputError`."""
    tools, choice = conversation.tools, conversation.tool_choice
    return service.chat_prompts.form(
        tools,
        None if choice == "auto" and not tools else choice,
        parallel=conversation.parallel,
        includes_reasoning=body.includes_thinking,
    )


async def _render(body: MessagesRequest, conversation: Conversation, service: Service) -> dict[str, Any]:
    return await service.chat_prompts.render(
        conversation.messages,
        tools=conversation.tools if conversation.tool_choice != "none" else None,
        add_generation_prompt=not conversation.continues,
        continue_final_message=conversation.continues,
        kwargs=body.template_kwargs,
        cuts=body.cuts,
    )


def _begun(conversation: Conversation) -> str:
    content = conversation.messages[-1]["content"] if conversation.continues else ""
    return content if isinstance(content, str) else ""


async def _spans(
    body: MessagesRequest, conversation: Conversation, service: Service, prompt: dict[str, Any]
) -> list[Span]:
    """Return the beginnings of a prompt that its breakpoints ask to be kept; none where nothing can be."""
    if not service.pins.max_tokens or body.truncate_prompt_tokens is not None:
        return []
    text, ids = prompt["prompt"], prompt["prompt_token_ids"]
    spans = []
    for place in conversation.breakpoints:
        if place.is_end:
            spans.append(Span(len(ids), place.seconds))
            continue
        shared = _shared(text, await _changed_behind(place, body, conversation, service))
        if not shared:
            continue
        covered = await service.llm.tokenize(shared, add_special_tokens=False)
        spans.append(Span(num_alike(np.asarray(ids, np.int32), covered), place.seconds))
    return spans


async def _changed_behind(
    place: Breakpoint, body: MessagesRequest, conversation: Conversation, service: Service
) -> str:
    """Return the text of a prompt that differs behind a breakpoint; "" if the chat template refuses each."""
    for ends in (False, True):
        with contextlib.suppress(InputError):
            prompt = await service.chat_prompts.render(
                conversation.until(place, ends=ends),
                tools=conversation.tools if conversation.tool_choice != "none" else None,
                add_generation_prompt=False,
                kwargs=body.template_kwargs,
            )
            return str(prompt["prompt"])
    return ""


@dataclasses.dataclass(frozen=True)
class Session:
    """Session that a request belongs to, and its turn before.

    prompt: its text and tokens, those of the turn before as they were written.
    before: the turn before, if it is known.
    is_named: whether the client named the turn before by its id.
    """

    service: Service
    fingerprint: Fingerprint
    prompt: dict[str, Any]
    before: Turn | None
    is_named: bool
    difference: Difference | None

    @classmethod
    async def of(
        cls, service: Service, fingerprint: Fingerprint, message_id: str | None, prompt: dict[str, Any]
    ) -> "Session":
        """Look up the turn before a prompt, and compare it with it."""
        before, difference = service.turns.before(fingerprint, message_id), None
        config = service.llm.engine.config
        if before is not None:
            if config.reuse_answers:
                tokenize, text = service.llm.tokenize, prompt["prompt"]

                async def cut(text: str) -> list[int]:
                    return await tokenize(text, add_special_tokens=False)

                ids = await rejoined(before, text, prompt["prompt_token_ids"], cut)
                prompt = prompt if ids is None else prompt | {"prompt_token_ids": ids}
            difference = service.turns.compare(
                before, fingerprint, prompt["prompt_token_ids"], config.block_size
            )
        return cls(service, fingerprint, prompt, before, message_id is not None, difference)

    @property
    def log_fields(self) -> dict[str, Any]:
        """Fields of the request's line in the log."""
        if self.difference is None:
            return {}
        return {"changed_by": self.difference.changed, "first_changed_token": self.difference.token}

    @property
    def diagnostics(self) -> dict[str, Any] | None:
        """The comparison with the turn before, in Anthropic's form; None where nothing was lost."""
        if self.difference is None:
            if self.is_named and self.before is None:
                return {"cache_miss_reason": {"type": "previous_message_not_found"}}
            return None
        changed, ids = self.difference, self.prompt["prompt_token_ids"]
        kind = "messages" if changed.changed == "template" else changed.changed
        shown = ids[changed.token : changed.token + SHOWN_TOKENS]
        text = self.service.llm.tokenizer.decode(shown, skip_special_tokens=False)
        return {
            "cache_miss_reason": {
                "type": f"{kind}_changed",
                "cache_missed_input_tokens": changed.num_missed_tokens,
                "changed_by": "template" if changed.changed == "template" else "request",
                "previous_message_id": changed.message_id,
                "first_changed_token": changed.token,
                "text": text[:SHOWN_CHARS],
            }
        }


class MessageWriter:
    """Writer of one message, whole or as events."""

    def __init__(
        self,
        body: MessagesRequest,
        model: str,
        run: Run,
        service: Service,
        form: Form,
        session: Session,
    ) -> None:
        self._body, self._model, self._run, self._service = body, model, run, service
        self._session = session
        self._reasoned = ReasoningTokens(form.reasoning, service.llm.tokenizer)
        self._fragments, self._blocks = AnswerFragments(form, self._reasoned), Blocks()
        self._answer: list[int] = []
        self._texts: list[str] = []

    def whole(self, choice: Choice) -> dict[str, Any]:
        """Return the message for a request that does not stream. Raises `ApiError`."""
        for _ in [*self._add(choice), *self._blocks.end()]:
            pass
        self._check_end(choice)
        self._remember(choice)
        content = [] if self._body.is_without_answer else self._blocks.content
        return self._message(content) | self._stop(choice) | {"usage": self.usage()}

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of a stream; an error is the last of them."""
        last: Choice | None = None
        try:
            async with aclosing(self._run.choices()) as news:
                async for choice in news:
                    if last is None:
                        yield _event({"type": "message_start", "message": self._begun()})
                        yield PING
                    last = choice
                    for change in self._add(choice):
                        yield _event(change)
            assert last is not None
            for change in self._blocks.end():
                yield _event(change)
            self._check_end(last)
        except ApiError as error:
            yield _error_event(error)
            return
        self._remember(last)
        yield _event({"type": "message_delta", "delta": self._stop(last), "usage": self.usage()})
        yield _event({"type": "message_stop"})

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far: of the prompt those read from caches, those written, and the others."""
        run = self._run
        read, written = run.num_cached_tokens, run.num_written_tokens
        by_ttl = dict.fromkeys(TTL_FIELDS.values(), 0)
        for seconds, num in _written_by_seconds(run.pinned, read, read + written).items():
            if seconds in TTL_FIELDS:
                by_ttl[TTL_FIELDS[seconds]] += num
        kept = [{"input_tokens": span.num_tokens, "seconds": span.seconds} for span in run.pinned]
        return {
            "input_tokens": run.num_prompt_tokens - read - written,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": written,
            "cache_creation": {**by_ttl, "kept": kept},
            "output_tokens": 0 if self._body.is_without_answer else run.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._reasoned.num},
            "service_tier": "standard",
        }

    def _add(self, choice: Choice) -> list[dict[str, Any]]:
        self._answer += choice.token_ids
        self._texts.append(choice.text)
        self._reasoned.note_tokens(choice.token_ids)
        fragments = self._fragments.feed(choice.text, is_last=choice.finish_reason is not None)
        return [*self._blocks.add(fragments)]

    def _message(self, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._run.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "diagnostics": self._session.diagnostics,
        }

    def _begun(self) -> dict[str, Any]:
        """Return the message at its beginning: nothing of it has been told."""
        return self._message([]) | {"usage": self.usage() | {"output_tokens": 0}}

    def _check_end(self, choice: Choice) -> None:
        """Raise `ApiError` for an answer that the engine has given up."""
        if choice.finish_reason == "error":
            raise ApiError(500, UNCONSTRAINED)
        if choice.finish_reason not in ("stop", "length"):
            raise ApiError(503, GIVEN_UP)

    def _stop(self, choice: Choice) -> dict[str, Any]:
        """Return why the answer has ended."""
        reason, sequence = "end_turn", None
        if self._body.is_without_answer:
            reason = "max_tokens"
        elif choice.finish_reason == "length":
            is_full = self._run.num_completion_tokens < (self._body.max_tokens or 0)
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        elif isinstance(choice.stop_reason, str):
            reason, sequence = "stop_sequence", choice.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _remember(self, choice: Choice) -> None:
        """Let the session's next turn be compared with this one."""
        if self._body.is_without_answer:
            return
        session, config = self._session, self._service.llm.engine.config
        prompt = self._run.prompts[0].prompt_token_ids
        ids = np.concatenate([prompt, np.asarray(self._answer, np.int32)])
        num_findable = len(ids) - 1 if config.reuse_answers else len(prompt)
        turn = Turn(
            self._run.id, session.fingerprint.brief, ids, num_findable if config.enable_prefix_caching else 0
        )
        if config.reuse_answers and self._is_exact(choice):
            text = "".join([session.prompt["prompt"], *self._texts])
            turn = dataclasses.replace(
                turn,
                text_size=len(text),
                text_digest=text_digest(text),
                num_text_tokens=len(ids) - (choice.finish_reason == "stop"),
            )
        self._service.turns.add(turn, session.before)

    def _is_exact(self, choice: Choice) -> bool:
        """Tell whether the answer's text is the text of all its tokens, but for a stop token at the end."""
        if isinstance(choice.stop_reason, str) or self._body.truncate_prompt_tokens is not None:
            return False
        if not self._run.params.skip_special_tokens:
            return True
        return vocabulary_of(self._service.llm.tokenizer).special.isdisjoint(self._answer[:-1])


def _shared(first: str, second: str) -> str:
    """Return the beginning that two texts have in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return first[:low]


def _written_by_seconds(spans: Sequence[Span], begin: int, end: int) -> dict[float, int]:
    """Return for how many tokens in [begin, end) each number of seconds is the longest asked for."""
    longest: dict[float, int] = {}
    for span in sorted(spans, key=lambda span: -span.seconds):
        stop = min(span.num_tokens, end)
        if stop > begin:
            longest[span.seconds] = longest.get(span.seconds, 0) + stop - begin
            begin = stop
    return longest


def _event(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])


def _error_event(error: ApiError) -> bytes:
    return _event(message_error(error))


PING = _event({"type": "ping"})


async def with_pings(events: AsyncGenerator[bytes], silence_s: float = PING_S) -> AsyncGenerator[bytes]:
    """Yield the events, and a ping after every so many seconds without any."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            if waiting is None:
                waiting = asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({waiting}, timeout=silence_s)
            if not done:
                yield PING
                continue
            try:
                new = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield new
    finally:
        if waiting is not None:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception, StopAsyncIteration):
                await waiting
        await events.aclose()
