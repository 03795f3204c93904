"""Service: what a part of the driver's turns may do in them, and at which moments."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxpaged.engine.adapters import Adapter
from jaxpaged.engine.arena import Grammar
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.request_queue import Queued


@dataclasses.dataclass
class InUse:
    """The adapters and the grammars of requests that have rows."""

    adapters: set[Adapter | None]
    grammars: set[Grammar | None]

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "InUse":
        """Return those of some requests."""
        made = cls(set(), set())
        for request in requests:
            made.add(request)
        return made

    def add(self, request: Request) -> None:
        """Add those of one request more."""
        self.adapters.add(request.adapter)
        self.grammars.add(request.grammar)


class Service:
    """Part of a driver's turns that an option brings. For the engine's thread only.

    The driver calls these methods at fixed moments, of all its services in their order. A service does
    something in those that it has of its own; here each does nothing. None of them waits for the device
    unless it says so.
    """

    # What a service asks of the turns.

    @property
    def has_work(self) -> bool:
        """Whether turns are needed, though nothing is queued and no row is taken."""
        return False

    @property
    def must_read_first(self) -> bool:
        """Whether the last run's report must be read before the next run is dispatched."""
        return False

    @property
    def waits_for_run(self) -> bool:
        """Whether somebody waits for the end of the next run, which should be short therefore."""
        return False

    @property
    def num_held_rows(self) -> int:
        """Number of free rows that are held for requests that the service has taken."""
        return 0

    # A request comes, and gets a row.

    def takes_new(self, request: Request, answer: Sequence[int]) -> bool:
        """Take a new request, of whose answer this is known, and queue it later; False: it is not taken."""
        return False

    def drop(self, request_ids: Collection[int]) -> list[Request]:
        """Forget the requests with these numbers, and return those that the service had taken."""
        return []

    def has_room(self, request: Request, in_use: InUse) -> bool:
        """Check whether `make_room` would find room on the device for what a request brings with it."""
        return True

    def make_room(self, request: Request, in_use: InUse) -> bool:
        """Load what a request brings with it to the device; False if what is in use leaves no room."""
        return True

    def takes_for_row(self, together: Sequence[Queued]) -> bool:
        """Take requests for which there are rows, hold as many rows, and queue them later; False: they get
        their rows now.
        """
        return False

    def row_values(self, queued: Queued) -> dict[str, Any]:
        """Return what features have of a request by the service, by name; it has room on the device."""
        return {}

    # A turn.

    def warm_up(self) -> None:
        """Make each call to the device once, without an effect, so that all is compiled."""

    def before_fill(self, *, is_idle: bool) -> None:
        """Do what must be done before rows are filled; if the engine is idle, it may wait for a little."""

    def before_run(self) -> None:
        """Do what must be done when rows are filled, before the next run is dispatched."""

    def after_report(self) -> None:
        """Do what follows a run's report, when it was read; or when nobody ran, and it is left unread."""

    def on_deltas(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Take note of deltas before they are delivered, and return them, perhaps with more in them."""
        return [*deltas]

    # Between two runs.

    def settle(self) -> None:
        """Give back what is under way, to the queue: all rows are to be empty. May wait for the device."""

    def finish(self) -> None:
        """Wait until all that was begun for former requests is done."""

    def forget(self) -> None:
        """Forget what the service keeps of prefixes, below the device."""

    def close(self) -> None:
        """Finish what was begun, and give back what the service holds outside of this process."""
