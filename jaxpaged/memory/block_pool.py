"""The pool: which blocks are free, how many holders each used one has, and what content can be found again.

Block 0 is the null block. It is never given out; unused table entries name it and padding tokens are
written to it, so every index that reaches a kernel is a real block.

Blocks of different sizes make size classes. The ids of a class are a range, whose length is fixed, and a free
queue of its own names them from 1 on: class 0 has the ids from 0 to N - 1, class 1 those from N to N + M - 2,
where its queue counts M blocks, the null block included. A block never changes its class. All else goes by
id, whatever the class.
"""

import itertools
from collections.abc import Iterator, Sequence
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
    """A block is either queued or held: `place` is its place in its queue, or `NOT_QUEUED - holders`."""

    free_queue: FreeQueue  # of the first size class
    prefix_cache: PrefixCache | None  # None: content is forgotten when its block is freed
    policy: Policy = field(metadata={"static": True})
    further: tuple[FreeQueue, ...] = ()  # of the further size classes

    @property
    def queues(self) -> tuple[FreeQueue, ...]:
        """The free queue of each size class."""
        return self.free_queue, *self.further

    @property
    def num_classes(self) -> int:
        return 1 + len(self.further)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return 1 + sum(queue.num_blocks - 1 for queue in self.queues)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Difference between a block's id and its number in its class's queue, for each class."""
        return tuple(itertools.accumulate((queue.num_blocks - 1 for queue in self.queues[:-1]), initial=0))

    @property
    def ref_count(self) -> Int[Array, " num_blocks"]:
        """Number of holders of each block; 0 for free blocks and the null block."""
        place = self.free_queue.place
        if self.further:
            place = jnp.concatenate([place, *(queue.place[1:] for queue in self.further)])
        return (FreeQueue.NOT_QUEUED - place).clip(0)

    @property
    def num_free(self) -> Int[Array, "*num_classes"]:
        """Number of free blocks; with several size classes one number for each."""
        if not self.further:
            return self.free_queue.num_free
        return jnp.stack([queue.num_free for queue in self.queues])

    @property
    def num_free_in_all(self) -> Int[Array, ""]:
        """Number of free blocks of all size classes."""
        return jnp.sum(self.num_free) if self.further else self.num_free

    def place(self, block_ids: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Return the places of blocks in the queue of their class; negative for blocks that are not free.

        The cost does not depend on the pool's size.
        """
        places = [
            (queue.place[ids], inside)
            for queue, ids, inside in self.by_class(block_ids, jnp.ones_like(block_ids, bool))
        ]
        place, _ = places[0]
        for in_class, inside in places[1:]:
            place = jnp.where(inside, in_class, place)
        return place

    def is_held(self, block_ids: Int[Array, "*n"]) -> Bool[Array, "*n"]:
        """Return whether these blocks have holders. The cost does not depend on the pool's size."""
        return self.place(block_ids) < FreeQueue.NOT_QUEUED

    def by_class(
        self, block_ids: Int[Array, "*n"], mask: Bool[Array, "*n"]
    ) -> Iterator[tuple[FreeQueue, Int[Array, "*n"], Bool[Array, "*n"]]]:
        """Return, for each size class, its queue, the masked blocks' numbers in it, and which are of it.

        Blocks of other classes have number 0.
        """
        if not self.further:
            yield self.free_queue, block_ids, mask
            return
        for queue, offset in zip(self.queues, self.offsets, strict=True):
            number = block_ids - offset
            inside = mask & (number >= min(offset, 1)) & (number < queue.num_blocks)
            yield queue, jnp.where(inside, number, 0), inside

    def with_queues(self, queues: Sequence[FreeQueue]) -> "BlockPool":
        """Return the pool with these free queues of its size classes."""
        return replace(self, free_queue=queues[0], further=tuple(queues[1:]))


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


def total_blocks(num_blocks: int, more_blocks: Sequence[int] = ()) -> int:
    """Return how many ids a pool of size classes has, the null block included."""
    return num_blocks + sum(more_blocks) - len(more_blocks)


