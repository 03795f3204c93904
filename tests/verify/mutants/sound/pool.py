"""A functional allocator in NumPy: block tables over a stack of free blocks, as policy `lifo` has them."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

OUT_OF_BLOCKS, TABLE_FULL, UNKNOWN_ROW, ROW_IN_USE = 1, 2, 32, 64  # jaxpaged.status.Status


@dataclass(frozen=True)
class State:
    stack: np.ndarray  # free blocks, the next one last; the rest is 0
    num_free: np.ndarray
    ref_count: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    block_size: np.ndarray

    def copy(self):
        return replace(self, **{name: array.copy() for name, array in vars(self).items()})


def create(num_blocks, max_seqs, max_blocks_per_seq, block_size):
    stack = np.zeros(num_blocks, int)
    stack[:-1] = np.arange(1, num_blocks)
    zeros = np.zeros
    tables = zeros((max_seqs, max_blocks_per_seq), int)
    return State(
        stack,
        np.array(num_blocks - 1),
        zeros(num_blocks, int),
        tables,
        zeros(max_seqs, int),
        np.array(block_size),
    )


def observe(state):
    free = state.stack[: int(state.num_free)][::-1].tolist()
    return {
        "block_tables": state.block_tables,
        "seq_lens": state.seq_lens,
        "ref_count": state.ref_count,
        "free": free,
    }


def append(state, num_new_tokens):
    new = state.copy()
    sources, destinations = np.zeros((2, len(num_new_tokens)), int)
    lens = state.seq_lens + num_new_tokens
    if (-(-lens // state.block_size) > state.block_tables.shape[1]).any():
        return state, SimpleNamespace(status=TABLE_FULL)
    for row in np.flatnonzero(num_new_tokens):
        held = -(-state.seq_lens[row] // state.block_size)
        line = new.block_tables[row]
        if state.seq_lens[row] % state.block_size and new.ref_count[line[held - 1]] > 1:
            if not new.num_free:
                return state, SimpleNamespace(status=OUT_OF_BLOCKS)
            sources[row], destinations[row] = line[held - 1], take(new)
            new.ref_count[sources[row]] -= 1
            line[held - 1] = destinations[row]
        for place in range(held, -(-lens[row] // state.block_size)):
            if not new.num_free:
                return state, SimpleNamespace(status=OUT_OF_BLOCKS)
            line[place] = take(new)
    new.seq_lens[:] = lens
    return new, SimpleNamespace(status=0, copy_sources=sources, copy_destinations=destinations)


def take(new):
    new.num_free[...] -= 1
    block = new.stack[new.num_free]
    new.stack[new.num_free] = 0
    new.ref_count[block] = 1
    return block


def fork(state, sources, destinations, mask):
    sources, destinations = sources[mask], destinations[mask]
    status = UNKNOWN_ROW * bool((state.seq_lens[sources] == 0).any())
    twice = len(set(destinations.tolist())) < len(destinations)
    status |= ROW_IN_USE * bool(twice or state.seq_lens[destinations].any())
    if status:
        return state, SimpleNamespace(status=status)
    new = state.copy()
    for source, destination in zip(sources, destinations, strict=True):
        new.block_tables[destination] = new.block_tables[source]
        new.seq_lens[destination] = new.seq_lens[source]
        new.ref_count[new.block_tables[source]] += new.block_tables[source] > 0
    return new, SimpleNamespace(status=0)


def free(state, rows):
    new = state.copy()
    num_freed = 0
    for row in np.flatnonzero(rows):
        for block in new.block_tables[row]:
            if block:
                new.ref_count[block] -= 1
                if not new.ref_count[block]:
                    new.stack[new.num_free] = block
                    new.num_free[...] += 1
                    num_freed += 1
        new.block_tables[row] = 0
        new.seq_lens[row] = 0
    return new, SimpleNamespace(status=0, num_freed=num_freed)


def can_allocate(state, count, watermark_blocks):
    if len(state.stack) - 1 - count < watermark_blocks:
        return 2
    return int(state.num_free - count < watermark_blocks)
