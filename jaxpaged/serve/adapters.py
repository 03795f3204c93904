"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them; only where the server allows it."""

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from jaxpaged.serve.json_route import JsonRoute
from jaxpaged.serve.schemas import LoadAdapterRequest, UnloadAdapterRequest
from jaxpaged.serve.service import service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Load an adapter: from now on requests can name it as their model.

    With `load_inplace` it takes the place of what has its name. Requests under way keep what they have.
    """
    await service_of(request).load_adapter(body.lora_name, body.lora_path, anew=bool(body.load_inplace))
    return PlainTextResponse(f"the adapter {body.lora_name!r} is loaded")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    """Unload an adapter. New requests cannot name it; those under way are answered to the end."""
    await service_of(request).unload_adapter(body.lora_name)
    return PlainTextResponse(f"the adapter {body.lora_name!r} is unloaded")
