"""Drafting by a second model, or by a head: its K and V lie beside the model's, in the first group's blocks.

The second model computes a row's tokens when it drafts behind them. A row that never drafts costs it nothing.
Full blocks whose tokens it has computed are marked (`KVCache.followed`), and a row that finds them in the
prefix cache, or has them of its leader, begins behind them. Its draft is the token that it would choose
itself, with the row's options and the noise of (seed, position). The more the two models agree, the more
drafts are right; the answer is the model's own. Of a head all this is true of its entries, of which the
number of a row's tokens less one can be computed (see `step.draft_pass`).
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory import kv_cache
from jaxpaged.memory.block_pool import NULL_BLOCK
from jaxpaged.memory.entries import dealt, number_through
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.step import draft_pass, features
from jaxpaged.step.choice import Slots, choose
from jaxpaged.step.config import StepConfig
from jaxpaged.step.feature_values import DRAFTS
from jaxpaged.step.features import Values
from jaxpaged.step.model import Model
from jaxpaged.step.plan import DecodeSlots, Tiles, wide_tiles
from jaxpaged.step.speculation import MOST_BEHIND, Drafts
from jaxpaged.step.state import EngineState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafting:
    """Drafts of a step while they are made, one token of each row after the other."""

    index: Int[Array, ""]  # tokens of each row that were computed
    kv_cache: KVCache  # that of the model that drafts
    token_ids: Int[Array, "rows max_model_len"]
    tracked: Values  # of features that tokens change, behind the drafts


def write_drafts(
    model: Model, state: EngineState, slots: DecodeSlots, drafts: Drafts, config: StepConfig
) -> EngineState:
    """Write the planned number of drafts behind each row's tokens.

    The tables must have slots for the row's newest token and all its drafts. A row's tokens are computed in
    its own decode slot, one pass after the other, but for many that it is behind with: those in tiles.
    """
    ahead, rows, max_seqs = draft_pass.ahead(model), state.rows, state.tables.max_seqs
    newest, num = rows.num_tokens - 1 - ahead, drafts.num
    followed = rows.drafting.followed
    is_far_behind = (num > 0) & (newest - followed > MOST_BEHIND)

    def with_marked() -> Int[Array, " rows"]:
        return jnp.where(is_far_behind, jnp.clip(marked(state), followed, newest), followed)

    followed = lax.cond(jnp.any(is_far_behind), with_marked, lambda: followed)
    end = jnp.where(is_far_behind, newest, followed)
    followed, cache = catch_up(model, state, followed, end, config)
    served_cache, draft_cache = kv_cache.parted(cache, *draft_pass.of_model(model).cache_sizes)

    # Rows have the first slots, and while more of them run than may, none drafts.
    most_rows = config.max_num_seqs if config.most_drafting is None else max(config.most_drafting, 1)
    of_slot = slots.row[:most_rows]
    row = jnp.minimum(of_slot, max_seqs - 1)
    is_own = (of_slot < max_seqs) & (num[row] > 0)
    if slots.offset is not None:
        is_own &= slots.offset[:most_rows] == 0
    options = rows.sampling.take(row, is_own)
    num_passes = jnp.max(jnp.where(num > 0, newest + num - followed, 0))

    def goes_on(done: Drafting) -> Bool[Array, ""]:
        return done.index < num_passes

    def compute_one(done: Drafting) -> Drafting:
        position = followed + done.index  # of each row
        computes = (num > 0) & (position < newest + num)
        runs = is_own & computes[row]
        start = jnp.where(runs, position[row], 0)
        tiles = Tiles(row, start, start, jnp.where(runs, start + 1, 0), tile_len=1)
        its_rows = replace(rows, token_ids=done.token_ids)
        hidden, left, cache = draft_pass.compute(model, its_rows, state.tables, done.kv_cache, tiles, config)
        drafts_now = computes & (position >= newest)
        if left is not None:
            cache = draft_pass.hand_on(cache, state.tables, left, tiles, drafts_now[row])
        behind, logits = 1 + ahead, draft_pass.logits(model, hidden)
        due = Slots(logits, row, runs, start + behind, row)
        chosen = choose(due, options, its_rows, done.tracked, state.features, config).token_ids
        token = chosen[jnp.minimum(slots.of_row, row.shape[0] - 1)]
        at = jnp.where(drafts_now, jnp.arange(max_seqs), max_seqs), position + behind
        tracked = features.after_token(done.tracked, state.features, token, drafts_now)
        return Drafting(done.index + 1, cache, done.token_ids.at[at].set(token, mode="drop"), tracked)

    first = Drafting(jnp.int32(0), draft_cache, rows.token_ids, features.tracked(rows.features))
    done = lax.while_loop(goes_on, compute_one, first)
    # A head's entries of drafts are made of features of its own: they are to be computed again.
    computed = newest + (1 if ahead else num)
    followed = jnp.where(num > 0, computed, rows.drafting.followed)
    drafting = replace(rows.drafting, followed=followed)
    return replace(
        state,
        rows=replace(rows, token_ids=done.token_ids, features=rows.features | {DRAFTS: drafting}),
        kv_cache=kv_cache.joined(served_cache, done.kv_cache),
    )


def marked(state: EngineState) -> Int[Array, " rows"]:
    """Return how many of each row's first tokens are in full blocks that the model that drafts has computed,
    or have left the row's window.
    """
    assert state.kv_cache.followed is not None
    ids = state.tables.block_tables[:: state.tables.num_groups]
    held = jnp.arange(ids.shape[1], dtype=jnp.int32) < state.tables.num_blocks[:, None]
    is_followed = held & (state.kv_cache.followed[ids] | (ids == NULL_BLOCK))
    num_blocks = jnp.sum(jnp.cumprod(is_followed, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    return num_blocks * state.tables.block_size


def catch_up(
    model: Model,
    state: EngineState,
    followed: Int[Array, " rows"],
    end: Int[Array, " rows"],
    config: StepConfig,
) -> tuple[Int[Array, " rows"], KVCache]:
    """Compute the draft model's K and V of each row's positions from `followed` to `end`, in passes of tiles.

    Returns the ends, and the cache of both models, with a mark at blocks that are full of them.
    """
    tables, block_size = state.tables, state.tables.block_size
    in_tile = jnp.arange(cdiv(PREFILL_TILE, block_size) + 1, dtype=jnp.int32)
    type Carry = tuple[Int[Array, " rows"], KVCache]

    def goes_on(carry: Carry) -> Bool[Array, ""]:
        return jnp.any(carry[0] < end)

    def one_pass(carry: Carry) -> Carry:
        done, cache = carry
        first = done // PREFILL_TILE
        gets = dealt(jnp.where(done < end, (end - 1) // PREFILL_TILE - first + 1, 0), config.tiles_per_pass)
        row, k, used = number_through(gets, config.tiles_per_pass)
        tiles = wide_tiles(row, k, used, done[row], end[row])
        served_cache, draft_cache = kv_cache.parted(cache, *draft_pass.of_model(model).cache_sizes)
        *_, draft_cache = draft_pass.compute(model, state.rows, tables, draft_cache, tiles, config)
        cache = kv_cache.joined(served_cache, draft_cache)
        reached = jnp.where(gets > 0, jnp.minimum((first + gets) * PREFILL_TILE, end), done)
        place = (tiles.start // block_size)[:, None] + in_tile
        ids = tables.block_tables.at[tables.line_of(row)[:, None], place].get(mode="clip")
        is_full = used[:, None] & ((place + 1) * block_size <= reached[row][:, None])
        cache = kv_cache.note_followed(cache, jnp.where(is_full, ids, NULL_BLOCK), True)
        return reached, cache

    return lax.while_loop(goes_on, one_pass, (followed, state.kv_cache))
