"""Base of the oracles of vLLM's three generations."""

import copy
import pickle

from jaxpaged.arithmetic import cdiv
from jaxpaged.status import Status

Pair = tuple[int, int]


class Refused(Exception):
    """The oracle raised, or returned nothing: the functional side must report `status`."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class Oracle:
    """Oracle of a generation: its common part.

    A row lives on the device or on the host, and nowhere while it has no tokens.
    """

    # Whether the manager can do so with what has lost blocks to the window.
    forks_windowed = True
    swaps_windowed = False

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.tokens: dict[int, list[int]] = {}  # tokens of every row
        self.on_host: set[int] = set()

    def trial(self) -> "Oracle":
        """Return a copy to try a verb on: managers stop half way when they raise, and the oracle must not."""
        try:
            return pickle.loads(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))  # five times as fast
        except Exception:  # a user's class may hold anything
            return copy.deepcopy(self)

    def num_held(self, row: int) -> int:
        return cdiv(len(self.tokens.get(row, [])), self.block_size)

    def device_rows(self) -> list[int]:
        return sorted(set(self.tokens) - self.on_host)

    def windowed(self) -> list[int]:
        """Return the rows from which blocks have left the window."""
        return [row for row in self.tokens if 0 in self.table(row)]

    def table(self, row: int) -> list[int]:
        raise NotImplementedError

    def free(self, row: int) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        for row in sorted(self.on_host) + self.device_rows():
            self.free(row)
