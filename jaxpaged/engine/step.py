"""One step: schedule, take blocks, run the model, sample, append, stop, free. Pure."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.config import PREFILL_TILE
from jaxpaged.engine import scheduler
from jaxpaged.engine.scheduler import Tiles
from jaxpaged.engine.state import EngineState, FinishReason, Phase, Rows
from jaxpaged.memory import block_table
from jaxpaged.memory.block_table import BlockTables, cdiv
from jaxpaged.memory.kv_cache import AttentionBatch
from jaxpaged.models.llama import Llama
from jaxpaged.sampling import sample
from jaxpaged.status import Status

Hidden = Float[Array, "max_num_seqs hidden"]


def step(model: Llama, state: EngineState, max_prefill_tokens: int) -> EngineState:
    """Advance by a few prompt tiles if a prompt is unfinished, else by one token a running row.

    Each kind of forward pass has one shape (prompts two, so that a short one need not pay for a full batch);
    what follows it, from logits to freeing, always has the shape of the rows. So a token's bits do not depend
    on what else is in the step.
    """
    state = scheduler.admit(state)
    widths = prefill_widths(max_prefill_tokens)
    tiles_left = jnp.sum(cdiv(scheduler.prompt_tokens_left(state), PREFILL_TILE))

    def prefill(num_tiles: int) -> Callable[[EngineState], tuple[EngineState, Hidden]]:
        return lambda state: forward(model, state, scheduler.prefill_tiles(state, num_tiles, PREFILL_TILE))

    def decode(state: EngineState) -> tuple[EngineState, Hidden]:
        return forward(model, state, scheduler.decode_tiles(state))

    # Branch 0 decodes; branch i > 0 is the narrowest prefill that takes all tiles left, or the widest.
    wanted = 1 + jnp.searchsorted(jnp.asarray(widths), tiles_left)
    branch = jnp.where(tiles_left == 0, 0, jnp.minimum(wanted, len(widths)))
    state, hidden = lax.switch(branch, [decode, *map(prefill, widths)], state)

    # A row whose every token is in the cache has its newest token's hidden state, and is due for the next.
    rows = state.rows
    due = rows.running & (state.tables.seq_lens == rows.num_tokens)
    next_ids = lax.cond(
        jnp.any(due),
        lambda: sample(model.logits(hidden), rows.sampling, rows.num_tokens),
        lambda: jnp.zeros_like(rows.num_tokens),
    )
    rows = append_tokens(rows, next_ids, due)
    tables, freed = free_finished(rows, state.tables)
    counters = dataclasses.replace(state.counters, num_steps=state.counters.num_steps + 1)
    return dataclasses.replace(
        state, rows=rows, tables=tables, counters=counters, status=state.status | freed
    )


def prefill_widths(max_prefill_tokens: int) -> tuple[int, ...]:
    """Tiles of each prefill shape, narrow to wide."""
    widest = max_prefill_tokens // PREFILL_TILE
    narrow = 2
    return (narrow, widest) if narrow < widest else (widest,)


def forward(model: Llama, state: EngineState, tiles: Tiles) -> tuple[EngineState, Hidden]:
    """Compute the tiles' tokens; the hidden state of each row's newest token, where it was among them."""
    rows = state.rows
    offset = jnp.arange(tiles.tile_len, dtype=jnp.int32)
    positions = tiles.start[:, None] + offset
    row = jnp.broadcast_to(tiles.row[:, None], positions.shape)
    valid = offset < tiles.num_tokens[:, None]

    per_row = jnp.zeros_like(rows.num_tokens).at[tiles.row].add(tiles.num_tokens)
    tables, appended = block_table.append(
        state.tables, per_row, max_new_blocks=max_new_blocks(tiles, state.tables.block_size)
    )
    end = tiles.start + tiles.num_tokens
    batch = AttentionBatch(
        slot_mapping=block_table.slot_mapping(tables, row, positions, valid).reshape(-1),
        block_tables=tables.block_tables[tiles.row],
        query_starts=tiles.start,
        seq_lens=jnp.where(tiles.num_tokens > 0, end, 0),
    )
    token_ids = jnp.where(valid, rows.token_ids.at[row, positions].get(mode="clip"), 0)
    hidden, kv_cache = model(
        token_ids.reshape(-1), jnp.where(valid, positions, 0).reshape(-1), state.kv_cache, batch
    )

    is_newest = (tiles.num_tokens > 0) & (end == rows.num_tokens[tiles.row])
    last = hidden.reshape(*positions.shape, -1)[jnp.arange(positions.shape[0]), tiles.num_tokens - 1]
    of_rows = jnp.zeros((tables.max_seqs, hidden.shape[-1]), hidden.dtype)
    of_rows = of_rows.at[jnp.where(is_newest, tiles.row, tables.max_seqs)].set(last, mode="drop")

    num_prompt = jnp.sum(jnp.where(tiles.start < rows.prompt_lens[tiles.row], tiles.num_tokens, 0))
    counters = dataclasses.replace(
        state.counters,
        num_prompt_tokens=state.counters.num_prompt_tokens + num_prompt,
        num_decode_tokens=state.counters.num_decode_tokens + jnp.sum(tiles.num_tokens) - num_prompt,
    )
    return EngineState(rows, tables, kv_cache, counters, status=state.status | appended.status), of_rows


def max_new_blocks(tiles: Tiles, block_size: int) -> int:
    """Blocks that these tiles can need: each token of a tile lies in a new block, or shares one."""
    num_tiles = tiles.row.shape[0]
    return num_tiles if tiles.tile_len == 1 else num_tiles * (cdiv(tiles.tile_len, block_size) + 1)


def append_tokens(
    rows: Rows, next_ids: Int[Array, " max_num_seqs"], appends: Bool[Array, " max_num_seqs"]
) -> Rows:
    """Append a token to each row that is due, and finish the rows that end with it."""
    max_num_seqs = rows.phase.shape[0]
    at = jnp.where(appends, jnp.arange(max_num_seqs), max_num_seqs)
    num_tokens = rows.num_tokens + appends
    stops = appends & jnp.any(next_ids[:, None] == rows.stop_token_ids, axis=1)
    ends = appends & (num_tokens == rows.max_num_tokens)
    reason = jnp.where(stops, FinishReason.STOP, jnp.where(ends, FinishReason.LENGTH, rows.finish_reason))
    return dataclasses.replace(
        rows,
        token_ids=rows.token_ids.at[at, rows.num_tokens].set(next_ids, mode="drop"),
        num_tokens=num_tokens,
        phase=jnp.where(stops | ends, Phase.FINISHED, rows.phase),
        finish_reason=reason,
    )


def free_finished(rows: Rows, tables: BlockTables) -> tuple[BlockTables, Int[Array, ""]]:
    """Give back the blocks of rows that have finished; the second result is the status."""
    finished = (rows.phase == Phase.FINISHED) & (tables.seq_lens > 0)

    def give_back(tables: BlockTables) -> tuple[BlockTables, Int[Array, ""]]:
        tables, info = block_table.free_rows(tables, finished)
        return tables, info.status

    def nothing(tables: BlockTables) -> tuple[BlockTables, Int[Array, ""]]:
        return tables, jnp.int32(Status.OK)

    return lax.cond(jnp.any(finished), give_back, nothing, tables)
