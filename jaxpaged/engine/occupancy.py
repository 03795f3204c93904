"""Occupancy: which request holds which blocks, and how far each is, for people to look at."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from jaxpaged.engine.request import Request
from jaxpaged.memory.block_pool import NULL_BLOCK
from jaxpaged.memory.content_table import PrefixCache
from jaxpaged.memory.free_queue import FreeQueue
from jaxpaged.step.state import EngineState, Phase


@dataclasses.dataclass(frozen=True)
class Progress:
    """A request that has a row."""

    request_id: int
    phase: Phase
    prompt_len: int
    num_computed: int  # tokens that have their places in the cache
    num_tokens: int  # of prompt and answer
    max_num_tokens: int
    block_ids: np.ndarray  # int32, first to last; those that left a window are not among them


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """The pool's blocks and the rows' requests, at one moment between two runs."""

    holders: np.ndarray  # [num_blocks] int32: how many hold a block; 0 for free ones and the null block
    has_content: np.ndarray  # [num_blocks] bool: whether the prefix cache finds it
    requests: tuple[Progress, ...]  # by their numbers
    num_queued: int  # requests without a row


def occupancy(state: EngineState, requests: Mapping[int, Request], num_queued: int) -> Occupancy:
    """Return the occupancy of a state whose rows have these requests; it reads a few numbers a block and a
    row.

    Rows and blocks of several replicas, which have an axis of their own, are numbered through.
    """
    tables, rows = state.tables, state.rows
    cache = tables.pool.prefix_cache
    places, slot, block_tables, seq_lens, phases, num_tokens = jax.device_get(
        (
            [queue.place for queue in tables.pool.queues],
            None if cache is None else cache.slot,
            tables.block_tables,
            tables.seq_lens,
            rows.phase,
            rows.num_tokens,
        )
    )
    first, *further = places
    place = np.concatenate([first, *(of_class[..., 1:] for of_class in further)], axis=-1)
    holders = (FreeQueue.NOT_QUEUED - place).clip(0)
    holders[..., NULL_BLOCK] = 0
    num_blocks, num_rows = place.shape[-1], phases.shape[-1]
    its_tables = block_tables.reshape(-1, tables.num_groups * block_tables.shape[-1])  # a line a row
    seq_lens, phases, num_tokens = (x.reshape(-1) for x in (seq_lens, phases, num_tokens))
    progress = [
        Progress(
            request_id=request.request_id,
            phase=Phase(int(phases[row])),
            prompt_len=len(request.prompt_token_ids),
            num_computed=int(seq_lens[row]),
            num_tokens=int(num_tokens[row]),
            max_num_tokens=request.max_num_tokens,
            block_ids=its_tables[row][its_tables[row] != NULL_BLOCK] + row // num_rows * num_blocks,
        )
        for row, request in requests.items()
    ]
    return Occupancy(
        holders=holders.reshape(-1),
        has_content=np.zeros(place.size, bool) if slot is None else slot.reshape(-1) != PrefixCache.NO_SLOT,
        requests=tuple(sorted(progress, key=lambda each: each.request_id)),
        num_queued=num_queued,
    )
