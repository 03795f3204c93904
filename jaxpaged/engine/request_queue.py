"""The queue of requests without a row, by priority, then in the order in which they came."""

import dataclasses
import heapq
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from jaxpaged.engine.request import Request


@dataclasses.dataclass(frozen=True)
class Queued:
    """A request without a row: new, or recalled from one."""

    request: Request
    answer: list[int]  # tokens of it that are known

    @property
    def token_ids(self) -> np.ndarray:
        """Tokens of the prompt, then of the answer: int32."""
        return np.concatenate([self.request.prompt_token_ids, np.array(self.answer, np.int32)])

    def __lt__(self, other: "Queued") -> bool:
        return self.request.order < other.request.order


class RequestQueue:
    """The requests that wait for a row. For one thread only."""

    def __init__(self) -> None:
        self._heap: list[Queued] = []
        self._waits_for_room = False  # the first request, while others' adapters or grammars take it

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Queued]:
        """Iterate in the order of service."""
        return iter(sorted(self._heap))

    def add(self, request: Request, answer: Sequence[int] = ()) -> None:
        """Queue a request, with what is known of its answer."""
        heapq.heappush(self._heap, Queued(request, list(answer)))

    def remove(self, request_ids: Collection[int]) -> list[Request]:
        """Remove the requests with these numbers, and return those that were there."""
        gone = [queued.request for queued in self._heap if queued.request.request_id in request_ids]
        if gone:
            self._keep([queued for queued in self._heap if queued.request.request_id not in request_ids])
        return gone

    @property
    def first(self) -> Request:
        """Request that is served next. The queue must not be empty."""
        return self._heap[0].request

    @property
    def wants_a_row(self) -> bool:
        """Whether the first request would take a row as soon as one is free."""
        return bool(self._heap) and not self._waits_for_room and self.first.group_size == 1

    def with_room(self, has_room: Callable[[Request], bool]) -> Iterator[Queued]:
        """Iterate over the requests that would get a row, in order, if there were enough rows.

        `has_room`: whether a request's adapter and grammar have room on the device, or would get it. One that
        has none lets only requests without either overtake it.
        """
        waits = False
        for queued in self:
            request = queued.request
            waits |= request.needs_room and not has_room(request)
            if not (request.needs_room and waits):
                yield queued

    def take(
        self, max_requests: Callable[[], int], has_room: Callable[[Request], bool]
    ) -> Iterator[list[Queued]]:
        """Remove the next requests and yield them: each with those that must come into rows with it.

        It ends when the next ones are more than `max_requests()`. A request whose adapter or grammar gets no
        room is overtaken by requests without either, and by no others.
        """
        waiting: list[Queued] = []
        while self._heap and self.first.group_size <= max_requests():
            if self.first.needs_room and not has_room(self.first):
                waiting = [queued for queued in self._heap if queued.request.needs_room]
                self._keep([queued for queued in self._heap if not queued.request.needs_room])
                continue
            yield [heapq.heappop(self._heap) for _ in range(self.first.group_size)]
        self._waits_for_room = bool(waiting)
        if waiting:
            self._keep(self._heap + waiting)

    def _keep(self, queued: list[Queued]) -> None:
        self._heap = queued
        heapq.heapify(queued)
