"""Helpers by which a script of vLLM's serves its own FastAPI app. `jaxpaged.compat` says at which paths."""

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from jaxpaged.checks import check

# Seconds that a connection without requests stays open.
VLLM_HTTP_TIMEOUT_KEEP_ALIVE = int(os.environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5"))


async def serve_http(
    app: Any, sock: Any = None, enable_ssl_refresh: bool = False, **uvicorn_kwargs: Any
) -> "asyncio.Future[None]":
    """Serve an app by uvicorn until a signal ends it; return a completed future.

    `sock`: a bound socket in place of `host` and `port`. Raises `InputError` for `enable_ssl_refresh`.
    """
    import uvicorn

    rule = "False: certificates are read once; use a proxy before the server"
    check("enable_ssl_refresh", enable_ssl_refresh, rule, not enable_ssl_refresh)
    server = uvicorn.Server(uvicorn.Config(app, **uvicorn_kwargs))
    await server.serve(sockets=None if sock is None else [sock])
    ended = asyncio.get_running_loop().create_future()
    ended.set_result(None)
    return ended


def with_cancellation[**P, Answer](
    handler: Callable[P, Awaitable[Answer]],
) -> Callable[P, Coroutine[Any, Any, Answer | None]]:
    """Return a handler that is cancelled, and returns None, when its client disconnects.

    The request is the argument `raw_request`, or the second one.
    """

    @functools.wraps(handler)
    async def run(*args: P.args, **kwargs: P.kwargs) -> Answer | None:
        request: Any = kwargs["raw_request"] if "raw_request" in kwargs else args[1]
        answer = asyncio.ensure_future(handler(*args, **kwargs))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            answer.cancel()
            gone.cancel()

    return run


async def _disconnected(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
