"""Checks of what a state knows of its drafts: their record, and what a model that drafts has computed."""

import jax
import numpy as np

from jaxpaged.step.state import EngineState
from reference import engine_state as reference
from reference.speculation import Drafting


def check_record(state: EngineState, row: int, record: Drafting) -> None:
    """Check a row's record against the oracle's, and what all rows' drafts have saved."""
    *mine, _, idle = (field[row].tolist() for field in jax.tree.leaves(state.rows.drafting))
    assert mine == [record.most, record.misses, record.wait, record.counts]
    assert idle == record.idle or not record.has_begun
    assert int(state.drafts.credit) == record.credit.parts


def check_followed(state: EngineState, rows: list[reference.Row | None]) -> int:
    """Check V of the sum model that drafts, which are the tokens: of blocks with a mark, and of each row's
    first tokens. Return how many blocks of rows have marks.
    """
    cache, drafting = jax.device_get((state.kv_cache, state.rows.drafting))
    num_marked = 0
    for row in rows:
        if row is None or row.phase is not reference.Phase.RUNNING:
            continue
        num_known = int(drafting.followed[row.index])
        for place, block in enumerate(row.blocks):
            if block.is_null:
                continue
            first = place * cache.block_size
            tokens = np.array(row.tokens[first : first + cache.block_size])
            its = cache.blocks["draft v"][block.block_id, :, : len(tokens), 0, 0]
            is_marked = bool(cache.followed[block.block_id])
            known = len(tokens) if is_marked else max(num_known - first, 0)
            assert not is_marked or len(tokens) == cache.block_size
            np.testing.assert_array_equal(
                its[:, :known], np.broadcast_to(tokens[:known], its[:, :known].shape)
            )
            num_marked += is_marked
    return num_marked
