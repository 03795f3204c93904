"""Changes of what a prefix cache holds, since they were last told: for who follows it from outside.

A slot of the table of contents has changed if another node is in it, or none any more. Changes are told in
reports of a fixed size; what does not fit is told by the next.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.memory.content_table import PrefixCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Told:
    """Record of what was told so far: which slots hold a node, and of which generation."""

    is_there: Bool[Array, " num_slots"]
    generation: Int[Array, " num_slots"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Changes:
    """Slots that have changed, the first `count` of them; what is beyond is undefined."""

    num_changed: Int[Array, ""]  # in all, more perhaps than there is room for
    slot: Int[Array, " n"]
    generation: Int[Array, " n"]
    is_there: Bool[Array, " n"]  # whether the slot holds a node: the rest tells of it
    parent: Int[Array, "n 2"]  # its parent's name; of a first block ROOT and the salt
    token_ids: Int[Array, "n block_size"]


def nothing(cache: PrefixCache) -> Told:
    """Return what was told before the first report."""
    return Told(jnp.zeros(cache.num_slots, bool), jnp.zeros(cache.num_slots, jnp.int32))


def changes(cache: PrefixCache, reported: Told, max_changes: int) -> tuple[Told, Changes]:
    """Tell at most so many changes, those of the lowest slots. Costs O(num_slots)."""
    is_there = cache.last != 0
    changed = (is_there != reported.is_there) | (is_there & (cache.generation != reported.generation))
    (slot,) = jnp.nonzero(changed, size=min(max_changes, cache.num_slots), fill_value=cache.num_slots)
    slot = slot.astype(jnp.int32)
    generation = cache.generation.at[slot].get(mode="clip")
    is_present = is_there.at[slot].get(mode="clip")
    block = cache.last.at[slot].get(mode="clip")
    reported = Told(
        reported.is_there.at[slot].set(is_present, mode="drop"),
        reported.generation.at[slot].set(generation, mode="drop"),
    )
    new_changes = Changes(
        num_changed=jnp.sum(changed, dtype=jnp.int32),
        slot=slot,
        generation=generation,
        is_there=is_present,
        parent=cache.parent[block],
        token_ids=cache.token_ids[block],
    )
    return reported, new_changes
