"""Statistics of a trace by itself, in NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpaged.arithmetic import cdiv, next_power_of_two
from jaxpaged.research.lab.traces import Trace, blocks

WASTE_SIZES = tuple(2**i for i in range(11))  # tokens a block


def waste(trace: Trace, block_sizes: Sequence[int] = WASTE_SIZES) -> dict[int, float]:
    """Return, by block size, the share of slots in the blocks of finished requests that hold no token."""
    lens = trace.input_lens + trace.output_lens
    places = {size: int((cdiv(lens, size) * size).sum()) for size in block_sizes}
    return {size: 1 - int(lens.sum()) / total for size, total in places.items()}


@dataclass(frozen=True)
class Reuse:
    """Reuse of blocks: an entry for each time that a block's content is asked for again."""

    tokens: (
        np.ndarray
    )  # of the distinct blocks asked for since, this one included: the LRU cache that hits it
    seconds: np.ndarray  # since then
    num_asked: int  # times blocks were asked for in all


def reuse(trace: Trace) -> Reuse | None:
    """Return reuse distances and times of the trace's full blocks; None where content is unknown."""
    if trace.content is None:
        return None
    cut = blocks(trace, trace.block_size)
    arrival = np.repeat(trace.arrival_s, cut.num_findable)
    order = np.argsort(cut.symbols, kind="stable")
    is_again = np.append(False, cut.symbols[order][1:] == cut.symbols[order][:-1])
    before = np.full(len(order), -1)
    before[order[is_again]] = order[np.flatnonzero(is_again) - 1]
    again = np.flatnonzero(before >= 0)
    # A block that was requested twice in between counts once.
    since = again - before[again] - num_larger_before(before)[again]
    return Reuse(since * trace.block_size, arrival[again] - arrival[before[again]], len(order))


def num_larger_before(values: np.ndarray) -> np.ndarray:
    """Return, for each value, how many of those before it are larger: by halves, all pairs of a size at
    once.
    """
    size = next_power_of_two(len(values))
    bound = len(values) + 1
    padded = np.pad(values.astype(np.int64), (0, size - len(values)), constant_values=bound)
    counts = np.zeros(size, np.int64)
    half = 1
    while half < size:
        pairs = padded.reshape(-1, 2, half)
        offset = np.arange(len(pairs))[:, None] * (bound + 2)
        left = np.sort(pairs[:, 0], axis=1) + offset
        place = np.searchsorted(left.ravel(), (pairs[:, 1] + offset).ravel(), side="right")
        not_larger = place.reshape(-1, half) - np.arange(len(pairs))[:, None] * half
        counts.reshape(-1, 2, half)[:, 1] += half - not_larger
        half *= 2
    return counts[: len(values)]
