"""What the three generations have in common."""

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
    """What the three have in common. A row lives on the device or on the host; one without tokens nowhere."""

    # Whether the manager can do so with what has lost blocks to the window.
    forks_windowed = True
    swaps_windowed = False

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.tokens: dict[int, list[int]] = {}  # of every row
        self.on_host: set[int] = set()

    def trial(self) -> "Oracle":
        """A copy to try something on: the managers stop half way when they raise, we must not."""
        try:
            return pickle.loads(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))  # five times as fast
        except Exception:  # of somebody's class, which may hold anything
            return copy.deepcopy(self)

    def num_held(self, row: int) -> int:
        return cdiv(len(self.tokens.get(row, [])), self.block_size)

    def device_rows(self) -> list[int]:
        return sorted(set(self.tokens) - self.on_host)

    def windowed(self) -> list[int]:
        """Rows of which blocks have left the window."""
        return [row for row in self.tokens if 0 in self.table(row)]

    def table(self, row: int) -> list[int]:
        raise NotImplementedError

    def free(self, row: int) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        for row in sorted(self.on_host) + self.device_rows():
            self.free(row)
