"""Routes whose bodies the guard has parsed and checked: they are not parsed a second time."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class JsonRequest(Request):
    """A request that gives the value that `Guard` has made of its body."""

    async def json(self) -> Any:
        return self.state.json


class JsonRoute(APIRoute):
    """The class of every route that takes a body: `APIRouter(route_class=JsonRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def with_value(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return with_value
