"""Blocks handed from one pool to another by their content: what one has computed, another finds.

What can travel is a chain: the full blocks of a sequence from its beginning on. A block is told by its
tokens and its parent, the first one by the salt, so a chain's tokens and salt say all; which numbers its
blocks have in a pool is nobody else's business. K and V travel as the layout has them, block by block.

Where layers make several groups, a chain has a line of blocks for each. That of the first group is whole; in
the others only those blocks need be there that the next token reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Num

from jaxpaged.memory import block_pool, group_content, prefix_cache
from jaxpaged.memory.block_pool import NULL_BLOCK, BlockPool, flag
from jaxpaged.memory.cache_specs import FULL, CacheSpec
from jaxpaged.memory.kv_cache import KVCache, note_followed
from jaxpaged.memory.prefix_cache import Hit, PrefixCache
from jaxpaged.status import Status


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdoptInfo:
    # Block to which K and V are to be written; NULL_BLOCK: present already, not brought, or the chain is
    # refused.
    destinations: Int[Array, "num_groups max_blocks"]
    status: Int[Array, ""]


def locate(
    pool: BlockPool,
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
    specs: Sequence[CacheSpec] = (FULL,),
) -> Hit:
    """Find the longest beginning of a chain of `num_blocks` blocks in the prefix cache; perhaps all of it.

    `specs` (static) are those of the groups of layers. `block_ids` [num_groups, max_blocks] names what each
    group has of it, as far as a prompt of these tokens reads it next, or a longer one that begins so; the
    null block stands for the rest. Whether a row holds the blocks, or nobody, makes no difference. Takes
    nothing.
    """
    hit = _locate_first(pool, token_ids, num_blocks, salt)
    if len(specs) == 1:
        return Hit(hit.block_ids[None], hit.chain)
    # A prompt that ends with its last full block leaves a token to compute, and so begins a block earlier.
    return group_content.lookup(_cache_of(pool), hit, specs, spare=1)


def _locate_first(
    pool: BlockPool,
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
) -> Hit:
    """Find what the first group has of a chain."""
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
    present: Bool[Array, "num_groups max_blocks"],
    classes: Sequence[int] = (),
) -> tuple[BlockPool, AdoptInfo]:
    """Make a chain findable, in free blocks that nobody holds: all of it or nothing.

    `present` says which blocks of each group's line are brought; of the first group all are. `classes`
    (static) is the size class of each group's blocks; empty: there is one. The pool becomes what a request
    would leave that had found what is there of them, computed the rest, and finished: the blocks that are
    there stay, the others are taken as the policy says, group by group, and all are given back as a row's
    are. Blocks in use are not touched. Write K and V before anything is looked up again.
    Costs O(num_groups x max_blocks), whatever the pool is. Status: OUT_OF_BLOCKS, TOO_MANY_BLOCKS (of a chain
    longer than `max_blocks`), UNCACHEABLE.
    """
    num_groups, max_blocks = present.shape
    too_many = num_blocks > max_blocks
    num_blocks = jnp.where(too_many, 0, num_blocks)
    hit = _locate_first(pool, token_ids, num_blocks, salt)
    lines = [hit.block_ids, *(group_content.find(_cache_of(pool), hit, g) for g in range(1, num_groups))]
    is_brought = (present | (jnp.arange(num_groups) == 0)[:, None]) & (jnp.arange(max_blocks) < num_blocks)
    found = jnp.where(is_brought, jnp.stack(lines), NULL_BLOCK)
    is_new = is_brought & (found == NULL_BLOCK)

    # Found blocks are held while others are allocated, so that allocation does not take them.
    after, _ = block_pool.touch(pool, found.reshape(-1), (found != NULL_BLOCK).reshape(-1))
    of_entries = None
    if pool.num_classes > 1:
        if len(classes) != num_groups:
            raise ValueError(f"{classes=} must have the size class of each of {num_groups} groups")
        of_entries = jnp.repeat(jnp.asarray(classes, jnp.int32), max_blocks)
        of_entries = block_pool.packed(of_entries, is_new.reshape(-1))
    after, taken = block_pool.allocate(after, jnp.sum(is_new, dtype=jnp.int32), is_new.size, of_entries)
    place = jnp.cumsum(is_new.reshape(-1), dtype=jnp.int32).reshape(is_new.shape) - 1
    new_ids = jnp.where(is_new, taken.block_ids.at[place].get(mode="clip"), NULL_BLOCK)
    after = _publish(after, hit, new_ids, is_new, token_ids)

    its = found + new_ids  # one of both is the null block
    for sweep in pool.policy.sweeps:
        ids = (its[:, ::-1] if sweep.last_block_first else its).reshape(-1)
        after, _ = block_pool.free(after, ids, ids != NULL_BLOCK, sweep)

    uncached = (taken.status == Status.OK) & jnp.any(
        is_new.reshape(-1) & ~block_pool.has_content(after, new_ids.reshape(-1))
    )
    status = taken.status | flag(too_many, Status.TOO_MANY_BLOCKS) | flag(uncached, Status.UNCACHEABLE)
    done = status == Status.OK
    pool = jax.tree.map(lambda new, old: jnp.where(done, new, old), after, pool)
    return pool, AdoptInfo(jnp.where(done, new_ids, NULL_BLOCK), status)


def arrive(
    pool: BlockPool,
    kv_cache: KVCache,
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
    present: Bool[Array, "num_groups max_blocks"],
    places: tuple[Int[Array, " n"], ...],
    arrays: dict[str, Num[Array, "n ..."]],
    classes: Sequence[int] = (),
) -> tuple[BlockPool, KVCache, Bool[Array, ""]]:
    """Adopt a chain and write the K and V of its new blocks: all of it or nothing.

    `places` has a line for each size class of the cache's blocks. It says which block of the chain each one
    of the class's `arrays` is: its group times `max_blocks`, and its place in the line; negative for none.
    Nothing happens where a new block is not among them, as when one that was there has left since. Returns
    also whether the chain is there.
    """
    adopted, info = adopt(pool, token_ids, num_blocks, salt, present, classes)
    destinations = info.destinations.reshape(-1)
    ids = [_at(destinations, line) for line in places]
    num_brought = sum(jnp.sum(line != NULL_BLOCK) for line in ids)
    done = (info.status == Status.OK) & (num_brought == jnp.sum(destinations != NULL_BLOCK))
    pool = jax.tree.map(lambda new, old: jnp.where(done, new, old), adopted, pool)
    for size_class, line in enumerate(ids):
        of_class = {name: arrays[name] for name in kv_cache.movable_of(size_class)}
        kv_cache = write(kv_cache, jnp.where(done, line, NULL_BLOCK), of_class)
    return pool, kv_cache, done


def _at(block_ids: Int[Array, " m"], places: Int[Array, " n"]) -> Int[Array, " n"]:
    """Return the blocks at these places; NULL_BLOCK for negative ones."""
    return jnp.where(places >= 0, block_ids.at[places].get(mode="clip"), NULL_BLOCK)


def depart(
    pool: BlockPool,
    kv_cache: KVCache,
    token_ids: Int[Array, "max_blocks block_size"],
    num_blocks: Int[Array, ""],
    salt: Int[Array, ""],
    places: tuple[Int[Array, " n"], ...],
    specs: Sequence[CacheSpec] = (FULL,),
) -> tuple[tuple[Bool[Array, " n"], ...], dict[str, Num[Array, "n ..."]]]:
    """Find blocks of a chain, named as for `arrive`, and read those that are there.

    Returns which are, and K and V; of the others they are undefined.
    """
    lines = locate(pool, token_ids, num_blocks, salt, specs).block_ids.reshape(-1)
    ids = [_at(lines, line) for line in places]
    arrays: dict[str, Num[Array, "n ..."]] = {}
    for size_class, line in enumerate(ids):
        arrays |= read(kv_cache, line, size_class)
    return tuple(line != NULL_BLOCK for line in ids), arrays


def _publish(
    pool: BlockPool,
    hit: Hit,
    new_ids: Int[Array, "num_groups max_blocks"],
    is_new: Bool[Array, "num_groups max_blocks"],
    token_ids: Int[Array, "max_blocks block_size"],
) -> BlockPool:
    """Make the new blocks findable: those of the first group behind the hit, others by the first group's."""
    num_groups, max_blocks = new_ids.shape
    index, num_hits = jnp.arange(max_blocks, dtype=jnp.int32), hit.chain.num_blocks
    behind = (num_hits + index).clip(max=max_blocks - 1)
    num_new = jnp.sum(is_new[0], dtype=jnp.int32)
    cache, _ = prefix_cache.insert(
        _cache_of(pool),
        jax.tree.map(lambda leaf: leaf[None], hit.chain),
        num_new[None],
        jnp.zeros_like(index),
        new_ids[0, behind],
        token_ids[behind],
    )
    pool = block_pool.note_content(
        replace(pool, prefix_cache=cache), new_ids[0, behind], behind, index < num_new
    )
    first_ids = hit.block_ids + new_ids[0]
    if num_groups > 1:
        cache = group_content.insert(_cache_of(pool), first_ids, new_ids[1:], is_new[1:])
        pool = replace(pool, prefix_cache=cache)
    for group in range(1, num_groups):
        pool = block_pool.note_content(pool, new_ids[group], index, is_new[group])
    return pool


