"""Foresight of the scheduler: which cached blocks the waiting requests will find, for policies that ask."""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxpaged.memory import block_pool
from jaxpaged.memory.block_pool import NULL_BLOCK
from jaxpaged.memory.entries import in_chunks
from jaxpaged.memory.prefix_cache import Hit
from jaxpaged.step.admission import find_prompt
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState


def note_waiting(state: EngineState, config: StepConfig) -> EngineState:
    """Pass the blocks that waiting requests will hit to the eviction policy, if it wants them.

    Each block gets the number of rows less the requests before the first one that finds it. Nothing is taken.
    """
    pool, rows = state.tables.pool, state.rows
    if pool.policy.note_waiting is None or pool.prefix_cache is None:
        return state
    num_rows, num_blocks = state.tables.max_seqs, pool.num_blocks

    def mark(place: int | Int[Array, ""], wanted: Int[Array, " num_blocks"]) -> Int[Array, " num_blocks"]:
        row = rows.order[place]

        def look_up() -> Int[Array, " num_blocks"]:
            hit = find_prompt(state, row, config)
            return _marked(hit, num_rows - jnp.asarray(place, jnp.int32), wanted)

        return lax.cond(rows.waiting[row], look_up, lambda: wanted)

    wanted = lax.fori_loop(0, num_rows, mark, jnp.zeros(num_blocks, jnp.int32))
    pool = block_pool.note_waiting(pool, wanted)
    return replace(state, tables=replace(state.tables, pool=pool))


def _marked(hit: Hit, number: Int[Array, ""], wanted: Int[Array, " num_blocks"]) -> Int[Array, " num_blocks"]:
    """Return the numbers with `number` for the hit's blocks that have a smaller one."""

    def mark(_: Array, k: Array, used: Array, wanted: Array) -> Array:
        block_id = hit.block_ids[..., k]
        block_ids = jnp.where(used & (block_id != NULL_BLOCK), block_id, wanted.shape[0])
        return wanted.at[block_ids].max(number, mode="drop")

    return in_chunks(hit.chain.num_blocks[None], mark, wanted)
