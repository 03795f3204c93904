"""Routes for training loops: pauses, sleep and new weights, as vLLM has them; only where allowed."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from jaxpaged.checks import InputError, check, shown
from jaxpaged.serve.replies import ApiError, reply
from jaxpaged.serve.schemas import Body
from jaxpaged.serve.service import service_of
from jaxpaged.serve.updates import Updates

router = APIRouter()
MOST_WAITING = 4  # pauses that wait for the end of what is in flight, each in a thread
BINARY = "application/octet-stream"
Mode = Literal["abort", "wait", "keep"]
Version = Annotated[str, Field(max_length=20)] | int | None


class UpdateInfo(Body):
    """Place of the weights."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


class UpdateRequest(Body):
    update_info: UpdateInfo
    weight_version: Version = None


class FinishRequest(Body):
    weight_version: Version = None


class InitRequest(Body):
    init_info: dict[str, Any]


@router.post("/pause")
async def pause(
    request: Request,
    mode: Mode = "abort",
    clear_cache: bool = True,
    wait_for_inflight_requests: bool = False,
) -> Response:
    """Pause generation: see `LLM.pause_generation`."""
    state = request.app.state
    if state.num_pausing >= MOST_WAITING:
        raise ApiError(409, f"{MOST_WAITING} pauses wait already for what is in flight")
    state.num_pausing += 1
    try:
        mode = "wait" if wait_for_inflight_requests else mode
        await service_of(request).llm.pause_generation(mode=mode, clear_cache=clear_cache)
    finally:
        state.num_pausing -= 1
    return _told(request, status="paused")


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Let paused requests run again. Status 400 while memory is away."""
    await service_of(request).llm.resume_generation()
    return _told(request, status="resumed")


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    return reply({"is_paused": await service_of(request).llm.is_paused()})


@router.post("/sleep")
async def sleep(
    request: Request, level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Mode = "abort"
) -> Response:
    """Pause, and give memory back: see `LLM.sleep`."""
    await service_of(request).llm.sleep(level, mode)
    return _told(request, status="sleeping")


@router.post("/wake_up")
async def wake_up(
    request: Request, tags: Annotated[list[str] | None, Query(max_length=8)] = None
) -> Response:
    """Take memory again, and go on when all is there: see `LLM.wake_up`."""
    await service_of(request).llm.wake_up(tags or None)
    return _told(request, status="awake")


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    return reply({"is_sleeping": await service_of(request).llm.is_sleeping()})


@router.post("/release_kv_cache_memory")
async def release_kv_cache_memory(request: Request) -> Response:
    """Give back the memory of K and V alone, while generation is paused."""
    await service_of(request).llm.release_kv_cache_memory()
    return _told(request, status="released")


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, reset_running_requests: bool = False) -> Response:
    """Forget cached prefixes; with `reset_running_requests` those that run are computed anew.

    Without it status 409, and nothing happens, while any request is unfinished.
    """
    if not await service_of(request).llm.reset_prefix_cache(reset_running_requests):
        raise ApiError(409, "requests are under way, and use the cached prefixes")
    service_of(request).pins.clear()
    return _told(request, status="reset")


@router.get("/weight_info")
async def weight_info(request: Request) -> Response:
    """Tell the version of the weights that sample now."""
    return _told(request)


@router.get("/get_world_size")
async def get_world_size(request: Request, include_dp: bool = True) -> Response:
    """Tell on how many devices the model runs."""
    config = service_of(request).llm.engine.config
    replicas = config.data_parallel_size if include_dp else 1
    return reply({"world_size": config.tensor_parallel_size * replicas})


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(request: Request) -> Response:
    """Check that weights are to come by a path or a body: there is nothing to begin for these."""
    said = _read(InitRequest, request.state.json if hasattr(request.state, "json") else None)
    rule = "an empty object: weights come from a path or as a body, not from other processes"
    check("init_info", said.init_info, rule, not said.init_info)
    return _told(request, message="Weight transfer initialized")


@router.post("/start_weight_update")
async def start_weight_update(request: Request) -> Response:
    """Collect the parts that come from now on; `/finish_weight_update` takes all or none."""
    _updates(request).begin()
    return _told(request, message="Weight update started")


@router.post("/update_weights")
async def update_weights(request: Request, weight_version: str | None = None) -> Response:
    """Take weights: of a directory that the server can read, or of this body, a safetensors file."""
    updates = _updates(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == BINARY:
        length = request.headers.get("content-length", "")
        try:
            made = await updates.add_body(
                request.stream(), int(length) if length.isdecimal() else None, _number(weight_version)
            )
        except ClientDisconnect:
            raise ApiError(400, "the client has gone before its request was complete") from None
    else:
        said = _read(UpdateRequest, getattr(request.state, "json", None))
        version = _number(said.weight_version if weight_version is None else weight_version)
        if said.update_info.path is None:
            raise InputError(f"update_info={shown(said.update_info.model_extra)} must have a path")
        made = await updates.add_folder(said.update_info.path, version)
    return _told(request, message="Weights updated" if made is not None else "Weights received")


@router.post("/finish_weight_update")
async def finish_weight_update(request: Request) -> Response:
    """Take all parts since `/start_weight_update` as one update."""
    said = _read(FinishRequest, getattr(request.state, "json", {}))
    await _updates(request).finish(_number(said.weight_version))
    return _told(request, message="Weight update finished")


def _told(request: Request, **said: Any) -> Response:
    """Return a reply with the version of the weights beside what is said."""
    return reply(said | {"weight_version": str(service_of(request).llm.weight_version)})


def _updates(request: Request) -> Updates:
    updates: Updates = request.app.state.updates
    return updates


def _read[T: Body](kind: type[T], value: Any) -> T:
    """Check a body. Raises `RequestValidationError`, which is told as of other routes."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _number(said: str | int | None) -> int | None:
    """Return a version, which vLLM writes as a text. Raises `InputError` for other texts."""
    if isinstance(said, str):
        is_number = said.isascii() and said.isdecimal() and len(said) < 19
        check("weight_version", said, "a whole number", is_number)
        return int(said)
    return said
