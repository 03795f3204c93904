"""Vector clocks of all that acts in a launch, and the races that they show.

An agent is a warp, or one of the kinds of work that a warp starts and does not wait for at once. A stamp says
when an agent did something. An agent knows of it when what it knows of the other reaches that stamp.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpaged.research.ptx.registers import Array

WARP, COPIES_IN, COPIES_OUT, STORES_OUT, PRODUCTS = range(5)
NUM_KINDS = 5


class Clocks:
    """Vector clocks: for each agent the time up to which it knows the actions of each other agent."""

    def __init__(self, num_agents: int) -> None:
        self.known = np.eye(num_agents, dtype=np.int32)

    def learn(self, agent: int, other: Array) -> None:
        """Merge a snapshot of another agent's clock into an agent's clock."""
        row = self.known[agent]
        np.maximum(row, other, out=row)

    def follow(self, agent: int, starter: int) -> None:
        """Order an agent's next action after everything that its starter knows."""
        self.learn(agent, self.known[starter])

    def release(self, agent: int) -> Array:
        """Return the agent's vector clock, and advance the agent's own time."""
        snapshot: Array = self.known[agent].copy()
        self.known[agent, agent] += 1
        return snapshot

    def meet(self, agents: list[int]) -> None:
        """Merge the clocks of agents that met at a barrier."""
        self.known[agents] = self.known[agents].max(0)
        self.known[agents, agents] += 1


class Shadow:
    """Record of the last writer and readers of each memory cell, with their times; unordered accesses are
    reported.

    A cell is so many bytes that every access takes whole cells. `first` is the number of the first agent that
    can reach this memory.
    """

    def __init__(
        self, num_bytes: int, cell: int, clocks: Clocks, agents: range, report: Callable[[str], None]
    ) -> None:
        num_cells = -(-num_bytes // cell)
        self.cell, self._clocks, self._agents, self._report = cell, clocks, agents, report
        self.writer = np.full(num_cells, -1, np.int32)
        self.stamp = np.zeros(num_cells, np.int32)
        self.reads = np.zeros((len(agents), num_cells), np.int32)
        self.lane, self.turn = np.full(num_cells, -1, np.int8), np.full(num_cells, -1, np.int32)
        self.reader = np.full(num_cells, -1, np.int32)
        self.reader_lane, self.reader_turn = self.lane.copy(), self.turn.copy()
        self.is_unfenced = np.zeros(num_cells, bool)  # written by the generic proxy, no fence since
        self.strong: dict[int, dict[int, int]] = {}  # by cell: stamps of atomic accesses

    def cells(self, addresses: Array, width: int) -> Array:
        """Return the cells of accesses of so many bytes, [accesses, cells]."""
        return (addresses // self.cell)[:, None] + np.arange(-(-width // self.cell))

    def _check_writer(self, agent: int, cells: Array, what: str) -> Array:
        who = self.writer[cells]
        late = (who >= 0) & (who != agent) & (self.stamp[cells] > self._clocks.known[agent, who])
        if late.any():
            self._report(what)
        return who

    def _check_strong(self, agent: int, cells: Array, what: str) -> None:
        if self.strong:
            for cell in self.strong.keys() & set(cells.reshape(-1).tolist()):
                for other, stamp in self.strong[cell].items():
                    if other != agent and stamp > self._clocks.known[agent, other]:
                        self._report(what)

    def read(self, agent: int, cells: Array, lanes: Array | None = None, turn: int = 0) -> None:
        """Note that an agent reads cells, [accesses, cells]; `lanes` are those of the accesses."""
        who = self._check_writer(agent, cells, "a read of what was written, not ordered after it")
        self._check_strong(agent, cells, "a read of what an atomic wrote, not ordered after it")
        if lanes is not None:
            lane = lanes[:, None]
            if ((who == agent) & (self.turn[cells] == turn) & (self.lane[cells] != lane)).any():
                self._report("a read of what another lane of the warp wrote, without a barrier")
            self.reader[cells], self.reader_turn[cells] = agent, turn
            self.reader_lane[cells] = lane
        self.reads[agent - self._agents.start, cells] = self._clocks.known[agent, agent]

    def write(
        self,
        agent: int,
        cells: Array,
        lanes: Array | None = None,
        turn: int = 0,
        *,
        is_generic: bool = True,
        is_same: bool = False,
    ) -> None:
        """Note that an agent writes cells, by the generic proxy or the asynchronous one.

        is_same: the bytes were so before. Warps that hold the same number may all store it.
        """
        if not is_same:
            self._check_writer(agent, cells, "a write to what was written, not ordered after it")
        self._check_strong(agent, cells, "a write to what is atomic, not ordered after it")
        local = agent - self._agents.start
        known = self._clocks.known[agent, self._agents.start : self._agents.stop]
        late = self.reads[:, cells.reshape(-1)] > known[:, None]
        late[local] = False
        if late.any():
            self._report("a write to what is read, not ordered after it")
        if lanes is not None:
            lane = lanes[:, None]
            is_own = (self.reader[cells] == agent) & (self.reader_turn[cells] == turn)
            if (is_own & (self.reader_lane[cells] != lane)).any():
                self._report("a write to what another lane of the warp reads, without a barrier")
            self.lane[cells], self.turn[cells] = lane, turn
        else:
            self.turn[cells] = -1
        self.writer[cells], self.stamp[cells] = agent, self._clocks.known[agent, agent]
        self.is_unfenced[cells] = is_generic

    def access_atomically(self, agent: int, cells: Array) -> None:
        """Note a strong access: it races with weak ones alone."""
        self._check_writer(agent, cells, "an atomic access to what was written, not ordered after it")
        known = self._clocks.known[agent, self._agents.start : self._agents.stop]
        late = self.reads[:, cells.reshape(-1)] > known[:, None]
        late[agent - self._agents.start] = False
        if late.any():
            self._report("an atomic access to what is read, not ordered after it")
        for cell in cells.reshape(-1).tolist():
            self.strong.setdefault(cell, {})[agent] = int(self._clocks.known[agent, agent])

    def synchronise(self, agent: int, cells: Array) -> None:
        """Check that the initialisation of a barrier is ordered before an agent's use of it."""
        self._check_writer(agent, cells, "a use of a barrier, not ordered after its initialisation")

    def fence(self, agent: int) -> None:
        """Make the writes that an agent knows of visible to the asynchronous proxy."""
        [at] = np.nonzero(self.is_unfenced)
        who = self.writer[at]
        is_known = (who < 0) | (self.stamp[at] <= self._clocks.known[agent, who])
        self.is_unfenced[at[is_known]] = False

    def check_fenced(self, cells: Array) -> None:
        """Check that the asynchronous proxy sees the last writes of these cells."""
        if self.is_unfenced[cells].any():
            self._report("an access by the asynchronous proxy, without a proxy fence after the write")


class NoShadow:
    """Detector that detects nothing, which takes less time."""

    cell = 1

    def cells(self, addresses: Array, width: int) -> Array:
        return addresses

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None
