"""Content of further groups of layers: found by the first group's content, exactly.

The first group's blocks make the tree of contents (`prefix_cache`). A block of another group is one more
child of the node with the same tokens, under tokens that no sequence has. Its K and V depend on all tokens
before, and so does the node's name, which never means anything else. When the node dies its children are not
found any more, as in the tree itself: without the first group's block the others are of no use.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from jaxpaged.memory import content_rings, content_table, prefix_cache
from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.memory.content_table import Entries, PrefixCache, names
from jaxpaged.memory.entries import in_chunks, number_through
from jaxpaged.memory.prefix_cache import Chain, Hit

# The token that stands for group g in the table of contents is this plus g. A model's ids, and those of
# answers, are far from it.
GROUP_TOKENS = -(2**31)


def insert(
    cache: PrefixCache,
    block_ids: Int[Array, " n"],
    group_ids: Int[Array, "num_further n"],
    mask: Bool[Array, "*num_further n"],
) -> PrefixCache:
    """Make blocks of all further groups findable by the first group's blocks with the same tokens.

    block_ids, group_ids: of the first group, and of each further one. Where the first has no content, or a
    block is the null block, nothing is done. All are inserted together, group by group: one insertion costs
    little more than its entries, whatever their number.
    """
    num_further, count = group_ids.shape
    block_ids, mask = jnp.tile(block_ids, num_further), jnp.broadcast_to(mask, group_ids.shape).reshape(-1)
    group, group_ids = jnp.repeat(jnp.arange(1, num_further + 1), count), group_ids.reshape(-1)
    known = mask & (cache.slot[block_ids] != PrefixCache.NO_SLOT) & (group_ids != 0)
    entry, _, _ = number_through(known.astype(jnp.int32), block_ids.shape[0])
    parents = Chain.of(
        salt=jnp.zeros_like(block_ids),
        num_blocks=jnp.zeros_like(block_ids),
        tip=names(cache, cache.slot[block_ids]),
        hash=cache.hash[block_ids],
    )
    counts, tokens = known.astype(jnp.int32), _tokens(cache, group[entry])
    return prefix_cache.insert(cache, parents, counts, entry, group_ids[entry], tokens)[0]


def lookup(cache: PrefixCache, hit: Hit, specs: Sequence[CacheSpec], *, spare: int = 0) -> Hit:
    """Cut a hit of the first group to what every group can serve.

    Returns the longest beginning of which each group has the blocks that the next token reads. `block_ids`
    are those of all groups, [num_groups, max_blocks], with the null block where a further group need not have
    one. Of these groups also those blocks count that a hit of `spare` (static) blocks fewer reads, if they
    are there.

    vLLM 0.33 finds the same length by asking groups in turn until none shortens it
    (`HybridKVCacheCoordinator.find_longest_cache_hit`); here all lengths are judged at once. Costs what is
    hit, and O(max_blocks).
    """
    max_blocks = hit.block_ids.shape[0]
    length = jnp.arange(1, max_blocks + 1, dtype=jnp.int32)  # judged in each place: up to and with its block
    serves = length <= hit.chain.num_blocks
    ids_by_group, first_kept = [hit.block_ids], [jnp.zeros_like(length)]
    for group, spec in enumerate(specs[1:], start=1):
        ids_by_group.append(find(cache, hit, group))
        first_kept.append(jnp.minimum(spec.first_read(length * cache.block_size) // cache.block_size, length))
        is_missing = ids_by_group[-1] == 0
        if num_first := spec.first_blocks(cache.block_size):
            is_first = length <= num_first
            serves &= lax.cummax(jnp.where(is_missing & is_first, 1, 0)) == 0
            is_missing &= ~is_first
        serves &= lax.cummax(jnp.where(is_missing, length, 0)) <= first_kept[-1]
    best = jnp.max(jnp.where(serves, length, 0), initial=0)
    if max_blocks == 0:
        return Hit(jnp.zeros((len(specs), 0), jnp.int32), hit.chain)
    end = jnp.maximum(best - 1, 0)
    first = jnp.stack(first_kept)[:, jnp.maximum(end - spare, 0), None]
    if spare:
        first = jnp.where(best > spare, first, 0)
    is_kept = length > first
    if any(counts := [spec.first_blocks(cache.block_size) for spec in specs]):
        is_kept |= length <= jnp.asarray(counts, jnp.int32)[:, None]
    is_kept &= length <= best
    chain = Chain(hit.chain.fields[None])
    chain = prefix_cache.rewind(cache, chain, best[None], hit.block_ids[end][None])
    return Hit(jnp.where(is_kept, jnp.stack(ids_by_group), 0), Chain(chain.fields[0]))


def find(cache: PrefixCache, hit: Hit, group: int) -> Int[Array, " max_blocks"]:
    """Return the block of a group with the content of each block of the first group's hit; the null block for
    none.
    """

    def look(_: Array, k: Array, used: Array, ids: Int[Array, " max_blocks"]) -> Int[Array, " max_blocks"]:
        block_ids = hit.block_ids.at[k].get(mode="clip")
        tokens = _tokens(cache, jnp.full_like(block_ids, group))
        entries = Entries(
            token_ids=tokens,
            hashes=cache.hash[block_ids] + _hashes(cache, tokens),
            tip=names(cache, cache.slot[block_ids]),
            is_first=jnp.ones_like(used),
            mask=used,
        )
        slot, is_hit = content_table.match(cache, entries)
        target = jnp.where(is_hit, k, ids.shape[0])
        return ids.at[target].set(content_rings.first_of(cache, slot), mode="drop")

    return in_chunks(hit.chain.num_blocks[None], look, jnp.zeros_like(hit.block_ids))


def _tokens(cache: PrefixCache, groups: Int[Array, " n"]) -> Int[Array, "n block_size"]:
    return jnp.broadcast_to(GROUP_TOKENS + groups[:, None], (groups.shape[0], cache.block_size))


def _hashes(cache: PrefixCache, tokens: Int[Array, "n block_size"]) -> UInt32[Array, "n 2"]:
    """Return what the group's tokens add to the hash of their parents."""
    return cache.hash_fn(tokens, jnp.zeros(tokens.shape[0], jnp.int32))
