"""Counts of a run: instructions, passes over the banks of shared memory, sectors of global memory."""

import collections
import dataclasses

import numpy as np

from jaxpaged.research.ptx.registers import Array

BANKS, BANK_BYTES, SECTOR_BYTES = 32, 4, 32


@dataclasses.dataclass
class Counts:
    """Counts of the actions of a launch's warps.

    Roles are warpgroups of a thread block. Barriers are in `instructions`; waits that poll depend on the
    schedule.
    """

    instructions: collections.Counter[tuple[int, str]] = dataclasses.field(
        default_factory=collections.Counter
    )
    wavefronts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    least_wavefronts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    conflicts: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    sectors: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    steps: int = 0
    num_divergent: int = 0

    def see_shared(self, kind: str, at: int, addresses: Array, width: int) -> None:
        """Count an access of lanes to shared memory by instruction `at`."""
        taken, least = wavefronts(addresses, width), least_wavefronts(addresses, width)
        self.wavefronts[kind] += taken
        self.least_wavefronts[kind] += least
        self.conflicts[at] += taken - least

    def see_global(self, kind: str, addresses: Array, width: int = 1) -> None:
        """Count the sectors of an access to global memory."""
        first, last = addresses // SECTOR_BYTES, (addresses + width - 1) // SECTOR_BYTES
        self.sectors[kind] += len(np.union1d(first, last))

    @property
    def excess(self) -> float:
        """Return the wavefronts as a multiple of the least possible."""
        return self.wavefronts.total() / max(1, self.least_wavefronts.total())


def wavefronts(addresses: Array, width: int) -> int:
    """Return the passes over the banks that lanes' accesses of `width` bytes take.

    A pass serves 128 bytes: all lanes of 4 bytes, half of them of 8, a quarter of 16. Different words of one
    bank are served one after the other, the same word at once.
    """
    lanes = max(1, min(len(addresses), BANKS * BANK_BYTES // max(width, BANK_BYTES)))
    total = 0
    for first in range(0, len(addresses), lanes):
        words = addresses[first : first + lanes, None] // BANK_BYTES
        words = np.unique(words + np.arange(max(1, width // BANK_BYTES)))
        total += int(np.bincount(words % BANKS).max())
    return total


def least_wavefronts(addresses: Array, width: int) -> int:
    """Return the least number of passes that this many different bytes take."""
    words = np.unique(addresses[:, None] // BANK_BYTES + np.arange(max(1, width // BANK_BYTES)))
    return max(1, -(-len(words) // BANKS))
