"""`jaxpaged run-batch`: the requests of a file, answered by the server's own routes, without a socket.

A body means what it means to the server: it goes through the same guards, schemas and routes.
"""

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.serve.app import create_app
from jaxpaged.serve.batch_files import INVALID_LINE, BatchRequest, Line, LineError, Output, digest_of, parse
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.replies import ApiError

log = logging.getLogger("jaxpaged.serve")
# Routes that a batch may ask, of those that the server has.
URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/classify",
    "/pooling",
)
NO_TIME_LIMIT_S = 1e9
NO_QUEUE_LIMIT = 2**31 - 1


@dataclasses.dataclass
class Counts:
    """Counts of a batch's lines by their outcome."""

    answered: int = 0
    failed: int = 0  # answers with an error
    skipped: int = 0  # lines that the output had already


def batch_app(llm: AsyncLLM, model_name: str, options: ServerOptions) -> FastAPI:
    """Return the server's application for a batch: nobody else asks it, and no request has a time limit."""
    batch_options = dataclasses.replace(
        options,
        api_keys=(),
        max_queue=NO_QUEUE_LIMIT,
        request_timeout_s=NO_TIME_LIMIT_S,
        enable_lora_updates=False,
    )
    return create_app(llm, model_name, batch_options)


async def run(
    app: FastAPI,
    lines: Iterator[Line],
    output: Output,
    *,
    max_inflight: int,
    max_body_bytes: int,
    progress: Callable[[], Any] = lambda: None,
) -> Counts:
    """Answer the lines that the output lacks, so many at a time; `progress` is called after each line.

    Each answer is written when it is there. Raises `EngineDeadError` if the engine stops, and `InputError`
    if the output cannot be written: what was written stays, and another run goes on from there.
    """
    counts, seen, reading = Counts(), set[bytes](), asyncio.Lock()
    urls = {*app.openapi()["paths"]} & {*URLS}
    llm: AsyncLLM = app.state.service.llm

    async def work() -> None:
        while True:
            async with reading:
                line = await asyncio.to_thread(next, lines, None)
            if line is None:
                return
            answer = await one(line)
            await llm.check_health()  # an answer of an engine that has died does not count
            if answer is None:
                counts.skipped += 1
            else:
                output.write(answer)
                counts.answered += 1
                counts.failed += answer["error"] is not None
            progress()

    async def one(line: Line) -> dict[str, Any] | None:
        custom_id = None
        try:
            asked = parse(line, urls, max_body_bytes)
            custom_id = asked.custom_id
            if asked.id in seen:
                raise LineError(f"custom_id={custom_id!r} must be unique: an earlier line has it")
        except LineError as error:
            if line.id in output.answered:
                return None
            return _invalid(line, custom_id, f"line {line.number}: {error}")
        seen.add(asked.id)
        return None if asked.id in output.answered else await _answer(app, asked)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_inflight):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return counts


def _invalid(line: Line, custom_id: str | None, message: str) -> dict[str, Any]:
    return {
        "id": f"batch_req_{line.id.hex()}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": INVALID_LINE, "message": message},
    }


async def _answer(app: FastAPI, asked: BatchRequest) -> dict[str, Any]:
    """Return the line that answers a request."""
    name = digest_of(asked.custom_id).hex()
    status, body = await call(app, asked.url, json.dumps(asked.body).encode(), f"batch-{name}")
    error = None
    if status != 200:
        details = body.get("error") if isinstance(body, dict) else None
        details = details if isinstance(details, dict) else {}
        error = {"code": str(details.get("code", status)), "message": str(details.get("message", body))}
    return {
        "id": f"batch_req_{name}",
        "custom_id": asked.custom_id,
        "response": {"status_code": status, "request_id": f"batch-{name}", "body": body},
        "error": error,
    }


async def call(app: FastAPI, path: str, body: bytes, request_id: str) -> tuple[int, Any]:
    """Send a body to a route, and return the status and the JSON that it answers."""
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, chunks = 0, list[bytes]()

    async def receive() -> Message:
        message = next(sent, None)
        if message is None:  # nobody goes before the answer is there
            await asyncio.Event().wait()
        assert message is not None
        return message

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            chunks.append(message.get("body", b""))

    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": request_id,
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }
    try:
        await app(scope, receive, send)
        return status, json.loads(b"".join(chunks))
    except Exception as error:  # a fault of ours costs this line alone; the application has logged it
        log.exception("request %s failed", request_id)
        return 500, ApiError(500, f"{type(error).__name__}: the log says more").body
