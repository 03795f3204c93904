"""Application of a pooling model: its routes over one service."""

from fastapi import FastAPI

import jaxpaged
from jaxpaged.checks import check
from jaxpaged.pooling.llm import Pooling
from jaxpaged.serve import health, models
from jaxpaged.serve import pooling as pooling_routes
from jaxpaged.serve.app import guarded
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.pooling_service import PoolingService


def create_pooling_app(pooling: Pooling, model_name: str, options: ServerOptions) -> FastAPI:
    """Return the application that serves a pooling model; one event loop may run it.

    Raises `InputError` for options that a pooling model lacks.
    """
    rule = "False for a pooling model, whose weights stay as they are"
    check("enable_weight_updates", options.enable_weight_updates, rule, not options.enable_weight_updates)
    app = FastAPI(
        title="jaxpaged",
        version=jaxpaged.__version__,
        summary="Vectors, classes and scores of texts, by OpenAI's and vLLM's routes.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.service, app.state.load = PoolingService(pooling, model_name, options), 0
    for each in (models, health, pooling_routes):
        app.include_router(each.router)
    return guarded(app, options)
