"""Turns of constraints that are compiled: which one has the processor now. Decisions only, for one thread.

Clients share the processor evenly, by the seconds that their constraints had. Of one client's constraints the
one with the least seconds goes first, so a small one passes a large one. A constraint that has had the
seconds of a level goes to the next level. One constraint of each level has a process at a time, so memory is
bounded. One that comes to a level whose place is taken gives up its process, and begins again there later.
"""

import dataclasses
from collections.abc import Hashable, Iterable

# Seconds that a constraint has on each level. Each is 5 times the one before: what a constraint loses by
# beginning again is less than the time that it takes.
LEVELS = (0.02, 0.1, 0.5, float("inf"))


@dataclasses.dataclass(eq=False)
class Turn:
    """A constraint's place in the turns.

    clients: who wait for it.
    """

    clients: set[Hashable]
    level: int = 0
    seconds: float = 0.0  # that its process has had
    has_process: bool = False


class Turns:
    """The constraints that are not compiled yet."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []  # the first to come first
        self._used: dict[Hashable, float] = {}  # seconds of each client who waits

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: Turn, client: Hashable) -> None:
        """Let a client wait for a constraint. One who did not wait has had as much as whoever had least."""
        self._used.setdefault(client, min(self._used.values(), default=0.0))
        turn.clients.add(client)
        if turn not in self._turns:
            self._turns.append(turn)

    def leave(self, turn: Turn, clients: Iterable[Hashable] | None = None) -> None:
        """Let clients wait for a constraint no more: all, if it is done."""
        turn.clients -= {*turn.clients} if clients is None else {*clients}
        if not turn.clients:
            self._turns.remove(turn)
        waiting = {client for each in self._turns for client in each.clients}
        self._used = {client: used for client, used in self._used.items() if client in waiting}

    def spend(self, turn: Turn, seconds: float) -> bool:
        """Note that a process had so many seconds more. Return whether it is to give up its process."""
        turn.seconds += seconds
        self._used[min(turn.clients, key=self._used.__getitem__)] += seconds  # whose turn it was
        if turn.seconds < LEVELS[turn.level]:
            return False
        turn.level += 1
        if self._holder(turn.level, but=turn) is None:
            return False
        turn.seconds, turn.has_process = 0.0, False
        return True

    def next(self) -> Turn | None:
        """Return the constraint that has the processor next; None if there is none."""
        may = []
        for level in range(len(LEVELS)):
            holder = self._holder(level)
            may += [each for each in self._turns if each.level == level] if holder is None else [holder]
        return min(may, key=lambda turn: (self._least(turn), turn.level, turn.seconds), default=None)

    def _least(self, turn: Turn) -> float:
        return min(self._used[client] for client in turn.clients)

    def _holder(self, level: int, but: Turn | None = None) -> Turn | None:
        holders = (
            each for each in self._turns if each.has_process and each.level == level and each is not but
        )
        return next(holders, None)
