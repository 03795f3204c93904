"""Routes whose bodies the guard has parsed and checked: they are not parsed a second time."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class JsonRequest(Request):
    """Request that returns the value `Guard` has parsed from its body, and drops the bytes."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = b"{}" if await super().body() else b""
        return self._body

    async def json(self) -> Any:
        return self.state.json


class JsonRoute(APIRoute):
    """The class of routes that take a body: `APIRouter(route_class=JsonRoute)`.

    Of other classes the event loop parses the body once more.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def with_value(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return with_value
