"""The pool: which blocks are free, how many holders each used one has, and what content can be found again.

Block 0 is the null block. It is never given out; unused table entries name it and padding tokens are
written to it, so every index that reaches a kernel is a real block.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.config import check
from jaxpaged.memory import free_queue, prefix_cache
from jaxpaged.memory.free_queue import FreeQueue
from jaxpaged.memory.policies import Policy, Sweep
from jaxpaged.memory.prefix_cache import PrefixCache
from jaxpaged.status import Status

NULL_BLOCK = 0
HELD_ONCE = FreeQueue.NOT_QUEUED - 1  # the `place` of a block with one holder


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPool:
    """A block is either queued or held: `free_queue.place` is its place, or `NOT_QUEUED - holders`."""

    free_queue: FreeQueue
    prefix_cache: PrefixCache | None  # None: content is forgotten when its block is freed
    policy: Policy = field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.free_queue.num_blocks

    @property
    def ref_count(self) -> Int[Array, " num_blocks"]:
        """Number of holders of each block; 0 for free blocks and the null block."""
        return (FreeQueue.NOT_QUEUED - self.free_queue.place).clip(0)

    @property
    def num_free(self) -> Int[Array, ""]:
        return self.free_queue.num_free

    def is_held(self, block_ids: Int[Array, "*n"]) -> Bool[Array, "*n"]:
        """Return whether these blocks have holders. The cost does not depend on the pool's size."""
        return self.free_queue.place[block_ids] < FreeQueue.NOT_QUEUED


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AllocateInfo:
    block_ids: Int[Array, " max_count"]  # in the order taken; NULL_BLOCK beyond `count`
    status: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FreeInfo:
    num_freed: Int[Array, ""]  # blocks that nobody holds any more
    status: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StatusInfo:
    status: Int[Array, ""]


def create(num_blocks: int, policy: Policy, *, prefix_cache: PrefixCache | None = None) -> BlockPool:
    """Make a pool in which every block but the null block is free."""
    rule = "at least 2: block 0 is the null block and is never given out"
    check("num_blocks", num_blocks, rule, num_blocks >= 2)
    if prefix_cache is not None and prefix_cache.num_blocks != num_blocks:
        raise ValueError(f"{prefix_cache.num_blocks=} must equal {num_blocks=}")
    return BlockPool(policy.new_queue(num_blocks), prefix_cache, policy)


def allocate(pool: BlockPool, count: Int[Array, ""], max_count: int) -> tuple[BlockPool, AllocateInfo]:
    """Take `count` blocks (at most the static `max_count`), each with one holder; all of them or none.

    Content that they hold is forgotten. Costs O(max_count), whatever the pool is.
    Status: OUT_OF_BLOCKS if fewer are free, TOO_MANY_BLOCKS if `count > max_count`.
    """
    status = flag(count > pool.num_free, Status.OUT_OF_BLOCKS) | flag(
        count > max_count, Status.TOO_MANY_BLOCKS
    )
    count = jnp.where(status == Status.OK, count, 0)
    queue, block_ids = pool.policy.take(pool.free_queue, count, max_count, place=HELD_ONCE)
    pool = forget(replace(pool, free_queue=queue), block_ids, jnp.arange(max_count) < count)
    return pool, AllocateInfo(block_ids=block_ids, status=status)


def forget(pool: BlockPool, block_ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]) -> BlockPool:
    """Make the content of the masked blocks unfindable; nothing is checked."""
    if pool.prefix_cache is None:
        return pool
    return replace(pool, prefix_cache=prefix_cache.remove(pool.prefix_cache, block_ids, mask))


def has_content(pool: BlockPool, block_ids: Int[Array, " num_ids"]) -> Bool[Array, " num_ids"]:
    """Return whether each block has content that can be found."""
    if pool.prefix_cache is None:
        return jnp.zeros(block_ids.shape, bool)
    return prefix_cache.has_content(pool.prefix_cache, block_ids)


def num_cached(pool: BlockPool) -> Int[Array, ""]:
    """Free blocks whose content can still be found; counts through the whole pool."""
    is_free = (pool.ref_count == 0).at[NULL_BLOCK].set(False)
    return jnp.sum(is_free & has_content(pool, jnp.arange(pool.num_blocks)), dtype=jnp.int32)


def note_content(
    pool: BlockPool, block_ids: Int[Array, " n"], depth: Int[Array, " n"], mask: Bool[Array, " n"]
) -> BlockPool:
    """Let the policy know which of the masked blocks have content by now, so many blocks deep in a prompt."""
    note, cache = pool.policy.note_content, pool.prefix_cache
    if note is None or cache is None:
        return pool
    fingerprint = cache.hash[block_ids, 0].astype(jnp.int32)
    noted = mask & has_content(pool, block_ids)
    return replace(pool, free_queue=note(pool.free_queue, block_ids, depth, fingerprint, noted))


