"""Replies: JSON, errors in OpenAI's form, and streams of events whose readers may be slow or gone."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# OpenAI's names for what went wrong, as vLLM gives them.
ERROR_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
DONE = b"data: [DONE]\n\n"
MOST_MESSAGE = 2000  # characters of an error: what others raise may quote all of a body


class ApiError(Exception):
    """Error that a client gets in place of an answer, or at the end of a stream."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        if len(message) > MOST_MESSAGE:
            message = f"{message[:MOST_MESSAGE]}..."
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "BadRequestError")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.status},
        }

    def response(self) -> Response:
        return reply(self.body, self.status, self.headers)


def dumps(value: Any) -> bytes:
    """Return a value as JSON in UTF-8. Half a surrogate pair, which UTF-8 lacks, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, "application/json")


def event(value: Any, name: str | None = None) -> bytes:
    """Return a value as a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dumps(value) + b"\n\n"


class GoneError(Exception):
    """Error for a client that has disconnected before its answer."""


async def unless_gone[T](request: Request, answer: Awaitable[T]) -> T:
    """Return the result of `answer`; cancel it and raise `GoneError` as soon as the client closes the
    connection.
    """
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GoneError
        return working.result()
    finally:
        for task in (working, leaving):
            await _cancelled(task)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


class EventStream(Response):
    """Sends events as they come, joined where the client is slower than they are.

    They are taken when they are there, whoever reads: beyond `max_unread_bytes` that wait to be sent, the
    stream is given up, and `slow` is called. It is given up, too, when the client goes. `closed` is called
    at the end, whatever it was.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        max_unread_bytes: int,
        slow: Callable[[], None],
        closed: Callable[[], None],
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"  # asks proxies not to wait for more
        self._events, self._max_unread_bytes = events, max_unread_bytes
        self._slow, self._closed = slow, closed
        self._unread: list[bytes] = []
        self._changed = asyncio.Event()
        self._is_complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taking = asyncio.ensure_future(self._take())
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive))
        tasks: set[asyncio.Future[None]] = {taking, sending, leaving}
        try:
            while not (sending.done() or leaving.done() or (taking.done() and not self._is_complete)):
                pending = {task for task in tasks if not task.done()}
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                await _cancelled(task)
            self._closed()
        if taking.done() and not taking.cancelled() and (error := taking.exception()):
            raise error

    async def _take(self) -> None:
        """Take events until the last; return before it where too many wait."""
        num_bytes = 0
        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    num_bytes = len(event) + (num_bytes if self._unread else 0)
                    self._unread.append(event)
                    self._changed.set()
                    if num_bytes > self._max_unread_bytes:
                        self._slow()
                        return
            self._is_complete = True
        finally:
            self._changed.set()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        while not (self._is_complete and not self._unread):
            await self._changed.wait()
            self._changed.clear()
            if self._unread:
                chunk, self._unread = b"".join(self._unread), []
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
