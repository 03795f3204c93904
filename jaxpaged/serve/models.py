"""/v1/models."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.serve.replies import reply
from jaxpaged.serve.service import Service, service_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    service = service_of(request)
    names = [*service.model_names, *service.adapters]
    return reply({"object": "list", "data": [_model(service, name) for name in names]})


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> Response:
    service = service_of(request)
    return reply(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxpaged",
        "root": adapter.lora_path if adapter else service.root,
        "parent": service.model_names[0] if adapter else None,
        "max_model_len": service.max_model_len,
        "permission": [],
    }
