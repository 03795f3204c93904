"""Connections: uvicorn's, with bounds on what comes before the application has a request to refuse.

The parser below has none: a header that never ends is collected for ever, and so is what follows a body.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.replies import ApiError, dumps

MOST_HEADERS = 256
MOST_PIPELINED = 16  # requests that wait for the answer to the one before, on one connection
FRAME_BYTES = 16  # bytes that may frame each chunk of a body, beside the bytes of a head


class ConnectionLimits:
    """All connections of a server: how many there may be, and which have sent no complete head so far."""

    def __init__(self, options: ServerOptions, max_connections: int | None = None) -> None:
        self.max_head_bytes, self.head_timeout_s = options.max_head_bytes, options.head_timeout_s
        self.max_connections = max_connections or options.max_connections
        self._waiting: dict[Connection, None] = {}  # the oldest first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self, connection: "Connection") -> bool:
        """Take in a new connection, and drop the oldest of too many that wait; False if there is no room."""
        is_full = len(connection.connections) > self.max_connections
        if is_full and not self._waiting:
            return False
        self._waiting[connection] = None
        if is_full or len(self._waiting) > self.max_connections // 8:
            next(iter(self._waiting)).drop()
        return True

    def leave(self, connection: "Connection") -> None:
        """Count a connection no more among those that wait; may be called again."""
        self._waiting.pop(connection, None)


class Connection(HttpToolsProtocol):
    """One connection. Refusals are in OpenAI's form, before the application knows of it."""

    def __init__(self, *args: Any, room: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = room
        self._error: ApiError | None = None
        self._timer: asyncio.TimerHandle | None = None  # until the head that has begun must be complete
        self._num_head_bytes = 0  # parsed bytes of the current request's head
        self._num_unparsed_bytes = 0  # of the current request, without its body and its frames

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._room.enter(self):
            self._wait()
        else:
            self._refuse(ApiError(503, "there are too many connections", headers={"retry-after": "1"}))

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._num_unparsed_bytes += len(data)
        super().data_received(data)
        if self._num_unparsed_bytes > self._room.max_head_bytes:
            self._refuse(self._too_large())
        elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._wait()  # for the next one on this connection

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_PIPELINED:
            self._fail(ApiError(429, f"over {MOST_PIPELINED} requests wait on one connection"))
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        if len(self.headers) >= MOST_HEADERS:
            self._fail(ApiError(431, f"there must be at most {MOST_HEADERS} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._wait_no_more()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unparsed_bytes = max(self._num_unparsed_bytes - len(body) - FRAME_BYTES, 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser, or a bound of ours, stopped at."""
        self._refuse(self._error or ApiError(400, msg))

    def drop(self) -> None:
        """Close without a word: it has sent no request, and others need the room."""
        self._wait_no_more()
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._room.max_head_bytes:
            self._fail(self._too_large())

    def _too_large(self) -> ApiError:
        max_head_bytes = self._room.max_head_bytes
        return ApiError(431, f"a request's line and headers must have at most {max_head_bytes} bytes")

    def _fail(self, error: ApiError) -> None:
        """Stop the parser, which calls `send_400_response` then."""
        self._error = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Send an error response and close; close without a response if an answer is under way, which is cut
        off.
        """
        self._wait_no_more()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = dumps(error.body)
            headers = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            } | (error.headers or {})
            lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
            self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        self.transport.close()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self._room.head_timeout_s, self._late)

    def _wait_no_more(self) -> None:
        self._room.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        limit_s = self._room.head_timeout_s
        if self._num_unparsed_bytes:
            self._refuse(ApiError(408, f"a request's headers must be here within {limit_s:g} s"))
        else:
            self.drop()
