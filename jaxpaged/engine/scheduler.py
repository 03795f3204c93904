"""Who runs next, and with how many tokens: pure functions of the state's small integers.

A request is admitted when the blocks that it and all running ones may ever need are there, in order of
arrival and without overtaking. So a running row never waits for a block, and the head of the line runs at the
latest when all others have finished. Prompts go before decoding, so that rows decode together.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.engine.state import EngineState, Phase, Rows
from jaxpaged.memory.block_table import cdiv


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["row", "start", "num_tokens"], meta_fields=["tile_len"]
)
@dataclasses.dataclass(frozen=True)
class Tiles:
    """The work of one step: in each tile up to `tile_len` neighbouring tokens of one row."""

    row: Int[Array, " num_tiles"]
    start: Int[Array, " num_tiles"]  # position of the tile's first token
    num_tokens: Int[Array, " num_tiles"]  # 0 for an unused tile
    tile_len: int


def blocks_needed(rows: Rows, block_size: int) -> Int[Array, " max_num_seqs"]:
    """Blocks each request may ever need. Its last token is never written to the cache."""
    return cdiv(rows.max_num_tokens - 1, block_size)


def admit(state: EngineState) -> EngineState:
    """Let waiting requests run, first come first served, while the blocks they may need are there."""
    rows, tables = state.rows, state.tables
    need = blocks_needed(rows, tables.block_size)
    reserved = jnp.sum(jnp.where(rows.running, need, 0))
    waiting = rows.phase == Phase.WAITING
    order = jnp.argsort(jnp.where(waiting, rows.arrival, jnp.iinfo(jnp.int32).max))
    total = reserved + jnp.cumsum(jnp.where(waiting, need, 0)[order])
    fits = jnp.zeros_like(waiting).at[order].set(total <= tables.pool.num_blocks - 1)
    phase = jnp.where(waiting & fits, Phase.RUNNING, rows.phase)
    return dataclasses.replace(state, rows=dataclasses.replace(rows, phase=phase))


def prompt_tokens_left(state: EngineState) -> Int[Array, " max_num_seqs"]:
    """Prompt tokens of each running row that are not in the cache yet."""
    left = state.rows.prompt_lens - state.tables.seq_lens
    return jnp.where(state.rows.running, jnp.maximum(left, 0), 0)


def prefill_tiles(state: EngineState, num_tiles: int, tile_len: int) -> Tiles:
    """The next tiles of the prompts being computed, in order of arrival.

    A prompt may get several tiles at once: each sees the ones before it, for all K and V are written first.
    """
    left = prompt_tokens_left(state)
    order = jnp.argsort(jnp.where(left > 0, state.rows.arrival, jnp.iinfo(jnp.int32).max))
    end = jnp.cumsum(cdiv(left, tile_len)[order])  # tiles of all prompts up to this one
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    place = jnp.searchsorted(end, tile, side="right").astype(jnp.int32)
    used = tile < end[-1]
    row = order.at[place].get(mode="clip").astype(jnp.int32)
    first = end.at[place].get(mode="clip") - cdiv(left, tile_len)[row]  # the row's first tile
    offset = (tile - first) * tile_len
    return Tiles(
        row=row,
        start=state.tables.seq_lens[row] + jnp.where(used, offset, 0),
        num_tokens=jnp.where(used, jnp.minimum(left[row] - offset, tile_len), 0),
        tile_len=tile_len,
    )


def decode_tiles(state: EngineState) -> Tiles:
    """The newest token of every running row, each in its own row's tile."""
    decodes = state.rows.running & (state.tables.seq_lens >= state.rows.prompt_lens)
    return Tiles(
        row=jnp.arange(state.tables.max_seqs, dtype=jnp.int32),
        start=state.tables.seq_lens,
        num_tokens=decodes.astype(jnp.int32),
        tile_len=1,
    )


def any_work(state: EngineState) -> Bool[Array, ""]:
    return jnp.any((state.rows.phase == Phase.WAITING) | state.rows.running)
