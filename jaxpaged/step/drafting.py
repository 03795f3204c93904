"""Drafting by a second model: its K and V lie beside the model's, in the blocks of the first group.

The second model computes every token that the model computes, so wherever the model's K and V are present,
its own are, too: behind prefix hits, forks, swaps and roll-backs. Its draft is the token that it would choose
itself, with the row's options and the noise of (seed, position). The more the two models agree, the more
drafts are right; the answer is the model's own.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.memory import block_table, kv_cache
from jaxpaged.memory.block_table import BlockTables
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


def of_model(model: Model) -> Drafter:
    """Return the model that drafts for this one."""
    assert isinstance(model, DraftedModel)
    return model.draft


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafting:
    """Drafts of a step while they are made, one of each row after the other."""

    index: Int[Array, ""]  # drafts of each row that are there
    kv_cache: KVCache  # that of the model that drafts
    token_ids: Int[Array, "rows max_model_len"]
    grammars: GrammarRows | None  # behind the drafts; None: there is no arena


def write_drafts(
    model: Model, state: EngineState, slots: DecodeSlots, drafts: Drafts, config: StepConfig
) -> EngineState:
    """Write as many drafts behind each row's tokens as it is to have.

    The tables must have slots for the row's newest token and all its drafts. A row's drafts are computed in
    its own decode slot, one pass after the other: as many passes as the row with most drafts has.
    """
    draft, rows, max_seqs = of_model(model), state.rows, state.tables.max_seqs
    assert slots.offset is not None
    row = jnp.minimum(slots.row, max_seqs - 1)
    num = jnp.where((slots.row < max_seqs) & (slots.offset == 0), drafts.num[row], 0)
    options = rows.sampling.take(row, num > 0)
    most = jnp.max(num)

    def goes_on(done: Drafting) -> Bool[Array, ""]:
        return done.index < most

    def draft_one(done: Drafting) -> Drafting:
        drafts_now = done.index < num
        position = rows.num_tokens[row] - 1 + done.index
        start = jnp.where(drafts_now, position, 0)
        tiles = Tiles(row, start, start, jnp.where(drafts_now, position + 1, 0), tile_len=1)
        its_rows = replace(rows, token_ids=done.token_ids)
        hidden, cache = compute(draft, its_rows, state.tables, done.kv_cache, tiles, config)
        grammars, logits = done.grammars, draft.logits(hidden)
        its_rows = replace(its_rows, grammars=grammars)
        token_ids = choose(state, its_rows, logits, row, position + 1, options, drafts_now, config)
        if state.arena is not None and grammars is not None:
            token = token_ids[jnp.minimum(slots.of_row, row.shape[0] - 1)]
            grammars = automata.moved(grammars, state.arena, token, done.index < drafts.num)
        at = jnp.where(drafts_now, row, max_seqs), position + 1
        return Drafting(done.index + 1, cache, done.token_ids.at[at].set(token_ids, mode="drop"), grammars)

    own, its = kv_cache.parted(state.kv_cache, *draft.cache_sizes)
    before = Drafting(jnp.int32(0), its, rows.token_ids, rows.grammars)
    done = lax.while_loop(goes_on, draft_one, before)
    return replace(
        state, rows=replace(rows, token_ids=done.token_ids), kv_cache=kv_cache.joined(own, done.kv_cache)
    )


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


def follow(
    model: Model, rows: Rows, tables: BlockTables, cache: KVCache, tiles: Tiles, config: StepConfig
) -> KVCache:
    """Let the model that drafts compute K and V of these tiles, too."""
    draft = of_model(model)
    own, its = kv_cache.parted(cache, *draft.cache_sizes)
    return kv_cache.joined(own, compute(draft, rows, tables, its, tiles, config)[1])


def undrafted(tiles: Tiles, slots: DecodeSlots, drafts: Drafts) -> Tiles:
    """Return decode tiles without those whose tokens were computed to make the drafts."""
    assert slots.offset is not None
    is_done = slots.offset[: tiles.row.shape[0]] < drafts.num[tiles.row]
    return replace(tiles, end=jnp.where(is_done, 0, tiles.end))


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
