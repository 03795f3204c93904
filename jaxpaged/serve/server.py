"""Running of the application: a socket, signals that end it in order, and a callback when it is ready."""

import asyncio
import functools
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.checks import InputError
from jaxpaged.pooling.llm import Pooling
from jaxpaged.serve.app import create_app
from jaxpaged.serve.connection import Connection, ConnectionLimits
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.pooling_app import create_pooling_app
from jaxpaged.serve.pooling_service import PoolingService
from jaxpaged.serve.replies import ApiError
from jaxpaged.serve.service import Service

log = logging.getLogger("jaxpaged.serve")
OTHER_FILES = 256  # open files of the process beside its connections


def bind(options: ServerOptions) -> socket.socket:
    """Return a socket bound to the address and not listening yet. Raises `InputError`.

    Clients that come before the model is loaded are refused.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as error:
        raise InputError(f"host={options.host!r}, port={options.port} cannot be had: {error}") from error
    return bound


def run(
    llm: AsyncLLM | Pooling,
    model_name: str,
    options: ServerOptions,
    bound: socket.socket,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is called with the address."""
    if isinstance(llm, Pooling):
        app = create_pooling_app(llm, model_name, options)
    else:
        app = create_app(llm, model_name, options)
    server = Server(app, options, lambda: ready(url(options, bound)))
    # uvicorn raises the signal that stopped it once more at the end: by then all is done.
    before = {sign: signal.signal(sign, lambda *_: None) for sign in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[bound])
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
        (app.state.service if isinstance(llm, Pooling) else llm).shutdown()


class Server(uvicorn.Server):
    """Server that reports when it is ready, and ends requests that outlast the time to drain."""

    def __init__(self, app: FastAPI, options: ServerOptions, ready: Callable[[], None]) -> None:
        self.room = ConnectionLimits(options, file_room(options))
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(Connection, room=self.room),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="on",
                timeout_graceful_shutdown=int(options.drain_seconds) + 5,  # should the engine not let go
                server_header=False,
            )
        )
        self.service: Service | PoolingService = app.state.service
        self._drain_seconds, self._ready = options.drain_seconds, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = ApiError(503, "the server stops: the answer was not complete in time")
        self.service.is_stopping.set()
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self.service.give_up, stopping)
        await super().shutdown(sockets)
        timer.cancel()


def file_room(options: ServerOptions) -> int:
    """Raise the process's limit of open files, and return the number of connections that it allows.

    Where files run out, the system resets whatever connection comes next.
    """
    if sys.platform == "win32":
        return options.max_connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = options.max_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < want:
        new_soft = want if hard == resource.RLIM_INFINITY else min(want, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_soft, hard))
        soft = new_soft
    if soft == resource.RLIM_INFINITY or soft >= want:
        return options.max_connections
    log.warning("max_connections=%d: there are files for %d", options.max_connections, soft - OTHER_FILES)
    return max(8, soft - OTHER_FILES)


def url(options: ServerOptions, bound: socket.socket) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"http://{host}:{bound.getsockname()[1]}"


class JsonLines(logging.Formatter):
    """A log record as an object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= {"event": record.getMessage(), **fields} if fields else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: str) -> None:
    """Send the server's and uvicorn's logs to standard error, as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("jaxpaged.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    if level == "info":  # uvicorn's own information repeats ours
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