def free(
    pool: BlockPool,
    block_ids: Int[Array, " num_ids"],
    mask: Bool[Array, " num_ids"],
    sweep: Sweep | None = None,
) -> tuple[BlockPool, FreeInfo]:
    """Give back one hold on each masked block, exactly as if one after the other; all of them or none.

    A block may be named several times (two rows share it); it becomes free with its last hold. The null
    block is passed over. With a `sweep` of the policy's only those that it takes, in its order; without one
    all, as the blocks of one row, in the order of the first sweep. Costs O(num_ids).
    Status: DOUBLE_FREE if a block is named more often than it is held, UNKNOWN_BLOCK.
    """
    has = has_content(pool, block_ids)
    sweeps = pool.policy.sweeps if sweep is None else (sweep,)
    known, unknown = _known(pool, block_ids, mask if sweep is None else mask & sweep.takes(has))
    after = hold(pool, block_ids, known, -1)
    place = after.free_queue.place[block_ids]
    double_free = jnp.any(known & (place > FreeQueue.NOT_QUEUED))
    refused = double_free | unknown
    pool = hold(after, block_ids, known & refused, 1)
    is_free = known & ~refused & (place == FreeQueue.NOT_QUEUED)
    queue, is_freed = free_queue.last_namings(pool.free_queue, block_ids, is_free)
    for each in sweeps:
        way = slice(None, None, 1 if each.last_block_first == sweeps[0].last_block_first else -1)
        queue = each.push(queue, block_ids[way], (is_freed & each.takes(has))[way])
    return replace(pool, free_queue=queue), FreeInfo(
        num_freed=jnp.sum(is_freed, dtype=jnp.int32),
        status=flag(double_free, Status.DOUBLE_FREE) | flag(unknown, Status.UNKNOWN_BLOCK),
    )


def touch(
    pool: BlockPool, block_ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]
) -> tuple[BlockPool, StatusInfo]:
    """Add one holder to each masked block; free blocks leave the queue, wherever they are in it.

    A block may be named several times; the null block is passed over. Status: UNKNOWN_BLOCK.
    """
    known, unknown = _known(pool, block_ids, mask)
    known &= ~unknown
    is_free = known & (pool.free_queue.place[block_ids] >= 0)
    queue = pool.policy.remove(pool.free_queue, block_ids, is_free)
    if pool.policy.note_hits is not None:
        queue = pool.policy.note_hits(queue, block_ids, known)
    pool = replace(pool, free_queue=queue)
    return hold(pool, block_ids, known, 1), StatusInfo(flag(unknown, Status.UNKNOWN_BLOCK))


def evict(
    pool: BlockPool, block_ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]
) -> tuple[BlockPool, StatusInfo]:
    """Make the content of the masked blocks unfindable; their holders keep them. Status: UNKNOWN_BLOCK."""
    known, unknown = _known(pool, block_ids, mask)
    return forget(pool, block_ids, known & ~unknown), StatusInfo(flag(unknown, Status.UNKNOWN_BLOCK))


def reset_prefix_cache(pool: BlockPool) -> tuple[BlockPool, StatusInfo]:
    """Make all content unfindable. Status: BLOCKS_IN_USE if any block is held. Costs O(num_blocks)."""
    in_use = pool.num_free != pool.num_blocks - 1
    if pool.prefix_cache is not None:
        cleared = lax.cond(in_use, lambda same: same, prefix_cache.clear, pool.prefix_cache)
        pool = replace(pool, prefix_cache=cleared)
    return pool, StatusInfo(flag(in_use, Status.BLOCKS_IN_USE))


def hold(pool: BlockPool, block_ids: Int[Array, "*n"], mask: Bool[Array, "*n"], holders: int) -> BlockPool:
    """Add `holders` (negative: take away) for each masked entry, which names a held block.

    Nothing is checked or freed."""
    target = jnp.where(mask, block_ids, pool.num_blocks)
    place = pool.free_queue.place.at[target].add(-holders, mode="drop")
    return replace(pool, free_queue=replace(pool.free_queue, place=place))


def flag(condition: Bool[Array, ""], bit: Status) -> Int[Array, ""]:
    return jnp.where(condition, bit, Status.OK).astype(jnp.int32)


def _known(
    pool: BlockPool, block_ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]
) -> tuple[Bool[Array, " num_ids"], Bool[Array, ""]]:
    """Return which masked ids name a block that can be held, and whether any names no block at all."""
    exists = (block_ids >= 0) & (block_ids < pool.num_blocks)
    return mask & exists & (block_ids != NULL_BLOCK), jnp.any(mask & ~exists)
