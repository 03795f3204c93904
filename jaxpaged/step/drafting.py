"""Drafting by a second model: its K and V lie beside the model's, in the blocks of the first group.

The second model computes a row's tokens when it drafts behind them. A row that never drafts costs it nothing.
Full blocks whose tokens it has computed are marked (`KVCache.followed`), and a row that finds them in the
prefix cache, or has them of its leader, begins behind them. Its draft is the token that it would choose
itself, with the row's options and the noise of (seed, position). The more the two models agree, the more
drafts are right; the answer is the model's own.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory import block_table, kv_cache
from jaxpaged.memory.block_pool import NULL_BLOCK
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.entries import dealt, number_through
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.sampling import Context, edited, sample
from jaxpaged.sampling_state import SamplingState
from jaxpaged.step import automata
from jaxpaged.step.answer import sampled_by
from jaxpaged.step.automata import GrammarRows
from jaxpaged.step.config import ByModel, StepConfig
from jaxpaged.step.model import DraftedModel, Drafter, Model
from jaxpaged.step.plan import DecodeSlots, Tiles
from jaxpaged.step.speculation import Drafts
from jaxpaged.step.state import EngineState, Rows

# A row that is behind with more tokens computes them in tiles.
MOST_BEHIND = 2


def of_model(model: Model) -> Drafter:
    """Return the model that drafts for this one."""
    assert isinstance(model, DraftedModel)
    return model.draft


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafting:
    """Drafts of a step while they are made, one token of each row after the other."""

    index: Int[Array, ""]  # tokens of each row that were computed
    kv_cache: KVCache  # that of the model that drafts
    token_ids: Int[Array, "rows max_model_len"]
    grammars: GrammarRows | None  # behind the drafts; None: there is no arena


def write_drafts(
    model: Model, state: EngineState, slots: DecodeSlots, drafts: Drafts, config: StepConfig
) -> EngineState:
    """Write as many drafts behind each row's tokens as it is to have.

    The tables must have slots for the row's newest token and all its drafts. A row's tokens are computed in
    its own decode slot, one pass after the other, but for many that it is behind with: those in tiles.
    """
    draft, rows, max_seqs = of_model(model), state.rows, state.tables.max_seqs
    assert rows.drafting is not None
    newest, num = rows.num_tokens - 1, drafts.num
    followed = rows.drafting.followed
    is_far_behind = (num > 0) & (newest - followed > MOST_BEHIND)

    def with_marked() -> Int[Array, " rows"]:
        return jnp.where(is_far_behind, jnp.clip(marked(state), followed, newest), followed)

    followed = lax.cond(jnp.any(is_far_behind), with_marked, lambda: followed)
    end = jnp.where(is_far_behind, newest, followed)
    followed, cache = catch_up(draft, state, followed, end, config)
    own, its = kv_cache.parted(cache, *draft.cache_sizes)

    row = jnp.minimum(slots.row, max_seqs - 1)
    is_own = (slots.row < max_seqs) & (num[row] > 0)
    if slots.offset is not None:
        is_own &= slots.offset == 0
    options = rows.sampling.take(row, is_own)
    most = jnp.max(jnp.where(num > 0, newest + num - followed, 0))

    def goes_on(done: Drafting) -> Bool[Array, ""]:
        return done.index < most

    def compute_one(done: Drafting) -> Drafting:
        position = followed + done.index  # of each row
        computes = (num > 0) & (position < newest + num)
        runs = is_own & computes[row]
        start = jnp.where(runs, position[row], 0)
        tiles = Tiles(row, start, start, jnp.where(runs, start + 1, 0), tile_len=1)
        its_rows = replace(rows, token_ids=done.token_ids, grammars=done.grammars)
        hidden, cache = compute(draft, its_rows, state.tables, done.kv_cache, tiles, config)
        drafts_now = computes & (position >= newest)
        its_token = choose(state, its_rows, draft.logits(hidden), row, start + 1, options, runs, config)
        token = its_token[jnp.minimum(slots.of_row, row.shape[0] - 1)]
        at = jnp.where(drafts_now, jnp.arange(max_seqs), max_seqs), position + 1
        grammars = done.grammars
        if state.arena is not None and grammars is not None:
            grammars = automata.moved(grammars, state.arena, token, drafts_now)
        return Drafting(done.index + 1, cache, done.token_ids.at[at].set(token, mode="drop"), grammars)

    done = lax.while_loop(goes_on, compute_one, Drafting(jnp.int32(0), its, rows.token_ids, rows.grammars))
    followed = jnp.where(num > 0, newest + num, rows.drafting.followed)
    drafting = replace(rows.drafting, followed=followed)
    return replace(
        state,
        rows=replace(rows, token_ids=done.token_ids, drafting=drafting),
        kv_cache=kv_cache.joined(own, done.kv_cache),
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
    draft: Drafter,
    state: EngineState,
    followed: Int[Array, " rows"],
    end: Int[Array, " rows"],
    config: StepConfig,
) -> tuple[Int[Array, " rows"], KVCache]:
    """Let the model that drafts compute each row's tokens from `followed` to `end`, in passes of tiles.

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
        start = (first[row] + k) * PREFILL_TILE
        tiles = Tiles(
            row=row,
            start=jnp.where(used, start, 0),
            first=jnp.maximum(start, done[row]),
            end=jnp.where(used, jnp.minimum(start + PREFILL_TILE, end[row]), 0),
            tile_len=PREFILL_TILE,
        )
        own, its = kv_cache.parted(cache, *draft.cache_sizes)
        cache = kv_cache.joined(own, compute(draft, state.rows, tables, its, tiles, config)[1])
        reached = jnp.where(gets > 0, jnp.minimum((first + gets) * PREFILL_TILE, end), done)
        place = (tiles.start // block_size)[:, None] + in_tile
        ids = tables.block_tables.at[tables.line_of(row)[:, None], place].get(mode="clip")
        is_full = used[:, None] & ((place + 1) * block_size <= reached[row][:, None])
        cache = kv_cache.note_followed(cache, jnp.where(is_full, ids, NULL_BLOCK), True)
        return reached, cache

    return lax.while_loop(goes_on, one_pass, (followed, state.kv_cache))


def choose(
    state: EngineState,
    rows: Rows,
    logits: Float[Array, "max_num_seqs vocab"],
    row: Int[Array, " max_num_seqs"],
    position: Int[Array, " max_num_seqs"],
    options: SamplingState,
    is_due: Bool[Array, " max_num_seqs"],
    config: StepConfig,
) -> Int[Array, " max_num_seqs"]:
    """Return the token at `position` of each slot's row that these logits give, as `answer` chooses one."""
    follows = None
    if state.arena is not None and rows.grammars is not None:
        logits, follows = automata.masked(logits, state.arena, rows.grammars, row, is_due)
    context = Context(row, rows.prompt_lens[row], position, rows.token_ids)

    def edit(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
        changed = edited(logits, rows.rules, options.has_rules, context)
        return changed if follows is None else automata.not_empty(changed, logits, follows)

    if config.sampler is None:
        return sample(logits, options, position, edit)
    return sampled_by(config.sampler, logits, options, position, edit)


def parted(model: Model, cache: KVCache, config: StepConfig) -> tuple[KVCache, KVCache | None]:
    """Split the cache into the model's and that of the model that drafts; None where there is none."""
    if not isinstance(config.lookup, ByModel):
        return cache, None
    return kv_cache.parted(cache, *of_model(model).cache_sizes)


def joined(cache: KVCache, its: KVCache | None) -> KVCache:
    """Return the cache that `parted` parted."""
    return cache if its is None else kv_cache.joined(cache, its)


def compute(
    draft: Drafter, rows: Rows, tables: BlockTables, cache: KVCache, tiles: Tiles, config: StepConfig
) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
    """Run the model that drafts over tiles whose tokens have slots already, on its own cache."""
    positions = tiles.start[:, None] + jnp.arange(tiles.tile_len, dtype=jnp.int32)
    row = jnp.broadcast_to(tiles.row[:, None], positions.shape)
    valid = (positions >= tiles.first[:, None]) & (positions < tiles.end[:, None])
    batch = PassBatch(
        slot_mapping=block_table.slot_mapping(tables, row, positions, valid).reshape(-1),
        block_tables=tables.block_tables,
        query_starts=tiles.start,
        seq_lens=tiles.end,
        implementation=config.attention,
        table_rows=tables.line_of(tiles.row),
    )
    token_ids = jnp.where(valid, rows.token_ids.at[row, positions].get(mode="clip"), 0)
    return draft(token_ids.reshape(-1), jnp.where(valid, positions, 0).reshape(-1), cache, batch)
