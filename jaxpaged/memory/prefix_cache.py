"""Exact prefix caching: a full block is found again by its tokens, everything before them, and a salt.

All blocks with the same content are one node. A node has a slot in a hash table (`content_table`) and a ring
of blocks (`content_rings`). It is named by the slot and its generation, which goes up when the last block
with that content is evicted: so a name is never used for something else. It is identified by its parent's
name (or the salt, if it is the first) and its tokens. The hash of all tokens so far only finds candidates;
parent and tokens, which are stored, decide. So neither a collision nor a parent that was evicted and replaced
can lead to someone else's content: the children of an evicted parent are never found again, even if the
parent's content returns. (vLLM, which believes the hash, would find them.)

An example: two rows that were computed side by side, with A, B, C and D for the tokens of a block.

    row 0:  A B C  in blocks 1 2 3            A --- B --- C
    row 1:  A B D  in blocks 4 5 6                   `--- D

    node         A            B          C         D
    slot         41           7          12        30        in one of the two buckets of its hash
    generation   0            2          0         0         nodes that have died in this slot
    parent       ROOT, salt   41, 0      7, 2      7, 2
    ring         1 -> 4       2 -> 5     3         6         the first comes behind the last again
    last         4            5          3         6

Row 0's chain ends at the name (12, 0): the row's next block will have it for its parent. Looking up A B D E
finds the first blocks of three rings: 1, 2, 6. When block 1 is taken for something else, 4 alone holds A, and
the same look-up finds 4, 2, 6. When 4 goes too, A is dead: slot 41 is empty, and in generation 1. B, C and D
are still there, but nothing leads to them any more, for a new A has another name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory import content_rings, content_table
from jaxpaged.memory.content_table import Entries, HashFn, PrefixCache, hash_block, names, parents
from jaxpaged.memory.entries import CHUNK, first_equal, unbroken


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chain:
    """The ends of sequences' cached prefixes: for each the node of its last cached block."""

    fields: Int[Array, "*rows 6"]  # in the order of `of`; one array costs less time per call

    @classmethod
    def of(
        cls,
        *,
        salt: Int[Array, "*rows"],
        num_blocks: Int[Array, "*rows"],
        tip: Int[Array, "*rows 2"],
        hash: UInt32[Array, "*rows 2"],
    ) -> "Chain":
        return cls(
            jnp.concatenate([salt[..., None], num_blocks[..., None], tip, hash.astype(jnp.int32)], axis=-1)
        )

    @property
    def salt(self) -> Int[Array, "*rows"]:
        """Sequences share blocks only if their salts are equal."""
        return self.fields[..., 0]

    @property
    def num_blocks(self) -> Int[Array, "*rows"]:
        """Blocks cached, or passed over because the chain is broken."""
        return self.fields[..., 1]

    @property
    def tip(self) -> Int[Array, "*rows 2"]:
        """The name of the last cached block's node; before the first block ROOT and the salt."""
        return self.fields[..., 2:4]

    @property
    def slot(self) -> Int[Array, "*rows"]:
        """The tip's slot; BROKEN if no further block can be cached."""
        return self.fields[..., 2]

    @property
    def hash(self) -> UInt32[Array, "*rows 2"]:
        """Return the hash of all tokens so far."""
        return self.fields[..., 4:].astype(jnp.uint32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hit:
    """The longest cached beginning of a prompt. `chain.num_blocks` is its length."""

    block_ids: Int[Array, "*groups max_blocks"]  # 0 beyond the hit; of all groups by `group_content.lookup`
    chain: Chain


def create(num_blocks: int, block_size: int, hash_fn: HashFn = hash_block) -> PrefixCache:
    """Make an empty cache for the blocks of one pool. `hash_fn` may be anything: it decides speed only."""
    if block_size < 1:
        raise ValueError(f"{block_size=} must be at least 1")
    num_slots = cdiv(2 * num_blocks, PrefixCache.BUCKET) * PrefixCache.BUCKET

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
    """Return the chains of sequences of which nothing is cached."""
    salt = salt.astype(jnp.int32)
    if cache is None:
        hashed = jnp.zeros((*salt.shape, 2), jnp.uint32)
    else:
        token_ids = jnp.broadcast_to(salt[..., None], (*salt.shape, cache.block_size))
        hashed = cache.hash_fn(token_ids, jnp.full_like(salt, -1))
    tip = jnp.stack([jnp.full_like(salt, PrefixCache.ROOT), salt], axis=-1)
    return Chain.of(salt=salt, num_blocks=jnp.zeros_like(salt), tip=tip, hash=hashed)


def has_content(cache: PrefixCache, block_ids: Int[Array, "*n"]) -> Bool[Array, "*n"]:
    return cache.slot[block_ids] != PrefixCache.NO_SLOT


def lookup(
    cache: PrefixCache,
    tokens_at: Callable[[Int[Array, "n block_size"]], Int[Array, "n block_size"]],
    num_tokens: Int[Array, ""],
    salt: Int[Array, ""],
    *,
    max_tokens: int,
) -> Hit:
    """Find the longest cached beginning of a prompt, leaving at least one token to compute.

    `tokens_at` is asked for the prompt's tokens by position, chunk by chunk, as far as they are found: costs
    what is hit, whatever the pool and `max_tokens` (static, of any prompt) are. Takes nothing: touch the
    blocks before any other is allocated.
    """
    block_size = cache.block_size
    max_blocks = max((max_tokens - 1) // block_size, 0)
    size = min(CHUNK, max_blocks)
    start = root(cache, salt)
    if size == 0:
        return Hit(jnp.zeros(0, jnp.int32), start)
    place = jnp.arange(size, dtype=jnp.int32)
    type Walk = tuple[Int[Array, " max_blocks"], Chain, Bool[Array, ""]]

    def goes_on(walk: Walk) -> Bool[Array, ""]:
        _, reached, all_hit = walk
        return all_hit & ((reached.num_blocks + 1) * block_size < num_tokens)

    def look(walk: Walk) -> Walk:
        block_ids, reached, _ = walk
        index = reached.num_blocks + place
        token_ids = tokens_at(index[:, None] * block_size + jnp.arange(block_size, dtype=jnp.int32))
        added = jnp.cumsum(cache.hash_fn(token_ids, index), axis=0, dtype=jnp.uint32)
        chunk = Entries(
            token_ids=token_ids,
            hashes=reached.hash + added,
            tip=jnp.broadcast_to(reached.tip, (size, 2)),
            is_first=place == 0,
            mask=(index + 1) * block_size < num_tokens,
        )
        slot, hit = content_table.match(cache, chunk)
        num_hits = jnp.sum(hit, dtype=jnp.int32)
        end = jnp.maximum(num_hits - 1, 0)
        further = Chain.of(
            salt=reached.salt,
            num_blocks=reached.num_blocks + num_hits,
            tip=names(cache, slot[end]),
            hash=chunk.hashes[end],
        )
        target = jnp.where(hit, index, max_blocks)
        block_ids = block_ids.at[target].set(content_rings.first_of(cache, slot), mode="drop")
        return block_ids, where(num_hits > 0, further, reached), num_hits == size

    walk = (jnp.zeros(max_blocks, jnp.int32), start, jnp.bool_(True))
    block_ids, reached, _ = lax.while_loop(goes_on, look, walk)
    return Hit(block_ids, reached)


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
        lambda: _insert(cache, chain, counts, row, block_ids, token_ids),
        lambda: (cache, chain),
    )


def _insert(
    cache: PrefixCache,
    chain: Chain,
    counts: Int[Array, " rows"],
    row: Int[Array, " n"],
    block_ids: Int[Array, " n"],
    token_ids: Int[Array, "n block_size"],
) -> tuple[PrefixCache, Chain]:
    """Insert all entries at once: match, hold, lead, agree, write."""
    entries = _entries(cache, chain, counts, row, token_ids)
    index = jnp.arange(block_ids.shape[0], dtype=jnp.int32)

    # Match: existing content is a prefix of each row, because an uncached parent has no cached children.
    slot, is_there = content_table.match(cache, entries)
    is_new = entries.mask & ~is_there

    # Hold: a block has one content at most. It joins a ring once, at its first entry.
    old = cache.slot[block_ids]
    is_block = entries.mask & (block_ids != 0) & (entries.tip[:, 0] != PrefixCache.BROKEN)
    naming = first_equal(block_ids, mask=is_block)
    links = is_block & (naming == index) & (old == PrefixCache.NO_SLOT)

    # Lead: content may be new in several rows. Its first block claims a slot for all of them.
    leader, follows = _leaders(cache, entries, slot, is_new, links)
    claims = is_new & (leader == index)
    last, claimed = content_table.claim(cache, block_ids, entries.hashes, claims)
    slot = jnp.where(is_new, claimed[leader], slot)

    # Agree: an entry that differs ends its row there, and every row that would have joined it.
    agrees = is_there | (is_new & follows & (slot != PrefixCache.NO_SLOT))
    agrees &= ((old == PrefixCache.NO_SLOT) | (old == slot)) & (slot[naming] == slot)
    whole = unbroken(agrees, entries.is_first)
    cached = entries.mask & unbroken(whole & (is_there | whole[leader]), entries.is_first)

    # Write: cached blocks join the end of their node's ring. Slots claimed in vain are released.
    links &= cached
    unclaimed = claims & ~cached & (claimed != PrefixCache.NO_SLOT)
    target = jnp.where(links, block_ids, cache.num_blocks)
    cache = replace(
        cache,
        last=last,
        slot=cache.slot.at[target].set(slot, mode="drop"),
        hash=cache.hash.at[target].set(entries.hashes, mode="drop"),
        parent=cache.parent.at[target].set(parents(cache, entries, slot), mode="drop"),
        token_ids=cache.token_ids.at[target].set(token_ids, mode="drop"),
    )
    ring = jnp.where(unclaimed, claimed, slot)
    cache = content_rings.link(cache, ring, block_ids, is_new, links, unclaimed)
    return cache, _grown(cache, chain, counts, entries, slot, cached)


def _entries(
    cache: PrefixCache,
    chain: Chain,
    counts: Int[Array, " rows"],
    row: Int[Array, " n"],
    token_ids: Int[Array, "n block_size"],
) -> Entries:
    """Return the entries of the blocks that go behind the chains, `counts[r]` of them behind chain r."""
    index = jnp.arange(row.shape[0], dtype=jnp.int32)
    end = jnp.cumsum(counts, dtype=jnp.int32)
    mask = index < end[-1]
    start = (end - counts)[row]
    place = chain.num_blocks[row] + index - start
    added = jnp.cumsum(jnp.where(mask[:, None], cache.hash_fn(token_ids, place), 0), axis=0, dtype=jnp.uint32)
    before = jnp.where(start[:, None] > 0, added[start - 1], 0)
    return Entries(token_ids, chain.hash[row] + added - before, chain.tip[row], index == start, mask)


def _leaders(
    cache: PrefixCache,
    entries: Entries,
    slot: Int[Array, " n"],
    is_new: Bool[Array, " n"],
    may_lead: Bool[Array, " n"],
) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """Return for each new entry the first with its hash, and whether their contents are equal.

    Their hashes are equal, and so are the nodes behind which what is new in their rows begins; their tokens,
    and whom the entries before them follow, decide.
    """
    num_entries = is_new.shape[0]
    index = jnp.arange(num_entries, dtype=jnp.int32)
    begins = is_new & (entries.is_first | ~jnp.roll(is_new, 1))
    base = parents(cache, entries, slot)[lax.cummax(jnp.where(begins, index, 0))]
    same = first_equal(*jnp.unstack(entries.hashes, axis=1), *jnp.unstack(base, axis=1), mask=is_new)
    leader = jnp.full_like(index, num_entries).at[same].min(jnp.where(may_lead, index, num_entries))[same]
    joined = jnp.where(begins, -1, jnp.roll(leader, 1))
    equal = jnp.all(entries.token_ids == entries.token_ids[leader], axis=1) & (joined == joined[leader])
    return leader, (leader <= index) & equal


def _grown(
    cache: PrefixCache,
    chain: Chain,
    counts: Int[Array, " rows"],
    entries: Entries,
    slot: Int[Array, " n"],
    cached: Bool[Array, " n"],
) -> Chain:
    """Return each row's chain, extended to its newest full block; broken where that block is not cached.

    counts: the new full blocks of each row. entries, slot, cached: one for each of these blocks, row by row.
    """
    grows = (counts > 0)[:, None]
    last = jnp.maximum(jnp.cumsum(counts, dtype=jnp.int32) - 1, 0)
    whole = grows & cached[last][:, None]
    return Chain.of(
        salt=chain.salt,
        num_blocks=chain.num_blocks + counts,
        tip=jnp.where(whole, names(cache, slot[last]), jnp.where(grows, PrefixCache.BROKEN, chain.tip)),
        hash=jnp.where(whole, entries.hashes[last], chain.hash),
    )


def remove(cache: PrefixCache, block_ids: Int[Array, " n"], mask: Bool[Array, " n"]) -> PrefixCache:
    """Forget the content of the masked blocks; a node whose last block goes is dead for good."""
    slot = cache.slot[block_ids]  # a read inside the branch would make XLA copy the array that it writes to
    mask = mask & (slot != PrefixCache.NO_SLOT)
    return lax.cond(jnp.any(mask), lambda: content_rings.unlink(cache, block_ids, slot, mask), lambda: cache)


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
    """Return the chains of rows shortened to `num_blocks` full blocks, the last of them `last_block_ids`."""
    slot = cache.slot[last_block_ids]
    inside = Chain.of(
        salt=chain.salt,
        num_blocks=num_blocks,
        tip=jnp.where((slot == PrefixCache.NO_SLOT)[:, None], PrefixCache.BROKEN, names(cache, slot)),
        hash=cache.hash[last_block_ids],
    )
    shorter = where(num_blocks == 0, root(cache, chain.salt), inside)
    return where(num_blocks < chain.num_blocks, shorter, chain)


def where(rows: Bool[Array, "*rows"], then: Chain, otherwise: Chain) -> Chain:
    return Chain(jnp.where(rows[..., None], then.fields, otherwise.fields))
