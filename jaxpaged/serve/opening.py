"""Requests that are not taken in yet: they wait for their texts to be read and constraints to be compiled."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Hashable
from typing import Any

from starlette.requests import Request

from jaxpaged.serve.replies import ApiError, unless_gone

# Constraints of one client that wait to be compiled: an eighth of the queue, but so many in any case.
LEAST_CONSTRAINTS = 64


@dataclasses.dataclass
class Opening:
    """A request that is not taken in yet.

    compiles: whether it waits for its constraint.
    error: by which it was given up.
    """

    client: Hashable
    compiles: bool
    error: ApiError | None = None


class Openings:
    """All of them. For one event loop.

    max_queue: answers that may wait.
    """

    def __init__(self, max_queue: int) -> None:
        self._most_constraints = max(LEAST_CONSTRAINTS, max_queue // 8)
        self._all: dict[asyncio.Future[Any], Opening] = {}

    def check(self, client: Hashable) -> None:
        """Raise `ApiError` for a client of whom too many constraints wait to be compiled."""
        num_waiting = sum(each.compiles and each.client == client for each in self._all.values())
        if num_waiting >= (max_waiting := self._most_constraints):
            message = (
                f"{num_waiting} constraints of yours wait to be compiled, must be less than {max_waiting}"
            )
            raise ApiError(429, message, headers={"retry-after": "1"})

    async def wait(
        self, request: Request, opening: Opening, admission: Awaitable[None], limit_s: float
    ) -> None:
        """Wait until a request is taken in. Raises what that raises.

        It is given up when its client goes, and by `ApiError` when its time is over or the server stops.
        """
        working = asyncio.ensure_future(admission)
        late = ApiError(504, f"the answer was not complete within {limit_s:g} s")
        timer = asyncio.get_running_loop().call_later(limit_s, self._end, working, late)
        self._all[working] = opening
        try:
            await unless_gone(request, working)
        except asyncio.CancelledError:
            if opening.error is None:
                raise
            raise opening.error from None
        finally:
            timer.cancel()
            del self._all[working]

    def give_up(self, error: ApiError) -> None:
        """End all with this error."""
        for working in [*self._all]:
            self._end(working, error)

    def _end(self, working: "asyncio.Future[Any]", error: ApiError) -> None:
        opening = self._all[working]
        opening.error = opening.error or error
        working.cancel()
