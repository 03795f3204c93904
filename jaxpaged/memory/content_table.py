"""The table of contents: where the node of some content is, if it is cached, and a slot for one that is not.

A hash table. Each hash has two buckets of slots, and a new node goes into the emptier. Removing a node just
empties its slot. When both buckets are full the content is not cached; as at most half of all slots are ever
used, that is rare. `prefix_cache` draws an example.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from jaxpaged.memory.entries import unbroken

# Function of a block's tokens and position: the block's term in the hash of its sequence.
HashFn = Callable[[Int[Array, "*n block_size"], Int[Array, "*n"]], UInt32[Array, "*n 2"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefixCache:
    """The nodes, by slot, and the blocks that hold them: of each node a ring of blocks, oldest first.

    What is said of a block has no meaning while its `slot` is NO_SLOT.
    """

    last: Int[Array, " num_slots"]  # the block cached last with this content; 0 for an empty slot
    generation: Int[Array, " num_slots"]  # number of nodes removed from the slot
    slot: Int[Array, " num_blocks"]  # slot of the block's node
    neighbours: Int[Array, "num_blocks 2"]  # ring links: the block cached next, the block cached before
    hash: UInt32[Array, "num_blocks 2"]  # hash of all tokens up to the block's last
    parent: Int[Array, "num_blocks 2"]  # name of the parent node; a first block has ROOT and the salt
    token_ids: Int[Array, "num_blocks block_size"]
    hash_fn: HashFn = field(metadata={"static": True})

    NO_SLOT: ClassVar[int] = -1
    ROOT: ClassVar[int] = -1
    BROKEN: ClassVar[int] = -2
    BUCKET: ClassVar[int] = 8  # slots

    @property
    def num_blocks(self) -> int:
        return self.slot.shape[0]

    @property
    def num_slots(self) -> int:
        return self.last.shape[0]

    @property
    def block_size(self) -> int:
        return self.token_ids.shape[1]


@dataclass(frozen=True)
class Entries:
    """Blocks to find or to cache, row by row: each follows its parent, the first of a row the row's tip."""

    token_ids: Int[Array, "n block_size"]
    hashes: UInt32[Array, "n 2"]  # hash of all tokens up to the block's last
    tip: Int[Array, "n 2"]  # name of the last cached node of the row
    is_first: Bool[Array, " n"]  # whether the entry is the first of its row
    mask: Bool[Array, " n"]  # whether the entry is used


def hash_block(token_ids: Int[Array, "*n block_size"], index: Int[Array, "*n"]) -> UInt32[Array, "*n 2"]:
    """Return the hash of each block: every token mixed with its position. A sequence's is their sum.

    `index` is the block's place in its sequence. A sum, so that all prefixes are hashed by one cumsum.
    """
    block_size = token_ids.shape[-1]
    position = index[..., None].astype(jnp.uint32) * block_size + jnp.arange(block_size, dtype=jnp.uint32)
    token = token_ids.astype(jnp.uint32)

    def mix(x: UInt32[Array, "*tokens"]) -> UInt32[Array, "*tokens"]:
        x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
        x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
        return x ^ (x >> 16)

    low = mix(token * jnp.uint32(0x9E3779B1) + position * jnp.uint32(0x85EBCA77))
    high = mix(token * jnp.uint32(0xC2B2AE3D) + position * jnp.uint32(0x27D4EB2F) + 1)
    return jnp.stack([low, high], axis=-1).sum(axis=-2, dtype=jnp.uint32)


def names(cache: PrefixCache, slot: Int[Array, "*n"]) -> Int[Array, "*n 2"]:
    """Return the names of the nodes in these slots: slot and generation."""
    return jnp.stack([slot, cache.generation[slot]], axis=-1)


def parents(cache: PrefixCache, entries: Entries, slot: Int[Array, " n"]) -> Int[Array, "n 2"]:
    """Return the names of the entries' parents, if `slot` is where the entries are."""
    return jnp.where(entries.is_first[:, None], entries.tip, names(cache, jnp.roll(slot, 1)))


