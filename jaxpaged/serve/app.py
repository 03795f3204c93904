"""The application: routes behind their guards, and every mistake reported in the form of its route."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import jaxpaged
from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.checks import InputError
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.serve import (
    adapters,
    chat,
    completions,
    health,
    messages,
    models,
    page,
    responses,
    rollouts,
    tokens,
)
from jaxpaged.serve.guard import Guard, Load
from jaxpaged.serve.message_errors import error_reply
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.replies import ApiError, GoneError
from jaxpaged.serve.service import Service, dead
from jaxpaged.serve.updates import Updates

SAMPLE_S = 0.25  # between two looks at the engine's steps


def create_app(llm: AsyncLLM, model_name: str, options: ServerOptions) -> FastAPI:
    """Return the application that serves a model; one event loop may run it."""
    app = FastAPI(
        title="jaxpaged",
        version=jaxpaged.__version__,
        summary="An OpenAI-compatible server over paged attention in JAX.",
        lifespan=_lifespan,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.service, app.state.load = Service(llm, model_name, options), 0
    for routes in (models, completions, chat, responses, messages, tokens, health, page):
        app.include_router(routes.router)
    if options.enable_lora_updates:
        app.include_router(adapters.router)
    if options.enable_weight_updates:
        app.state.updates, app.state.num_pausing = Updates(llm, options), 0
        app.include_router(rollouts.router)
    return guarded(app, options)


def guarded(app: FastAPI, options: ServerOptions) -> FastAPI:
    """Put an application behind its guards, and let it tell every mistake in the form of its route."""
    app.add_middleware(Load)
    app.add_middleware(Guard, options=options)
    if options.allowed_origins:  # else no other site's page reads an answer
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=list(options.allowed_methods),
            allow_headers=list(options.allowed_headers),
            allow_credentials=options.allow_credentials,
            expose_headers=["x-request-id"],
        )
    for kind, handle in (
        (ApiError, _api_error),
        (InputError, _input_error),
        (RequestValidationError, _invalid),
        (HTTPException, _http_error),
        (EngineDeadError, _engine_dead),
        (GoneError, _gone),
        (Exception, _unexpected),
    ):
        app.add_exception_handler(kind, handle)  # type: ignore[arg-type]  # each gets its own kind
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service

    async def sample() -> None:
        while True:
            try:
                service.metrics.sample()
                service.metrics.keep()
            except Exception:
                logging.getLogger("jaxpaged.serve").exception("the statistics of this moment are missing")
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sample())
    try:
        yield
    finally:
        sampling.cancel()
        if app.state.service.options.enable_weight_updates:
            app.state.updates.drop()


async def _api_error(request: Request, error: ApiError) -> Response:
    return _reply(request, error)


def _reply(request: Request, error: ApiError) -> Response:
    """Return the error in the form of its route."""
    return error_reply(error, request.url.path, getattr(request.state, "request_id", None))


async def _input_error(request: Request, error: InputError) -> Response:
    return _reply(request, ApiError(400, str(error), param=_param(str(error))))


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    """Tell the first of what is wrong, with the path to it."""
    first: dict[str, Any] = next(iter(error.errors()), {})
    ours = first.get("ctx", {}).get("error")
    if isinstance(ours, InputError):
        return await _input_error(request, ours)
    path = ".".join(str(step) for step in first.get("loc", ()) if step != "body")
    message = f"{path}: {first.get('msg', 'invalid')}" if path else str(first.get("msg", "invalid"))
    return _reply(request, ApiError(400, message, param=path or None))


async def _http_error(request: Request, error: HTTPException) -> Response:
    reported = ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    return _reply(request, reported)


async def _engine_dead(request: Request, error: EngineDeadError) -> Response:
    return _reply(request, dead(error))


async def _gone(request: Request, error: GoneError) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unexpected(request: Request, error: Exception) -> Response:
    """Answer status 500 for an unexpected error, which Starlette logs and raises again.

    uvicorn then closes the connection: so the client is told not to ask again on it.
    """
    message = f"{type(error).__name__}: the server's log says more"
    return _reply(request, ApiError(500, message, headers={"connection": "close"}))


def _param(message: str) -> str | None:
    """Return the name that an `InputError` is about, with which its messages begin; None if there is none."""
    name = message.partition("=")[0].partition(":")[0]
    return name if name.replace(".", "").replace("_", "").isalnum() and " " not in name else None
