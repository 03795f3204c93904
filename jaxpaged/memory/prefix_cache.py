"""Exact prefix caching: a full block is found again by its tokens, everything before them, and a salt.

All blocks with the same content are one node. A node has a slot in a hash table, and is named by the slot
and its generation, which goes up when the last block with that content is evicted: so a name is never used
for something else. A node is identified by its parent's name (or the salt, if it is the first) and its
tokens. The hash of all tokens so far only finds candidates; parent and tokens, which are stored, decide. So
neither a collision nor a parent that was evicted and replaced can lead to someone else's content: the
children of an evicted parent are never found again, even if the parent's content returns. (vLLM, which
believes the hash, would find them.)

Each hash has two buckets of slots, and a new node goes into the emptier. Removing just empties a slot. When
both buckets are full the content is not cached; as at most half of all slots are ever used, that is rare.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory.entries import first_equal, unbroken

# What a block adds to the hash of its sequence: from its tokens and its place in the sequence.
HashFn = Callable[[Int[Array, "*n block_size"], Int[Array, "*n"]], UInt32[Array, "*n 2"]]


def hash_block(token_ids: Int[Array, "*n block_size"], index: Int[Array, "*n"]) -> UInt32[Array, "*n 2"]:
    """The hash of a sequence is the sum of these over its blocks: every token mixed with its position.

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefixCache:
    """The nodes, by slot, and the blocks that hold them: of each node a ring of blocks, oldest first.

    What is said of a block has no meaning while its `slot` is NO_SLOT.
    """

    last: Int[Array, " num_slots"]  # the block cached last with this content; 0 for an empty slot
    generation: Int[Array, " num_slots"]  # nodes that have died here
    slot: Int[Array, " num_blocks"]  # where the block's node is
    neighbours: Int[Array, "num_blocks 2"]  # in the ring: the block cached after, the block cached before
    hash: UInt32[Array, "num_blocks 2"]  # of all tokens up to the block's last
    parent: Int[Array, "num_blocks 2"]  # slot and generation; of a sequence's first block: ROOT and the salt
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chain:
    """How far sequences are cached: the node of the last cached block, to which the next one is attached."""

    fields: Int[Array, "*rows 6"]  # in the order of `of`; one array, for each costs time in every call

    @classmethod
    def of(
        cls,
        *,
        salt: Int[Array, "*rows"],
        num_blocks: Int[Array, "*rows"],
        slot: Int[Array, "*rows"],
        generation: Int[Array, "*rows"],
        hash: UInt32[Array, "*rows 2"],
    ) -> "Chain":
        columns = jnp.stack([salt, num_blocks, slot, generation], axis=-1)
        return cls(jnp.concatenate([columns, hash.astype(jnp.int32)], axis=-1))

    @property
    def salt(self) -> Int[Array, "*rows"]:
        """Sequences share blocks only if their salts are equal."""
        return self.fields[..., 0]

    @property
    def num_blocks(self) -> Int[Array, "*rows"]:
        """Blocks cached, or passed over because the chain is broken."""
        return self.fields[..., 1]

    @property
    def slot(self) -> Int[Array, "*rows"]:
        """ROOT before the first block; BROKEN if no further block can be cached."""
        return self.fields[..., 2]

    @property
    def generation(self) -> Int[Array, "*rows"]:
        return self.fields[..., 3]

    @property
    def hash(self) -> UInt32[Array, "*rows 2"]:
        """Of all tokens so far."""
        return self.fields[..., 4:].astype(jnp.uint32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hit:
    """The longest cached beginning of a prompt. `chain.num_blocks` is its length."""

    block_ids: Int[Array, " max_blocks"]  # 0 beyond the hit
    chain: Chain


def create(num_blocks: int, block_size: int, hash_fn: HashFn = hash_block) -> PrefixCache:
    """An empty cache for the blocks of one pool. `hash_fn` may be anything: it decides speed only."""
    if block_size < 1:
        raise ValueError(f"{block_size=} must be at least 1")
    num_buckets = cdiv(2 * num_blocks, PrefixCache.BUCKET)
    num_slots = num_buckets * PrefixCache.BUCKET

    def zeros(*shape: int) -> Int[Array, "*shape"]:
        return jnp.zeros(shape, jnp.int32)

    return PrefixCache(
        last=zeros(num_slots),
        generation=zeros(num_slots),
        slot=jnp.full(num_blocks, PrefixCache.NO_SLOT, jnp.int32),
        neighbours=zeros(num_blocks, 2),
        hash=jnp.zeros((num_blocks, 2), jnp.uint32),
        parent=zeros(num_blocks, 2),
        token_ids=zeros(num_blocks, block_size),
        hash_fn=hash_fn,
    )


def root(cache: PrefixCache | None, salt: Int[Array, "*rows"]) -> Chain:
    """Sequences of which nothing is cached."""
    salt = salt.astype(jnp.int32)
    if cache is None:
        hashed = jnp.zeros((*salt.shape, 2), jnp.uint32)
    else:
        token_ids = jnp.broadcast_to(salt[..., None], (*salt.shape, cache.block_size))
        hashed = cache.hash_fn(token_ids, jnp.full_like(salt, -1))
    return Chain.of(
        salt=salt,
        num_blocks=jnp.zeros_like(salt),
        slot=jnp.full_like(salt, PrefixCache.ROOT),
        generation=salt,
        hash=hashed,
    )


def has_content(cache: PrefixCache, block_ids: Int[Array, "*n"]) -> Bool[Array, "*n"]:
    return cache.slot[block_ids] != PrefixCache.NO_SLOT


def lookup(
    cache: PrefixCache,
    token_ids: Int[Array, " max_tokens"],
    num_tokens: Int[Array, ""],
    salt: Int[Array, ""],
) -> Hit:
    """Find the longest cached beginning of a prompt, leaving at least one token to compute.

    Costs O(max_tokens), whatever the pool is. Takes nothing: touch the blocks before any other is allocated.
    """
    block_size = cache.block_size
    max_blocks = max((token_ids.shape[0] - 1) // block_size, 0)
    blocks = token_ids[: max_blocks * block_size].reshape(max_blocks, block_size)
    start = root(cache, salt)
    if max_blocks == 0:
        return Hit(jnp.zeros(0, jnp.int32), start)
    index = jnp.arange(max_blocks, dtype=jnp.int32)
    hashes = start.hash + jnp.cumsum(cache.hash_fn(blocks, index), axis=0, dtype=jnp.uint32)
    mask = (index + 1) * block_size < num_tokens

    def fill(value: Int[Array, ""]) -> Int[Array, " max_blocks"]:
        return jnp.full(max_blocks, value)

    slot, hit = _match(cache, blocks, hashes, fill(start.slot), fill(start.generation), index == 0, mask)
    num_hits = jnp.sum(hit, dtype=jnp.int32)
    end = jnp.maximum(num_hits - 1, 0)
    reached = Chain.of(
        salt=start.salt,
        num_blocks=num_hits,
        slot=slot[end],
        generation=cache.generation[slot[end]],
        hash=hashes[end],
    )
    return Hit(
        block_ids=jnp.where(hit, cache.neighbours[cache.last[slot], 0], 0),
        chain=where(num_hits > 0, reached, start),
    )


def insert(
    cache: PrefixCache,
    chain: Chain,
    counts: Int[Array, " rows"],
    row: Int[Array, " n"],
    block_ids: Int[Array, " n"],
    token_ids: Int[Array, "n block_size"],
) -> tuple[PrefixCache, Chain]:
    """Make full blocks findable, as if one after the other: `counts[r]` more of each row r, in order.

    The entries of row 0 come first, those beyond the sum of `counts` are ignored. A block that has content
    already keeps it. If a block cannot be cached (its buckets are full, its content disagrees, it is the null
    block) its row's chain is broken there and nothing more of it is cached: that is no error.
    """
    if block_ids.shape[0] == 0:
        return cache, chain
    return lax.cond(
        jnp.any(counts > 0),
        _insert,
        lambda cache, chain, *_: (cache, chain),
        cache,
        chain,
        counts,
        row,
        block_ids,
        token_ids,
    )


def _insert(
    cache: PrefixCache,
    chain: Chain,
    counts: Int[Array, " rows"],
    row: Int[Array, " n"],
    block_ids: Int[Array, " n"],
    token_ids: Int[Array, "n block_size"],
) -> tuple[PrefixCache, Chain]:
    num_entries = block_ids.shape[0]
    index = jnp.arange(num_entries, dtype=jnp.int32)
    end = jnp.cumsum(counts, dtype=jnp.int32)
    mask = index < end[-1]
    start = (end - counts)[row]
    is_first = index == start
    place = chain.num_blocks[row] + index - start
    added = jnp.cumsum(jnp.where(mask[:, None], cache.hash_fn(token_ids, place), 0), axis=0, dtype=jnp.uint32)
    before = jnp.where(start[:, None] > 0, added[start - 1], 0)
    hashes = chain.hash[row] + added - before
    tip_slot, tip_generation = chain.slot[row], chain.generation[row]

    # What is there already is a beginning of each row, for a parent not cached has no cached children.
    slot, hit = _match(cache, token_ids, hashes, tip_slot, tip_generation, is_first, mask)
    is_new = mask & ~hit
    leads = is_new & (is_first | jnp.roll(hit, 1))  # the first new one of its row
    base = lax.cummax(jnp.where(leads, index, 0))
    base_slot = jnp.where(is_first, tip_slot, jnp.roll(slot, 1))[base]
    base_generation = jnp.where(is_first, tip_generation, cache.generation[jnp.roll(slot, 1)])[base]

    # A block can have one content only, and joins a ring once.
    is_block = mask & (block_ids != 0) & (tip_slot != PrefixCache.BROKEN)
    old = cache.slot[block_ids]
    naming = first_equal(block_ids, mask=is_block)
    links = is_block & (naming == index) & (old == PrefixCache.NO_SLOT)

    # The same content may be new in several rows: the first block to have it leads, later ones join it.
    same = first_equal(hashes[:, 0], hashes[:, 1], base_slot, base_generation, mask=is_new)
    leader = jnp.full_like(index, num_entries).at[same].min(jnp.where(links, index, num_entries))[same]
    claims = is_new & (leader == index)
    last, new_slot = _claim(cache, block_ids, hashes, claims)
    joined = jnp.where(leads, -1, jnp.roll(leader, 1))
    slot = jnp.where(is_new, new_slot[leader], slot)
    joins = (leader <= index) & jnp.all(token_ids == token_ids[leader], axis=1) & (joined == joined[leader])
    agrees = hit | (is_new & joins & (slot != PrefixCache.NO_SLOT))
    agrees &= ((old == PrefixCache.NO_SLOT) | (old == slot)) & (slot[naming] == slot)

    # What does not agree breaks its row, and every row that would have joined it there.
    whole = unbroken(agrees, is_first)
    cached = mask & unbroken(whole & (hit | whole[leader]), is_first)
    links &= cached
    unclaimed = claims & ~cached & (new_slot != PrefixCache.NO_SLOT)
    parent = jnp.stack(
        [
            jnp.where(is_first, tip_slot, jnp.roll(slot, 1)),
            jnp.where(is_first, tip_generation, cache.generation[jnp.roll(slot, 1)]),
        ],
        axis=-1,
    )
    target = jnp.where(links, block_ids, cache.num_blocks)
    cache = replace(
        cache,
        last=last,
        slot=cache.slot.at[target].set(slot, mode="drop"),
        hash=cache.hash.at[target].set(hashes, mode="drop"),
        parent=cache.parent.at[target].set(parent, mode="drop"),
        token_ids=cache.token_ids.at[target].set(token_ids, mode="drop"),
    )
    cache = _link(cache, jnp.where(unclaimed, new_slot, slot), block_ids, is_new, links, unclaimed)

    grows = counts > 0
    at = jnp.maximum(end - 1, 0)
    whole_row = cached[at] & grows
    return cache, Chain.of(
        salt=chain.salt,
        num_blocks=chain.num_blocks + counts,
        slot=jnp.where(grows, jnp.where(whole_row, slot[at], PrefixCache.BROKEN), chain.slot),
        generation=jnp.where(whole_row, cache.generation[slot[at]], chain.generation),
        hash=jnp.where(whole_row[:, None], hashes[at], chain.hash),
    )


def remove(cache: PrefixCache, block_ids: Int[Array, " n"], mask: Bool[Array, " n"]) -> PrefixCache:
    """Forget the content of the masked blocks; a node whose last block goes is dead for good."""
    slot = cache.slot[block_ids]  # read before the branch: in it, XLA would copy the array it writes to
    mask = mask & (slot != PrefixCache.NO_SLOT)
    return lax.cond(jnp.any(mask), _remove, lambda cache, *_: cache, cache, block_ids, slot, mask)


def _remove(
    cache: PrefixCache, block_ids: Int[Array, " n"], slot: Int[Array, " n"], mask: Bool[Array, " n"]
) -> PrefixCache:
    target = jnp.where(mask, block_ids, cache.num_blocks)
    after, before = cache.neighbours[block_ids].T
    # Mark the blocks that go with their index here, and see which neighbours are marked.
    index = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    marks = cache.slot.at[target].min(PrefixCache.NO_SLOT - 1 - index, mode="drop")
    found = marks[jnp.stack([block_ids, after, before])]
    gone_after, gone_before = PrefixCache.NO_SLOT - 1 - found[1:]
    after = _survivor(block_ids, after, gone_after, mask)
    before = _survivor(block_ids, before, gone_before, mask)
    dies = mask & (after == block_ids)
    lives = mask & ~dies
    was_last = mask & (cache.last[slot] == block_ids)
    generation = cache.generation[slot] + 1
    return replace(
        cache,
        last=cache.last.at[jnp.where(was_last, slot, cache.num_slots)].set(
            jnp.where(dies, 0, before), mode="drop"
        ),
        generation=cache.generation.at[jnp.where(dies, slot, cache.num_slots)].set(generation, mode="drop"),
        # Always NO_SLOT; said like this, XLA reads before it writes instead of copying the whole array.
        slot=marks.at[target].set(jnp.maximum(found[0], PrefixCache.NO_SLOT), mode="drop"),
        neighbours=_set_neighbours(cache, (before, after, lives), (after, before, lives)),
    )


def clear(cache: PrefixCache) -> PrefixCache:
    """Forget everything. Costs O(num_blocks)."""
    return replace(
        cache,
        last=jnp.zeros_like(cache.last),
        generation=cache.generation + (cache.last != 0),
        slot=jnp.full_like(cache.slot, PrefixCache.NO_SLOT),
    )


def rewind(
    cache: PrefixCache,
    chain: Chain,
    num_blocks: Int[Array, " rows"],
    last_block_ids: Int[Array, " rows"],
) -> Chain:
    """The chains of rows shortened to `num_blocks` full blocks, the last of them `last_block_ids`."""
    at_root = root(cache, chain.salt)
    slot = cache.slot[last_block_ids]
    inside = Chain.of(
        salt=chain.salt,
        num_blocks=num_blocks,
        slot=jnp.where(slot == PrefixCache.NO_SLOT, PrefixCache.BROKEN, slot),
        generation=cache.generation[slot],
        hash=cache.hash[last_block_ids],
    )
    shorter = where(num_blocks == 0, at_root, inside)
    return where(num_blocks < chain.num_blocks, shorter, chain)


def where(rows: Bool[Array, "*rows"], then: Chain, otherwise: Chain) -> Chain:
    return Chain(jnp.where(rows[..., None], then.fields, otherwise.fields))


def _candidates(cache: PrefixCache, hashes: UInt32[Array, "n 2"]) -> Int[Array, "n candidates"]:
    """The slots of each hash's two buckets."""
    num_buckets = cache.num_slots // PrefixCache.BUCKET
    bucket = (hashes % num_buckets).astype(jnp.int32) * PrefixCache.BUCKET
    slots = bucket[:, :, None] + jnp.arange(PrefixCache.BUCKET, dtype=jnp.int32)
    return slots.reshape(hashes.shape[0], -1)


def _match(
    cache: PrefixCache,
    token_ids: Int[Array, "n block_size"],
    hashes: UInt32[Array, "n 2"],
    tip_slot: Int[Array, " n"],
    tip_generation: Int[Array, " n"],
    is_first: Bool[Array, " n"],
    mask: Bool[Array, " n"],
) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """The slot of each entry's content, and whether it is there with everything before it, entry by entry.

    Entries follow their parents; where `is_first`, the parent is the tip.
    """
    slots = _candidates(cache, hashes)
    block = cache.last[slots]
    same = (block != 0) & jnp.all(cache.hash[block] == hashes[:, None], axis=-1)

    def parents(slot: Int[Array, " n"]) -> Int[Array, "n 2"]:
        """What the entries' parents are, if `slot` is where the entries are."""
        before = jnp.roll(slot, 1)
        generation = jnp.where(is_first, tip_generation, cache.generation[before])
        return jnp.stack([jnp.where(is_first, tip_slot, before), generation], axis=-1)

    def choose(among: Bool[Array, "n candidates"]) -> Int[Array, " n"]:
        return jnp.take_along_axis(slots, jnp.argmax(among, axis=1)[:, None], axis=1)[:, 0]

    # Where several have the tokens, the parents decide, and a parent may itself be undecided: each round
    # settles at least one more entry of every row.
    def decide() -> Int[Array, " n"]:
        equal = same & jnp.all(cache.token_ids[block] == token_ids[:, None], axis=-1)
        parent = cache.parent[block]
        type Choice = tuple[Int[Array, " n"], Int[Array, " n"]]

        def refine(choice: Choice) -> Choice:
            slot, _ = choice
            among = equal & jnp.all(parent == parents(slot)[:, None], axis=-1)
            return jnp.where(jnp.any(among, axis=1), choose(among), slot), slot

        first = choose(equal)
        return lax.while_loop(lambda choice: jnp.any(choice[0] != choice[1]), refine, refine((first, first)))[
            0
        ]

    # Nearly always there is one candidate at most. Its hash, tokens and parent decide if it is right.
    slot = lax.cond(jnp.any(jnp.sum(same, axis=1) > 1), decide, lambda: choose(same))
    block = cache.last[slot]
    right = (block != 0) & jnp.all(cache.hash[block] == hashes, axis=1)
    right &= jnp.all(cache.token_ids[block] == token_ids, axis=1)
    right &= jnp.all(cache.parent[block] == parents(slot), axis=1)
    return slot, unbroken(mask & right, is_first)


def _survivor(
    block_ids: Int[Array, " n"],
    neighbour: Int[Array, " n"],
    gone: Int[Array, " n"],
    mask: Bool[Array, " n"],
) -> Int[Array, " n"]:
    """The nearest block in the ring that stays; the block itself if none does.

    `gone` is the index of the neighbour among the blocks that go, negative if it stays.
    """
    gone = jnp.where(mask & (neighbour != block_ids), gone, -1)
    max_rounds = block_ids.shape[0].bit_length()
    type Walk = tuple[Int[Array, ""], Int[Array, " n"], Int[Array, " n"]]

    def walk(state: Walk) -> Walk:  # each round doubles the distance looked at
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


def _claim(
    cache: PrefixCache,
    block_ids: Int[Array, " n"],
    hashes: UInt32[Array, "n 2"],
    mask: Bool[Array, " n"],
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
        # Two entries may want one slot: the higher block gets it, and the other tries again.
        last = last.at[jnp.where(pending, wanted, last.shape[0])].max(block_ids, mode="drop")
        wins = pending & (last[wanted] == block_ids)
        return last, jnp.where(wins, wanted, slot), pending & ~wins

    nowhere = jnp.full(block_ids.shape, PrefixCache.NO_SLOT, jnp.int32)
    last, slot, _ = lax.while_loop(lambda claims: jnp.any(claims[2]), attempt, (cache.last, nowhere, mask))
    return last, slot


def _link(
    cache: PrefixCache,
    slot: Int[Array, " n"],
    block_ids: Int[Array, " n"],
    is_new: Bool[Array, " n"],
    mask: Bool[Array, " n"],
    unclaimed: Bool[Array, " n"],
) -> PrefixCache:
    """Add the masked blocks to the rings of their nodes, behind those there; empty unclaimed slots."""
    index = jnp.arange(block_ids.shape[0], dtype=jnp.int32)
    # Nearly always every block has a ring of its own.
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
    # Always `ids`; said like this, XLA reads before it writes instead of copying the whole array.
    new_last = jnp.where(unclaimed, 0, jnp.maximum(ids, jnp.minimum(old_last, 0)))
    old_last = jnp.where(is_new, final, old_last)
    after = jnp.where(ends, old_first, jnp.roll(ids, -1))
    before = jnp.where(begins, old_last, jnp.roll(ids, 1))
    return replace(
        cache,
        last=cache.last.at[jnp.where((mask & ends) | unclaimed, slot, cache.num_slots)].set(
            new_last, mode="drop"
        ),
        neighbours=_set_neighbours(
            cache,
            (
                jnp.concatenate([ids, old_last]),
                jnp.concatenate([after, ids]),
                jnp.concatenate([mask, mask & begins]),
            ),
            (
                jnp.concatenate([ids, old_first]),
                jnp.concatenate([before, ids]),
                jnp.concatenate([mask, mask & ends]),
            ),
        ),
    )


def _set_neighbours(
    cache: PrefixCache,
    after: tuple[Int[Array, " n"], Int[Array, " n"], Bool[Array, " n"]],
    before: tuple[Int[Array, " n"], Int[Array, " n"], Bool[Array, " n"]],
) -> Int[Array, "num_blocks 2"]:
    """The neighbours with some changed: (blocks, who comes after them, mask), (blocks, who before, mask).

    One scatter: after two, XLA would copy the array.
    """
    blocks, values, mask = (jnp.concatenate(pair) for pair in zip(after, before, strict=True))
    side = jnp.repeat(jnp.arange(2), after[0].shape[0])
    return cache.neighbours.at[jnp.where(mask, blocks, cache.num_blocks), side].set(values, mode="drop")
