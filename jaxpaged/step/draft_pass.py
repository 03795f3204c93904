"""Passes of what drafts, on its own cache, and of the served model that it drafts for.

A second model computes tokens. A head that drafts computes entries: entry p is made of the features that the
served model has left at position p, and of token p + 1. Its K and V lie in the slot of position p. Features
are written whenever the served model computes a token, so a head may compute its entries later, as a second
model may.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.memory import block_table, features, kv_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.step.config import ByModel, StepConfig
from jaxpaged.step.model import DraftedModel, Drafter, HeadDrafter, Model, TappedModel
from jaxpaged.step.plan import Tiles
from jaxpaged.step.state import Rows


def of_model(model: Model) -> Drafter | HeadDrafter:
    """Return the drafter of this model."""
    assert isinstance(model, DraftedModel)
    return model.draft


def ahead(model: Model) -> int:
    """Return how many tokens behind a position must be known before it can be computed."""
    return 1 if isinstance(of_model(model), HeadDrafter) else 0


def serve(
    model: Model,
    token_ids: Int[Array, " num_tokens"],
    positions: Int[Array, " num_tokens"],
    cache: KVCache,
    batch: PassBatch,
    config: StepConfig,
) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
    """Run the served model on its part of the cache, and leave features for a head that drafts."""
    if not isinstance(config.lookup, ByModel):
        return model(token_ids, positions, cache, batch)
    draft = of_model(model)
    served_cache, draft_cache = kv_cache.parted(cache, *draft.cache_sizes)
    if not isinstance(draft, HeadDrafter):
        hidden, served_cache = model(token_ids, positions, served_cache, batch)
        return hidden, kv_cache.joined(served_cache, draft_cache)
    assert isinstance(model, TappedModel)
    if draft.reads_last:
        batch = replace(batch, wanted=None)
    hidden, taps, served_cache = model.tapped(token_ids, positions, served_cache, batch, draft.behind)
    draft_cache, known = features.taken(draft_cache)
    slots = batch.slot_mapping if batch.grouping is None else batch.slot_mapping[0]
    known = features.write(known, slots, draft.features(hidden, taps))
    return hidden, kv_cache.joined(served_cache, features.put(draft_cache, known))


def compute(
    model: Model, rows: Rows, tables: BlockTables, cache: KVCache, tiles: Tiles, config: StepConfig
) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_tokens hidden"] | None, KVCache]:
    """Run the drafter over tiles whose tokens have slots already, on its own cache.

    Returns hidden states for `logits`, a head's own features, and the cache.
    """
    draft = of_model(model)
    row, positions, valid = tiles.places()
    slots = block_table.slot_mapping(tables, row, positions, valid).reshape(-1)
    batch = PassBatch(
        slot_mapping=slots,
        block_tables=tables.block_tables,
        query_starts=tiles.start,
        seq_lens=tiles.end,
        implementation=config.attention,
        table_rows=tables.line_of(tiles.row),
    )
    given = rows.token_ids.at[row, positions + ahead(model)].get(mode="clip")
    token_ids, places = (jnp.where(valid, x, 0).reshape(-1) for x in (given, positions))
    if not isinstance(draft, HeadDrafter):
        hidden, cache = draft(token_ids, places, cache, batch)
        return hidden, None, cache
    assert isinstance(model, TappedModel)
    cache, known = features.taken(cache)
    embedded = draft.embed(token_ids, model.rows_of)
    hidden, left, cache = draft(embedded, features.read(known, slots), places, cache, batch)
    return hidden, left, features.put(cache, known)


def hand_on(
    cache: KVCache,
    tables: BlockTables,
    left: Float[Array, "num_tiles hidden"],
    tiles: Tiles,
    drafts_now: Bool[Array, " num_tiles"],
) -> KVCache:
    """Write a head's own features of single positions to the next, where the served model's are not known."""
    cache, known = features.taken(cache)
    valid = (tiles.end > 0) & drafts_now
    slots = block_table.slot_mapping(tables, tiles.row[:, None], tiles.start[:, None] + 1, valid[:, None])
    return features.put(cache, features.write(known, slots.reshape(-1), left))


def logits(model: Model, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
    """Return the drafter's logits of the next token."""
    draft = of_model(model)
    return draft.logits(hidden, model.logits) if isinstance(draft, HeadDrafter) else draft.logits(hidden)
