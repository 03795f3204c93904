"""The pool: which blocks are free, and how many holders each used one has.

Block 0 is the null block. It is never given out; unused table entries name it and padding tokens are
written to it, so every index that reaches a kernel is a real block.
"""

import dataclasses
import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.memory import free_queue
from jaxpaged.memory.free_queue import FreeQueue
from jaxpaged.status import Status

NULL_BLOCK = 0

# Which end of the free queue a policy uses is all there is to it: blocks are taken from the head, and
#   naive  starts with the lowest id and puts freed blocks at the head (vLLM 0.6.3 `NaiveBlockAllocator`).
Policy = Literal["naive"]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["free_queue", "ref_count"], meta_fields=["policy"]
)
@dataclasses.dataclass(frozen=True)
class BlockPool:
    free_queue: FreeQueue
    ref_count: Int[Array, " num_blocks"]  # holders of each block; 0 for free blocks and the null block
    policy: Policy

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.ref_count.shape[0]

    @property
    def num_free(self) -> Int[Array, ""]:
        return self.free_queue.num_free


@functools.partial(jax.tree_util.register_dataclass, data_fields=["block_ids", "status"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class AllocateInfo:
    block_ids: Int[Array, " max_count"]  # in the order taken; NULL_BLOCK beyond `count`
    status: Int[Array, ""]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["num_freed", "status"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class FreeInfo:
    num_freed: Int[Array, ""]  # blocks that nobody holds any more
    status: Int[Array, ""]


def create(num_blocks: int, policy: Policy = "naive") -> BlockPool:
    """A pool in which every block but the null block is free."""
    if num_blocks < 2:
        raise ValueError(
            f"{num_blocks=} must be at least 2: block 0 is the null block and is never given out"
        )
    if policy not in get_args(Policy):
        raise ValueError(f"{policy=} must be one of {get_args(Policy)}")
    block_ids = jnp.arange(1, num_blocks, dtype=jnp.int32)
    return BlockPool(
        free_queue=free_queue.create(block_ids, num_blocks),
        ref_count=jnp.zeros(num_blocks, jnp.int32),
        policy=policy,
    )


def allocate(pool: BlockPool, count: Int[Array, ""], max_count: int) -> tuple[BlockPool, AllocateInfo]:
    """Take `count` blocks (at most the static `max_count`), each with one holder; all of them or none.

    Status: OUT_OF_BLOCKS if fewer are free, TOO_MANY_NEW_BLOCKS if `count > max_count`.
    """
    status = jnp.where(count > pool.num_free, Status.OUT_OF_BLOCKS, Status.OK) | jnp.where(
        count > max_count, Status.TOO_MANY_NEW_BLOCKS, Status.OK
    )
    count = jnp.where(status == Status.OK, count, 0)
    queue, block_ids = free_queue.pop_front(pool.free_queue, count, max_count)
    taken = jnp.arange(max_count) < count
    ref_count = pool.ref_count.at[jnp.where(taken, block_ids, pool.num_blocks)].set(1, mode="drop")
    pool = dataclasses.replace(pool, free_queue=queue, ref_count=ref_count)
    return pool, AllocateInfo(block_ids=block_ids, status=status)


def free(
    pool: BlockPool, block_ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]
) -> tuple[BlockPool, FreeInfo]:
    """Give back one hold on each masked block, exactly as if one after the other; all of them or none.

    A block may be named several times (two rows share it); it becomes free with its last hold. The null
    block is passed over. Status: DOUBLE_FREE if a block is named more often than it is held.
    """
    mask = mask & (block_ids != NULL_BLOCK)
    # Bring equal ids together, each run in the order given, to count how often a block is named.
    order = jnp.argsort(jnp.where(mask, block_ids, pool.num_blocks), stable=True)
    ids, named = block_ids[order], mask[order]
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    is_first = (index == 0) | (ids != jnp.roll(ids, 1))
    is_last = (index == index[-1]) | (ids != jnp.roll(ids, -1)) | ~jnp.roll(named, -1)
    times = index - jax.lax.cummax(jnp.where(is_first, index, 0)) + 1
    left = pool.ref_count[ids] - times

    double_free = jnp.any(named & (left < 0))
    done = named & is_last & ~double_free
    ref_count = pool.ref_count.at[jnp.where(done, ids, pool.num_blocks)].set(left, mode="drop")
    is_freed = jnp.zeros_like(mask).at[order].set(done & (left == 0))
    pool = dataclasses.replace(
        pool, free_queue=free_queue.push_front(pool.free_queue, block_ids, is_freed), ref_count=ref_count
    )
    return pool, FreeInfo(
        num_freed=jnp.sum(is_freed, dtype=jnp.int32),
        status=jnp.where(double_free, Status.DOUBLE_FREE, Status.OK),
    )
