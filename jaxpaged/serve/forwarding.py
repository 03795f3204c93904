"""A request that one process receives and another answers: what travels, and by what it is routed."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from jaxpaged.routing import Key, keys_of_text, keys_of_tokens

TRAVELS = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
)
TOKEN_BLOCK = 16  # tokens in a routing key of prompts given as token ids


def portable(scope: Scope, request_id: str) -> dict[str, Any]:
    """Return the parts of a request's scope that another process needs, as data that can be sent."""
    headers = [(bytes(k), bytes(v)) for k, v in scope["headers"] if k != b"x-request-id"]
    return {name: scope[name] for name in TRAVELS if name in scope} | {
        "headers": [*headers, (b"x-request-id", request_id.encode())],
        "client": scope.get("client"),
        "server": scope.get("server"),
    }


async def answered(app: ASGIApp, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
    """Yield the application's messages, several at a time if they came together.

    Closing the generator has the effect of a client that closes its connection.
    """
    sent: asyncio.Queue[Message] = asyncio.Queue()
    received = iter([{"type": "http.request", "body": body, "more_body": False}])
    gone = asyncio.Event()

    async def receive() -> Message:
        message = next(received, None)
        if message is None:
            await gone.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    task = asyncio.ensure_future(app(scope, receive, send))
    waiting = asyncio.ensure_future(sent.get())
    try:
        while not task.done() or waiting.done() or not sent.empty():
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                messages = [waiting.result()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                waiting = asyncio.ensure_future(sent.get())
                yield messages
        task.result()
    finally:
        gone.set()
        for each in (task, waiting):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


def keys(body: bytes) -> list[Key]:
    """Return the routing keys of the prompt in a body, of the first one if there are several; none without a
    prompt.

    The keys of a conversation are those of its text as JSON, tools first, as templates write it.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(asked, dict):
        return []
    salt = json.dumps([asked.get("model"), asked.get("cache_salt")])
    prompt = asked.get("prompt", asked.get("messages", asked.get("input")))
    if "prompt" in asked and isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    try:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return keys_of_tokens(prompt, TOKEN_BLOCK, salt)
    except (ValueError, TypeError, OverflowError):
        return []
    if isinstance(prompt, list):
        parts = [asked.get("tools"), asked.get("instructions"), *prompt]
        prompt = "".join(json.dumps(part, ensure_ascii=False) for part in parts)
    return keys_of_text(prompt, salt) if isinstance(prompt, str) else []
