"""Routes that report the server's health and load, open without a key."""

from fastapi import APIRouter, Request
from starlette.responses import Response

import jaxpaged
from jaxpaged.serve.replies import reply
from jaxpaged.serve.service import service_of

router = APIRouter()


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """Answer 200 while the engine runs and 503 after it has stopped, without a body."""
    return Response(status_code=200 if service_of(request).llm.is_running else 503)


@router.get("/version")
async def version() -> Response:
    return reply({"version": jaxpaged.__version__})


@router.get("/load")
async def load(request: Request) -> Response:
    """Answer with the number of requests that are being answered."""
    return reply({"server_load": request.app.state.load})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Answer with the metrics in Prometheus' text format, under vLLM's names."""
    text = service_of(request).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