def read(
    kv_cache: KVCache, block_ids: Int[Array, " n"], size_class: int = 0
) -> dict[str, Num[Array, "n ..."]]:
    """Return K and V of these blocks, or their states, block by block, by the names of `KVCache.movable`.

    All blocks are of one size class. In a layout of one array, `all_layers`, a block is one contiguous range.
    What belongs to no block (`Layout.shared`) is not among them.
    """
    blocks = {}
    for name, x in kv_cache.movable_of(size_class).items():
        axis, places = kv_cache.axis_of(name), kv_cache.places_of(name, block_ids)
        blocks[name] = jnp.moveaxis(jnp.take(x, places, axis=axis, mode="clip"), axis, 0)
    return blocks


def write(kv_cache: KVCache, block_ids: Int[Array, " n"], arrays: dict[str, Num[Array, "n ..."]]) -> KVCache:
    """Put what `read` gave into these blocks, each named once; where it is NULL_BLOCK, nothing."""
    written = kv_cache.movable
    for name, new in arrays.items():
        old, axis = written[name], kv_cache.axis_of(name)
        places = kv_cache.places_of(name, block_ids)
        target = jnp.where(places == NULL_BLOCK, old.shape[axis], places)
        at = (*[slice(None)] * axis, target)
        written[name] = old.at[at].set(jnp.moveaxis(new, 0, axis), mode="drop")
    return note_followed(kv_cache.with_movable(written), block_ids, False)


