"""The door of the server: hosts, keys, content types, and how large, how slow and how full a body may be."""

import asyncio
import hashlib
import re
import secrets
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxpaged.checks import shown
from jaxpaged.serve.bounds import Limits, parsed
from jaxpaged.serve.hosts import Hosts
from jaxpaged.serve.message_errors import ROOT, error_reply, is_messages
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.replies import ApiError, reply

# What anybody may ask without a key: how the server is, never what it computes, nor for whom.
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/load", "/metrics", "/openapi.json"})
# What training loops post without a body; pages of other sites cannot, for they have no key.
BARE_PATHS = frozenset(
    {
        *("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/release_kv_cache_memory"),
        *("/start_weight_update", "/finish_weight_update"),
    }
)
WEIGHTS_PATH, WEIGHTS_TYPE = "/update_weights", "application/octet-stream"
SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
SMALL = 64 * 2**10  # bytes: a larger body is parsed in another thread, and counts among the large ones
MOST_LARGE_BODIES = 16  # bodies of the greatest size, or more smaller ones, handled at a time
NUM_PARSERS = 2  # threads


class Guard:
    """ASGI middleware. What comes through may be answered, and has a whole body, which is parsed.

    In the request's state: `request_id`; `key`, the place of the key that was given among the server's, None
    where there are none; `json`, the body's value, where there is a body.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options, self._hosts = app, options, Hosts(options)
        self._keys = [_digest(key) for key in options.api_keys]
        self._limits = Limits.of(options.max_body_bytes, options.max_nesting)
        self._parsers = ThreadPoolExecutor(NUM_PARSERS, "jaxpaged-bodies")
        self._num_large_bytes = 0  # bytes of large bodies that are not parsed yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if is_messages(scope["path"]):  # where Anthropic's client looks for it
                    MutableHeaders(scope=message)["request-id"] = request_id
            await send(message)

        try:
            self._check_host(headers)
            if scope["method"] != "OPTIONS":
                state["key"] = self._key(headers)
                if state["key"] is None and self._keys and scope["path"] not in OPEN_PATHS:
                    refusal = reply({"error": "Unauthorized"}, 401)
                    if is_messages(scope["path"]):
                        refusal = error_reply(ApiError(401, "invalid x-api-key"), ROOT, request_id)
                    await refusal(scope, receive, send_with_id)
                    return
                if scope["method"] in ("POST", "PUT", "PATCH") and not self._is_left(scope["path"], headers):
                    receive = await self._with_body(headers, receive, state)
        except ApiError as error:
            await error_reply(error, scope["path"], request_id)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _check_host(self, headers: Headers) -> None:
        """Check that the server is asked by a name of its own. What has no name comes from no browser."""
        names = headers.getlist("host")
        if len(names) > 1 or not all(map(self._hosts.serve, names)):
            host = shown(", ".join(names))
            raise ApiError(403, f"host={host} must be a name of this server: see --allowed-hosts")

    def _key(self, headers: Headers) -> int | None:
        """Return which key was given, in a time that does not tell how much of it is right; None for none."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digests = [_digest(key if scheme.lower() == "bearer" else ""), _digest(headers.get("x-api-key", ""))]
        matches = [[secrets.compare_digest(digest, known) for known in self._keys] for digest in digests]
        return next((match.index(True) for match in matches if any(match)), None)

    def _is_left(self, path: str, headers: Headers) -> bool:
        """Return whether the body is left to the route: there is none, or it is one of weights."""
        if not self._options.enable_weight_updates:
            return False
        if path == WEIGHTS_PATH:
            return _kind(headers) == WEIGHTS_TYPE
        is_bare = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        return path in BARE_PATHS and is_bare

    async def _with_body(self, headers: Headers, receive: Receive, state: dict[str, Any]) -> Receive:
        """Receive and parse the whole body; return a `receive` that gives it, and then the later messages."""
        if _kind(headers) != "application/json":
            raise ApiError(415, "content-type must be application/json", headers={"connection": "close"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._options.max_body_bytes:
            raise self._too_large()
        taken = [0]  # bytes that count among those of large bodies
        try:
            try:
                async with asyncio.timeout(self._options.body_timeout_s):
                    body = await self._body(receive, taken)
            except TimeoutError:
                message = f"the body must be here within {self._options.body_timeout_s:g} s"
                raise ApiError(408, message, headers={"connection": "close"}) from None
            if len(body) > SMALL:
                loop = asyncio.get_running_loop()
                state["json"] = await loop.run_in_executor(self._parsers, parsed, body, self._limits)
            elif body:
                state["json"] = parsed(body, self._limits)
        finally:
            self._num_large_bytes -= taken[0]
        first: Iterator[Message] = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def replayed() -> Message:
            message = next(first, None)
            return await receive() if message is None else message

        return replayed

    async def _body(self, receive: Receive, taken: list[int]) -> bytearray:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client has gone before its request was complete")
            body += message.get("body", b"")
            if len(body) > self._options.max_body_bytes:
                raise self._too_large()
            if len(body) > SMALL:
                self._take(len(body) - taken[0], taken)
            more = message.get("more_body", False)
        return body

    def _take(self, num_bytes: int, taken: list[int]) -> None:
        """Count bytes of a large body. Raises `ApiError` where there are too many of all together."""
        if self._num_large_bytes + num_bytes > MOST_LARGE_BODIES * self._options.max_body_bytes:
            headers = {"connection": "close", "retry-after": "1"}
            raise ApiError(503, "too many large bodies are received at once", headers=headers)
        self._num_large_bytes += num_bytes
        taken[0] += num_bytes

    def _too_large(self) -> ApiError:
        message = f"the body must have at most {self._options.max_body_bytes} bytes"
        return ApiError(413, message, headers={"connection": "close"})


def _kind(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _digest(key: str) -> bytes:
    """Return a digest: of one length for all keys, so that comparing them tells nothing."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Load:
    """ASGI middleware that counts requests with a computed answer, for `/load`."""

    COUNTED = (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        ROOT,
        f"{ROOT}/count_tokens",
        "/tokenize",
        "/detokenize",
    )

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
