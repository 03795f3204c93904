"""The door of the server: ids, keys, content types, and how large, how slow and how deep a body may be."""

import asyncio
import hashlib
import re
import secrets
import time
import uuid
from collections.abc import Iterator

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.replies import ApiError, reply

# What anybody may ask without a key: how the server is, never what it computes.
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/load", "/metrics", "/openapi.json"})
OPEN_FOLDER = "/page/"
SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
SCANNED_HERE = 64 * 2**10  # bytes: a larger body is looked through in another thread


class Guard:
    """ASGI middleware. What comes through has a whole body, which need not be awaited."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options
        self._keys = [_digest(key) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            if scope["method"] != "OPTIONS":
                if not self._may(scope["path"], headers):
                    await reply({"error": "Unauthorized"}, 401)(scope, receive, send_with_id)
                    return
                if scope["method"] in ("POST", "PUT", "PATCH"):
                    receive = await self._with_body(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _may(self, path: str, headers: Headers) -> bool:
        """Whether the key is one of ours, in a time that does not tell how much of it is right."""
        if not self._keys or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        found = [secrets.compare_digest(_digest(key), known) for known in self._keys]
        return scheme.lower() == "bearer" and any(found)

    async def _with_body(self, headers: Headers, receive: Receive) -> Receive:
        """Receive all of the body; what then gives it, and later what comes behind it."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "content-type must be application/json", headers={"connection": "close"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._options.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                body = await self._body(receive)
        except TimeoutError:
            message = f"the body must be here within {self._options.body_timeout_s:g} s"
            raise ApiError(408, message, headers={"connection": "close"}) from None
        too_deep = nested_deeper
        deep = (
            await asyncio.to_thread(too_deep, body, self._options.max_nesting)
            if len(body) > SCANNED_HERE
            else too_deep(body, self._options.max_nesting)
        )
        if deep:
            raise ApiError(
                400, f"the body must not have more than {self._options.max_nesting} levels of nesting"
            )
        first: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replayed() -> Message:
            message = next(first, None)
            return await receive() if message is None else message

        return replayed

    async def _body(self, receive: Receive) -> bytes:
        pieces, num_bytes, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client has gone before its request was complete")
            pieces.append(message.get("body", b""))
            num_bytes += len(pieces[-1])
            if num_bytes > self._options.max_body_bytes:
                raise self._too_large()
            more = message.get("more_body", False)
        return b"".join(pieces)

    def _too_large(self) -> ApiError:
        message = f"the body must have at most {self._options.max_body_bytes} bytes"
        return ApiError(413, message, headers={"connection": "close"})


def nested_deeper(body: bytes, limit: int) -> bool:
    """Whether JSON has more than `limit` objects and lists in one another; also of what is not quite JSON."""
    depth = 0
    for match in BRACKETS.finditer(body):
        found = match[0]
        if found in b"[{":
            depth += 1
            if depth > limit:
                return True
        elif found in b"]}":
            depth -= 1
    return False


def _digest(key: str) -> bytes:
    """Of one length for all keys, so that comparing them tells nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Load:
    """ASGI middleware that counts who waits for a computed answer: what `/load` tells."""

    COUNTED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self.COUNTED:
            await self._app(scope, receive, send)
            return
        scope["state"]["began"] = time.time()
        state = scope["app"].state
        state.load += 1
        try:
            await self._app(scope, receive, send)
        finally:
            state.load -= 1
