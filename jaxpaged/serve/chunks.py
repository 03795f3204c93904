"""Completions in OpenAI's form: one object, or a stream of chunks, each with a list of choices."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from jaxpaged.serve.logprobs import TokenNames
from jaxpaged.serve.replies import DONE, ApiError, event, reply
from jaxpaged.serve.schemas import ChatRequest, CompletionRequest
from jaxpaged.serve.service import Choice, Run, Service
from jaxpaged.step import channels


class ChunkWriter[Body: (ChatRequest, CompletionRequest)]:
    """Base of the writers of one request's answers: `object_name` is a chunk's `object`."""

    object_name: str

    def __init__(self, body: Body, service: Service) -> None:
        """Raise `ApiError` for a model that is not here."""
        self._body: Body = body
        self._service = service
        self._model = service.check_model(body.model)
        self._names = TokenNames(service.llm.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))

    async def respond(self, request: Request, run: Run) -> Response:
        """Return the response to a request, whole or as a stream."""
        if self._body.stream:
            return self._service.stream(run, self._events(run))
        return reply(self.whole(run, await self._service.whole(request, run)))

    def whole(self, run: Run, choices: list[Choice]) -> dict[str, Any]:
        """Return all answers as one object."""
        raise NotImplementedError

    def chunks(self, run: Run) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of a stream, without their usage."""
        raise NotImplementedError

    def chunk(self, run: Run, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk with these choices."""
        return {
            "id": run.id,
            "object": self.object_name,
            "created": run.created,
            "model": self._model,
            "choices": choices,
        }

    def usage(self, run: Run) -> dict[str, Any]:
        """Return the token usage so far."""
        return run.usage()

    def fields_at_end(self, run: Run, index: int) -> dict[str, Any]:
        """Return the fields of a choice's end: the versions of its weights, and values of channels."""
        fields: dict[str, Any] = {}
        if self._body.return_weight_versions:
            fields["weight_versions"] = run.versions[index].written()
        return fields | channels.as_json(channels.joined(run.channels[index]))

    async def _events(self, run: Run) -> AsyncGenerator[bytes]:
        """Yield the events of a stream; an `ApiError` is the last but one."""
        try:
            async with aclosing(self.chunks(run)) as chunks:
                async for chunk in chunks:
                    yield event(chunk | {"usage": self.usage(run)} if self._body.continuous_usage else chunk)
            if self._body.includes_usage:
                yield event(self.chunk(run, []) | {"usage": self.usage(run)})
        except ApiError as error:
            yield event(error.body)
        yield DONE