def _cache_of(pool: BlockPool) -> PrefixCache:
    if pool.prefix_cache is None:
        raise ValueError("the pool must have a prefix cache: give block_pool.create one")
    return pool.prefix_cache


def placed(
    arrays: Mapping[str, Num[Array | np.ndarray, "n ..."]], kv_cache: KVCache
) -> dict[str, Num[Array, "n ..."]]:
    """Put what `read` gave onto the devices of another cache: over a mesh, sharded as its blocks are.

    Not bound to a device where neither they nor the cache are: else the cache that they are written to would
    be, and every program that takes it would be compiled anew.
    """

    def put(name: str, x: Array | np.ndarray) -> Array:
        is_bound = getattr(x, "committed", False) or kv_cache.movable[name].committed
        return jax.device_put(x, sharding(kv_cache, name)) if is_bound else jnp.asarray(x)

    return {name: put(name, x) for name, x in arrays.items()}


def sharding(kv_cache: KVCache, name: str) -> jax.sharding.Sharding:
    """Return the sharding of some blocks of this cache, with the blocks along the first axis."""
    its = kv_cache.movable[name].sharding
    if not isinstance(its, jax.sharding.NamedSharding):
        return its
    spec = [*its.spec, *[None] * (kv_cache.movable[name].ndim - len(its.spec))]
    rest = [axis for i, axis in enumerate(spec) if i != kv_cache.axis_of(name)]
    return jax.sharding.NamedSharding(its.mesh, jax.sharding.PartitionSpec(None, *rest))