def match(cache: PrefixCache, entries: Entries) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """Return the slot of each entry's content, and whether it and all before it in its row are there."""
    slots = _candidates(cache, entries.hashes)
    block = cache.last[slots]
    same = (block != 0) & jnp.all(cache.hash[block] == entries.hashes[:, None], axis=-1)

    def choose(among: Bool[Array, "n candidates"]) -> Int[Array, " n"]:
        return jnp.take_along_axis(slots, jnp.argmax(among, axis=1)[:, None], axis=1)[:, 0]

    # If several candidates have the tokens, their parents decide. A parent may be undecided too; each round
    # settles at least one more entry of every row.
    def decide() -> Int[Array, " n"]:
        equal = same & jnp.all(cache.token_ids[block] == entries.token_ids[:, None], axis=-1)
        parent = cache.parent[block]
        type Choice = tuple[Int[Array, " n"], Int[Array, " n"]]

        def refine(choice: Choice) -> Choice:
            slot, _ = choice
            among = equal & jnp.all(parent == parents(cache, entries, slot)[:, None], axis=-1)
            return jnp.where(jnp.any(among, axis=1), choose(among), slot), slot

        start = refine((choose(equal), choose(equal)))
        return lax.while_loop(lambda choice: jnp.any(choice[0] != choice[1]), refine, start)[0]

    # There is rarely more than one candidate. Its hash, tokens and parent decide whether it matches.
    slot = lax.cond(jnp.any(jnp.sum(same, axis=1) > 1), decide, lambda: choose(same))
    block = cache.last[slot]
    right = (block != 0) & jnp.all(cache.hash[block] == entries.hashes, axis=1)
    right &= jnp.all(cache.token_ids[block] == entries.token_ids, axis=1)
    right &= jnp.all(cache.parent[block] == parents(cache, entries, slot), axis=1)
    return slot, unbroken(entries.mask & right, entries.is_first)


def claim(
    cache: PrefixCache, block_ids: Int[Array, " n"], hashes: UInt32[Array, "n 2"], mask: Bool[Array, " n"]
) -> tuple[Int[Array, " num_slots"], Int[Array, " n"]]:
    """Give each masked entry a slot of its own, in the emptier of its buckets; NO_SLOT where both are full.

    No two masked entries name the same block: as the slot's `last`, its id marks the slot as taken.
    Returns: the new `last`, and the slots.
    """
    slots = _candidates(cache, hashes)
    second = jnp.arange(slots.shape[1]) >= PrefixCache.BUCKET
    type Claims = tuple[Int[Array, " num_slots"], Int[Array, " n"], Bool[Array, " n"]]

    def attempt(claims: Claims) -> Claims:
        last, slot, pending = claims
        empty = last[slots] == 0
        to_second = jnp.sum(empty & second, axis=1) > jnp.sum(empty & ~second, axis=1)
        choice = jnp.argmax(jnp.where(empty, 1 + (second == to_second[:, None]), 0), axis=1)
        wanted = jnp.take_along_axis(slots, choice[:, None], axis=1)[:, 0]
        pending &= jnp.any(empty, axis=1)
        # If two entries want one slot, the higher block id gets it. The other entry tries again.
        last = last.at[jnp.where(pending, wanted, last.shape[0])].max(block_ids, mode="drop")
        wins = pending & (last[wanted] == block_ids)
        return last, jnp.where(wins, wanted, slot), pending & ~wins

    nowhere = jnp.full(block_ids.shape, PrefixCache.NO_SLOT, jnp.int32)
    last, slot, _ = lax.while_loop(lambda claims: jnp.any(claims[2]), attempt, (cache.last, nowhere, mask))
    return last, slot


def _candidates(cache: PrefixCache, hashes: UInt32[Array, "n 2"]) -> Int[Array, "n candidates"]:
    """Return the slots of each hash's two buckets."""
    num_buckets = cache.num_slots // PrefixCache.BUCKET
    bucket = (hashes % num_buckets).astype(jnp.int32) * PrefixCache.BUCKET
    slots = bucket[:, :, None] + jnp.arange(PrefixCache.BUCKET, dtype=jnp.int32)
    return slots.reshape(hashes.shape[0], -1)
