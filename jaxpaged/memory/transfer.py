"""Blocks handed from one pool to another by their content: what one has computed, another finds.

What can travel is a chain: the full blocks of a sequence from its beginning on. A block is told by its
tokens and its parent, the first one by the salt, so a chain's tokens and salt say all; which numbers its
blocks have in a pool is nobody else's business. K and V travel as the layout has them, block by block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Num

from jaxpaged.memory import block_pool, prefix_cache
from jaxpaged.memory.block_pool import NULL_BLOCK, BlockPool, flag
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.memory.prefix_cache import Hit, PrefixCache
from jaxpaged.status import Status


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdoptInfo:
    # Block to which K and V are to be written; NULL_BLOCK: present already, or the chain is refused.
    destinations: Int[Array, " max_blocks"]
    status: Int[Array, ""]


def locate(
    pool: BlockPool,
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
) -> Hit:
    """Find the longest beginning of a chain of `num_blocks` blocks in the prefix cache; perhaps all of it.

    Whether a row holds the blocks, or nobody, makes no difference. Takes nothing.
    """
    max_blocks, block_size = token_ids.shape
    if block_size != _cache_of(pool).block_size:
        raise ValueError(f"{token_ids.shape=} must be in blocks of {_cache_of(pool).block_size} tokens")
    line = token_ids.reshape(-1)
    return prefix_cache.lookup(
        _cache_of(pool),
        lambda positions: line.at[positions].get(mode="clip"),
        jnp.minimum(num_blocks, max_blocks) * block_size + 1,  # one more token, which is left to compute
        salt,
        max_tokens=max_blocks * block_size + 1,
    )


def adopt(
    pool: BlockPool,
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
) -> tuple[BlockPool, AdoptInfo]:
    """Make a chain findable, in free blocks that nobody holds: all of it or nothing.

    The pool becomes what a request would leave that had found what is there of the chain, computed the rest,
    and finished: the blocks that are there stay, the others are taken as the policy says, and all are given
    back as a row's are. Blocks in use are not touched. Write K and V before anything is looked up again.
    Costs O(num_blocks) of the pool. Status: OUT_OF_BLOCKS, TOO_MANY_BLOCKS (of a chain longer than
    `max_blocks`), UNCACHEABLE.
    """
    max_blocks = token_ids.shape[0]
    too_many = num_blocks > max_blocks
    num_blocks = jnp.where(too_many, 0, num_blocks)
    hit = locate(pool, token_ids, num_blocks, salt)
    index, num_hits = jnp.arange(max_blocks, dtype=jnp.int32), hit.chain.num_blocks
    num_new = num_blocks - num_hits

    # Found blocks are held while others are allocated, so that allocation does not take them.
    after, _ = block_pool.touch(pool, hit.block_ids, index < num_hits)
    after, taken = block_pool.allocate(after, num_new, max_blocks)
    chain = jax.tree.map(lambda leaf: leaf[None], hit.chain)
    cache, chain = prefix_cache.insert(
        _cache_of(after),
        chain,
        num_new[None],
        jnp.zeros_like(index),
        taken.block_ids,
        token_ids.at[num_hits + index].get(mode="clip"),
    )
    after = replace(after, prefix_cache=cache)
    after = block_pool.note_content(after, taken.block_ids, num_hits + index, index < num_new)

    is_new = (index >= num_hits) & (index < num_blocks)
    new_ids = jnp.where(is_new, taken.block_ids.at[index - num_hits].get(mode="clip"), NULL_BLOCK)
    its = jnp.where(index < num_hits, hit.block_ids, new_ids)
    way = slice(None, None, -1 if pool.policy.sweeps[0].last_block_first else 1)
    after, _ = block_pool.free(after, its[way], (its != NULL_BLOCK)[way])

    uncached = (taken.status == Status.OK) & (num_new > 0) & (chain.slot[0] == PrefixCache.BROKEN)
    status = taken.status | flag(too_many, Status.TOO_MANY_BLOCKS) | flag(uncached, Status.UNCACHEABLE)
    done = status == Status.OK
    pool = jax.tree.map(lambda new, old: jnp.where(done, new, old), after, pool)
    return pool, AdoptInfo(jnp.where(done, new_ids, NULL_BLOCK), status)


def read(kv_cache: KVCache, block_ids: Int[Array, " n"]) -> dict[str, Num[Array, "n num_layers ..."]]:
    """Return K and V of these blocks, block by block, by the names of the layout's arrays.

    In a layout of one array, `all_layers`, a block is one contiguous range. What belongs to no block
    (`Layout.shared`) is not among them.
    """
    axis = kv_cache.axis
    return {
        name: jnp.moveaxis(jnp.take(x, block_ids, axis=axis, mode="clip"), axis, 0)
        for name, x in kv_cache.blocks.items()
    }


def write(
    kv_cache: KVCache, block_ids: Int[Array, " n"], arrays: dict[str, Num[Array, "n num_layers ..."]]
) -> KVCache:
    """Put what `read` gave into these blocks, each named once; where it is NULL_BLOCK, nothing."""
    axis = kv_cache.axis
    target = jnp.where(block_ids == NULL_BLOCK, kv_cache.num_blocks, block_ids)
    at = (*[slice(None)] * axis, target)
    blocks = {
        name: x.at[at].set(jnp.moveaxis(arrays[name], 0, axis), mode="drop")
        for name, x in kv_cache.blocks.items()
    }
    return replace(kv_cache, blocks=blocks)


def _cache_of(pool: BlockPool) -> PrefixCache:
    if pool.prefix_cache is None:
        raise ValueError("the pool must have a prefix cache: give block_pool.create one")
    return pool.prefix_cache


def placed(
    arrays: Mapping[str, Num[Array | np.ndarray, "n num_layers ..."]], kv_cache: KVCache
) -> dict[str, Num[Array, "n num_layers ..."]]:
    """Put what `read` gave onto the devices of another cache: over a mesh, sharded as its blocks are.

    Not bound to a device where neither they nor the cache are: else the cache that they are written to would
    be, and every program that takes it would be compiled anew.
    """

    def put(name: str, x: Array | np.ndarray) -> Array:
        is_bound = getattr(x, "committed", False) or kv_cache.blocks[name].committed
        return jax.device_put(x, _sharding(kv_cache, name)) if is_bound else jnp.asarray(x)

    return {name: put(name, x) for name, x in arrays.items()}


def _sharding(kv_cache: KVCache, name: str) -> jax.sharding.Sharding:
    """Return the sharding of some blocks of this cache, with the blocks along the first axis."""
    its = kv_cache.blocks[name].sharding
    if not isinstance(its, jax.sharding.NamedSharding):
        return its
    spec = [*its.spec, *[None] * (kv_cache.blocks[name].ndim - len(its.spec))]
    rest = [axis for i, axis in enumerate(spec) if i != kv_cache.axis]
    return jax.sharding.NamedSharding(its.mesh, jax.sharding.PartitionSpec(None, *rest))
