"""The rings of equal content: which blocks hold a node, from the one cached first to the one cached last.

Of each block its neighbours in the ring are known, of each node the last block; behind it comes the first.
Many blocks join or leave at once, exactly as if one after the other. `prefix_cache` draws an example.
"""

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.memory.content_table import PrefixCache
from jaxpaged.memory.entries import after_reading, first_equal


def first_of(cache: PrefixCache, slot: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Return the block of each node that was cached first."""
    return cache.neighbours[cache.last[slot], 0]


def link(
    cache: PrefixCache,
    slot: Int[Array, " n"],
    block_ids: Int[Array, " n"],
    is_new: Bool[Array, " n"],
    mask: Bool[Array, " n"],
    unclaimed: Bool[Array, " n"],
) -> PrefixCache:
    """Add the masked blocks to the rings of their nodes, behind those there; empty unclaimed slots.

    A node that `is_new` has no ring yet, though its slot's `last` says that it is taken.
    """
    index = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    # Blocks rarely share a ring.
    order = lax.cond(
        jnp.any(first_equal(slot, mask=mask) != index),
        lambda: jnp.argsort(jnp.where(mask, slot, cache.num_slots), stable=True),
        lambda: index,
    )
    slot, ids, is_new, mask, unclaimed = (x[order] for x in (slot, block_ids, is_new, mask, unclaimed))
    begins = (index == 0) | (slot != jnp.roll(slot, 1)) | ~jnp.roll(mask, 1)
    ends = (index == index[-1]) | (slot != jnp.roll(slot, -1)) | ~jnp.roll(mask, -1)
    first = ids[lax.cummax(jnp.where(begins, index, 0))]
    final = ids[lax.cummin(jnp.where(ends, index, index[-1]), reverse=True)]
    old_last = cache.last[slot]
    old_first = jnp.where(is_new, first, cache.neighbours[old_last, 0])
    new_last = jnp.where(unclaimed, 0, after_reading(jnp.minimum(old_last, 0), ids))
    old_last = jnp.where(is_new, final, old_last)
    # Each block is linked to the next one. The last is linked to the first, and the first to the old last.
    before = jnp.concatenate([ids, old_last])
    after = jnp.concatenate([jnp.where(ends, old_first, jnp.roll(ids, -1)), ids])
    return replace(
        cache,
        last=cache.last.at[jnp.where((mask & ends) | unclaimed, slot, cache.num_slots)].set(
            new_last, mode="drop"
        ),
        neighbours=_joined(cache, before, after, jnp.concatenate([mask, mask & begins])),
    )


def unlink(
    cache: PrefixCache, block_ids: Int[Array, " n"], slot: Int[Array, " n"], mask: Bool[Array, " n"]
) -> PrefixCache:
    """Take the masked blocks out of the rings of their nodes; whose last block goes is dead for good."""
    target = jnp.where(mask, block_ids, cache.num_blocks)
    after, before = cache.neighbours[block_ids].T
    # Mark the blocks that leave with their index here. Then read which neighbours are marked.
    index = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    marks = cache.slot.at[target].min(PrefixCache.NO_SLOT - 1 - index, mode="drop")
    marks_around = marks[jnp.stack([block_ids, after, before])]
    gone_after, gone_before = PrefixCache.NO_SLOT - 1 - marks_around[1:]
    after = _survivor(block_ids, after, gone_after, mask)
    before = _survivor(block_ids, before, gone_before, mask)
    dies = mask & (after == block_ids)
    was_last = mask & (cache.last[slot] == block_ids)
    generation = cache.generation[slot] + 1
    return replace(
        cache,
        last=cache.last.at[jnp.where(was_last, slot, cache.num_slots)].set(
            jnp.where(dies, 0, before), mode="drop"
        ),
        generation=cache.generation.at[jnp.where(dies, slot, cache.num_slots)].set(generation, mode="drop"),
        slot=marks.at[target].set(after_reading(marks_around[0], PrefixCache.NO_SLOT), mode="drop"),
        neighbours=_joined(cache, before, after, mask & ~dies),
    )


def _survivor(
    block_ids: Int[Array, " n"], neighbour: Int[Array, " n"], gone: Int[Array, " n"], mask: Bool[Array, " n"]
) -> Int[Array, " n"]:
    """Return the nearest block in the ring that stays; the block itself if none does.

    `gone` is the index of the neighbour among the blocks that go, negative if it stays.
    """
    gone = jnp.where(mask & (neighbour != block_ids), gone, -1)
    max_rounds = block_ids.shape[0].bit_length()
    type Walk = tuple[Int[Array, ""], Int[Array, " n"], Int[Array, " n"]]

    def walk(state: Walk) -> Walk:  # each round doubles the distance
        round, neighbour, gone = state
        return (
            round + 1,
            jnp.where(gone >= 0, neighbour[gone], neighbour),
            jnp.where(gone >= 0, gone[gone], gone),
        )

    def more(state: Walk) -> Bool[Array, ""]:
        return (state[0] < max_rounds) & jnp.any(state[2] >= 0)

    _, neighbour, gone = lax.while_loop(more, walk, (jnp.int32(0), neighbour, gone))
    return jnp.where(gone >= 0, block_ids, neighbour)


def _joined(
    cache: PrefixCache, before: Int[Array, " n"], after: Int[Array, " n"], mask: Bool[Array, " n"]
) -> Int[Array, "num_blocks 2"]:
    """Return the rings' links after each masked `after` is put behind its `before`.

    One scatter: after two, XLA would copy the array.
    """
    blocks, values = jnp.concatenate([before, after]), jnp.concatenate([after, before])
    target = jnp.where(jnp.concatenate([mask, mask]), blocks, cache.num_blocks)
    side = jnp.repeat(jnp.arange(2), before.shape[0])
    return cache.neighbours.at[target, side].set(values, mode="drop")