def create(
    num_blocks: int,
    policy: Policy,
    *,
    prefix_cache: PrefixCache | None = None,
    more_blocks: Sequence[int] = (),
) -> BlockPool:
    """Make a pool in which every block but the null block is free.

    num_blocks: of the first size class; `more_blocks`: of each further one. Each number counts the null
    block.
    """
    rule = "at least 2: block 0 is the null block and is never given out"
    check("num_blocks", num_blocks, rule, num_blocks >= 2)
    check("more_blocks", tuple(more_blocks), f"each {rule}", min(more_blocks, default=2) >= 2)
    total = total_blocks(num_blocks, more_blocks)
    if prefix_cache is not None and prefix_cache.num_blocks != total:
        raise ValueError(f"{prefix_cache.num_blocks=} must equal num_blocks={total}")
    further = tuple(policy.new_queue(number) for number in more_blocks)
    return BlockPool(policy.new_queue(num_blocks), prefix_cache, policy, further)


def allocate(
    pool: BlockPool,
    count: Int[Array, ""],
    max_count: int,
    classes: Int[Array, " max_count"] | None = None,
) -> tuple[BlockPool, AllocateInfo]:
    """Take `count` blocks (at most the static `max_count`), each with one holder; all of them or none.

    classes: the size class of each of them, in their order; needed where the pool has several.

    Content that they hold is forgotten. Costs O(max_count), whatever the pool is.
    Status: OUT_OF_BLOCKS if fewer are free (of one class), TOO_MANY_BLOCKS if `count > max_count`.
    """
    if pool.further:
        if classes is None:
            raise ValueError(f"classes must be given: the pool has {pool.num_classes} size classes")
        return _allocate_by_class(pool, count, classes)
    status = flag(count > pool.num_free, Status.OUT_OF_BLOCKS) | flag(
        count > max_count, Status.TOO_MANY_BLOCKS
    )
    count = jnp.where(status == Status.OK, count, 0)
    queue, block_ids = pool.policy.take(pool.free_queue, count, max_count, place=HELD_ONCE)
    pool = forget(replace(pool, free_queue=queue), block_ids, jnp.arange(max_count) < count)
    return pool, AllocateInfo(block_ids=block_ids, status=status)


def _allocate_by_class(
    pool: BlockPool, count: Int[Array, ""], classes: Int[Array, " max_count"]
) -> tuple[BlockPool, AllocateInfo]:
    """Take `count` blocks of these size classes; in each class in the order of the entries."""
    max_count = classes.shape[0]
    is_entry = jnp.arange(max_count) < count
    masks = [is_entry & (classes == each) for each in range(pool.num_classes)]
    counts = jnp.stack([jnp.sum(mask, dtype=jnp.int32) for mask in masks])
    status = flag(jnp.any(counts > pool.num_free), Status.OUT_OF_BLOCKS) | flag(
        count > max_count, Status.TOO_MANY_BLOCKS
    )
    ok = status == Status.OK
    block_ids, queues = jnp.full(max_count, NULL_BLOCK, jnp.int32), []
    for queue, offset, mask, number in zip(pool.queues, pool.offsets, masks, counts, strict=True):
        after, ids = pool.policy.take(queue, jnp.where(ok, number, 0), max_count, place=HELD_ONCE)
        rank = jnp.cumsum(mask, dtype=jnp.int32) - 1
        block_ids = jnp.where(mask & ok, ids[rank] + offset, block_ids)
        queues.append(after)
    pool = forget(pool.with_queues(queues), block_ids, is_entry & ok)
    return pool, AllocateInfo(block_ids=block_ids, status=status)


def packed(classes: Int[Array, " n"], mask: Bool[Array, " n"]) -> Int[Array, " n"]:
    """Return the masked entries' classes one after the other, as `allocate` wants them."""
    place = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, mask.shape[0])
    return jnp.zeros_like(classes).at[place].set(classes, mode="drop")


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
    queues = [
        note(queue, ids, depth, fingerprint, in_class)
        for queue, ids, in_class in pool.by_class(block_ids, noted)
    ]
    return pool.with_queues(queues)


def note_waiting(pool: BlockPool, wanted: Int[Array, " num_blocks"]) -> BlockPool:
    """Let the policy, which asks for it, know how soon waiting requests will find each block; 0: none."""
    note = pool.policy.note_waiting
    assert note is not None
    if not pool.further:
        return replace(pool, free_queue=note(pool.free_queue, wanted))
    return pool.with_queues(
        [
            note(queue, wanted[offset : offset + queue.num_blocks].at[NULL_BLOCK].set(0))
            for queue, offset in zip(pool.queues, pool.offsets, strict=True)
        ]
    )


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
    place = after.place(block_ids)
    double_free = jnp.any(known & (place > FreeQueue.NOT_QUEUED))
    refused = double_free | unknown
    pool = hold(after, block_ids, known & refused, 1)
    is_free = known & ~refused & (place == FreeQueue.NOT_QUEUED)
    queues, num_freed = [], []
    for queue, ids, in_class in pool.by_class(block_ids, is_free):
        queue, is_freed = free_queue.last_namings(queue, ids, in_class)
        for each in sweeps:
            way = slice(None, None, 1 if each.last_block_first == sweeps[0].last_block_first else -1)
            queue = each.push(queue, ids[way], (is_freed & each.takes(has))[way])
        queues.append(queue)
        num_freed.append(jnp.sum(is_freed, dtype=jnp.int32))
    return pool.with_queues(queues), FreeInfo(
        num_freed=sum(num_freed[1:], start=num_freed[0]),
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
    queues = []
    for queue, ids, in_class in pool.by_class(block_ids, known):
        queue = pool.policy.remove(queue, ids, in_class & (queue.place[ids] >= 0))
        if pool.policy.note_hits is not None:
            queue = pool.policy.note_hits(queue, ids, in_class)
        queues.append(queue)
    pool = pool.with_queues(queues)
    return hold(pool, block_ids, known, 1), StatusInfo(flag(unknown, Status.UNKNOWN_BLOCK))


def evict(
    pool: BlockPool, block_ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]
) -> tuple[BlockPool, StatusInfo]:
    """Make the content of the masked blocks unfindable; their holders keep them. Status: UNKNOWN_BLOCK."""
    known, unknown = _known(pool, block_ids, mask)
    return forget(pool, block_ids, known & ~unknown), StatusInfo(flag(unknown, Status.UNKNOWN_BLOCK))


def reset_prefix_cache(pool: BlockPool) -> tuple[BlockPool, StatusInfo]:
    """Make all content unfindable. Status: BLOCKS_IN_USE if any block is held. Costs O(num_blocks)."""
    in_use = pool.num_free_in_all != pool.num_blocks - 1
    if pool.prefix_cache is not None:
        cleared = lax.cond(in_use, lambda same: same, prefix_cache.clear, pool.prefix_cache)
        pool = replace(pool, prefix_cache=cleared)
    return pool, StatusInfo(flag(in_use, Status.BLOCKS_IN_USE))


def hold(pool: BlockPool, block_ids: Int[Array, "*n"], mask: Bool[Array, "*n"], holders: int) -> BlockPool:
    """Add `holders` (negative: take away) for each masked entry, which names a held block.

    Nothing is checked or freed."""
    queues = []
    for queue, ids, in_class in pool.by_class(block_ids, mask):
        target = jnp.where(in_class, ids, queue.num_blocks)
        place = queue.place.at[target].add(-holders, mode="drop")
        queues.append(replace(queue, place=place))
    return pool.with_queues(queues)


def in_every(flags: Bool[Array, "*num_classes"]) -> Bool[Array, ""]:
    """Return whether a flag is true for each size class; there may be one alone."""
    return jnp.all(flags) if flags.ndim else flags


def in_any(flags: Bool[Array, "*num_classes"]) -> Bool[Array, ""]:
    """Return whether a flag is true for any size class; there may be one alone."""
    return jnp.any(flags) if flags.ndim else flags


def flag(condition: Bool[Array, ""], bit: Status) -> Int[Array, ""]:
    return jnp.where(condition, bit, Status.OK).astype(jnp.int32)


def _known(
    pool: BlockPool, block_ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]
) -> tuple[Bool[Array, " num_ids"], Bool[Array, ""]]:
    """Return which masked ids name a block that can be held, and whether any names no block at all."""
    exists = (block_ids >= 0) & (block_ids < pool.num_blocks)
    return mask & exists & (block_ids != NULL_BLOCK), jnp.any(mask & ~exists)
