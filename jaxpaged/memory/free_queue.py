"""A double-ended queue of block ids in fixed arrays: the one structure behind every allocator policy.

The ids lie in a ring. Taking one from the middle (a prefix hit revives a free block) leaves a hole, which a
later taking steps over, once. Only when holes have used up the ring's second half is it compacted. So taking
or giving back k blocks costs O(k), however large the pool is, and the O(num_blocks) compaction is paid by at
least num_blocks removals.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.memory.entries import after_reading


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FreeQueue:
    """Ids in queue order are `ring[head], ring[head + 1], ...` (modulo the ring's size), holes left out.

    `num_blocks` counts every id of the pool, queued or not; the ring has two places for each.
    """

    ring: Int[Array, " capacity"]  # block ids; negative where one was removed; anything outside the span
    # Index of each block in the ring. A block that is not queued has a negative value, for the owner's use.
    place: Int[Array, " num_blocks"]
    counters: Int[Array, "3"]  # head, span, num_free; in one array, because each array costs time per call

    HOLE: ClassVar[int] = -1  # any negative entry is a hole
    NOT_QUEUED: ClassVar[int] = -1
    # Number of holes that one pass can skip.
    HOLE_SLACK: ClassVar[int] = 64

    @property
    def head(self) -> Int[Any, ""]:  # a NumPy value in a state that was read back
        """The place of the first entry."""
        return self.counters[..., 0]

    @property
    def span(self) -> Int[Any, ""]:
        """Places from the first entry to the last, holes included."""
        return self.counters[..., 1]

    @property
    def num_free(self) -> Int[Any, ""]:
        """Blocks in the queue."""
        return self.counters[..., 2]

    @property
    def capacity(self) -> int:
        return self.ring.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.place.shape[0]


def create(block_ids: Int[Array, " num_free"], num_blocks: int) -> FreeQueue:
    """Make a queue that gives out `block_ids` from first to last; `num_blocks` bounds the ids (exclusive)."""
    num_free = block_ids.shape[0]
    capacity = 2 * num_blocks
    ring = jnp.full(capacity, FreeQueue.HOLE, jnp.int32).at[:num_free].set(block_ids)
    place = jnp.full(num_blocks, FreeQueue.NOT_QUEUED, jnp.int32)
    place = place.at[block_ids].set(jnp.arange(num_free, dtype=jnp.int32))
    return FreeQueue(ring, place, jnp.array([0, num_free, num_free], jnp.int32))


def pop_front(
    queue: FreeQueue, count: Int[Array, ""], max_count: int, *, place: int = FreeQueue.NOT_QUEUED
) -> tuple[FreeQueue, Int[Array, " max_count"]]:
    """Take the first `count <= min(max_count, num_free)` ids; the ids beyond `count` are 0.

    The caller has checked `count`: taking more than there are is its error. The ids' `place` becomes what the
    owner likes, if it is negative.
    """
    window = min(max_count + FreeQueue.HOLE_SLACK, queue.capacity)
    offsets = jnp.arange(window, dtype=jnp.int32)

    # Search the ring window by window. With few holes the first window suffices.
    type Progress = tuple[Int[Array, ""], Int[Array, ""], Int[Array, " max_count"]]

    def look(progress: Progress) -> Progress:
        passed, num_taken, taken_ids = progress
        offset = passed + offsets
        ids = queue.ring[(queue.head + offset) % queue.capacity]
        is_live = (offset < queue.span) & (ids >= 0)
        rank = num_taken + jnp.cumsum(is_live, dtype=jnp.int32) - 1
        taken = is_live & (rank < count)
        taken_ids = taken_ids.at[jnp.where(taken, rank, max_count)].set(ids, mode="drop")
        num_taken += jnp.sum(taken, dtype=jnp.int32)
        # The queue now begins after the last id taken, or after the window if more are wanted.
        last = jnp.max(jnp.where(taken, offset + 1, passed))
        return jnp.where(num_taken < count, passed + window, last), num_taken, taken_ids

    def wants_more(progress: Progress) -> Bool[Array, ""]:
        return (progress[1] < count) & (progress[0] < queue.span)

    start = (jnp.int32(0), jnp.int32(0), jnp.zeros(max_count, jnp.int32))
    passed, _, taken_ids = lax.while_loop(wants_more, look, start)
    taken = jnp.arange(max_count, dtype=jnp.int32) < count
    queue = replace(
        queue,
        place=queue.place.at[jnp.where(taken, taken_ids, queue.num_blocks)].set(place, mode="drop"),
        counters=_counters(queue, head=passed, span=-passed, num_free=-count),
    )
    return queue, taken_ids


def push_front(queue: FreeQueue, ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]) -> FreeQueue:
    """Put the masked `ids` at the head one after the other, so the last of them is the first taken."""
    count = jnp.sum(mask, dtype=jnp.int32)
    queue = _make_room(queue, count)
    rank = jnp.cumsum(mask, dtype=jnp.int32) - 1
    queue = _put(queue, ids, mask, (queue.head - 1 - rank) % queue.capacity)
    return replace(queue, counters=_counters(queue, head=-count))


def push_back(queue: FreeQueue, ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]) -> FreeQueue:
    """Put the masked `ids` at the tail one after the other, so the last of them is the last taken."""
    queue = _make_room(queue, jnp.sum(mask, dtype=jnp.int32))
    rank = jnp.cumsum(mask, dtype=jnp.int32) - 1
    return _put(queue, ids, mask, (queue.head + queue.span + rank) % queue.capacity)


def remove(queue: FreeQueue, ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]) -> FreeQueue:
    """Take the masked `ids`, all of them queued, out of wherever they are in the queue.

    An id may be named several times: the hole then carries the index of the naming that counts.
    """
    place = queue.place[ids]
    hole = -1 - jnp.arange(ids.shape[0], dtype=jnp.int32)
    ring = queue.ring.at[jnp.where(mask, place, queue.capacity)].min(hole, mode="drop")
    ids_there = ring[place]
    target = jnp.where(mask, ids, queue.num_blocks)
    return replace(
        queue,
        ring=ring,
        place=queue.place.at[target].set(after_reading(ids_there, FreeQueue.NOT_QUEUED), mode="drop"),
        counters=_counters(queue, num_free=-jnp.sum(mask & (ids_there == hole), dtype=jnp.int32)),
    )


def last_namings(
    queue: FreeQueue, ids: Int[Array, " num_ids"], mask: Bool[Array, " num_ids"]
) -> tuple[FreeQueue, Bool[Array, " num_ids"]]:
    """Return which masked entry is the last to name its id. The place of each of these is NOT_QUEUED.

    Their places serve as scratch: no sort is needed, and nothing of the pool's size. They are left negative;
    the caller must push the ids.
    """
    mark = FreeQueue.NOT_QUEUED - 1 - jnp.arange(ids.shape[0], dtype=jnp.int32)
    place = queue.place.at[jnp.where(mask, ids, queue.num_blocks)].min(mark, mode="drop")
    return replace(queue, place=place), mask & (place[ids] == mark)


def compact(queue: FreeQueue) -> FreeQueue:
    """Return the queue without holes, its head at place 0. Costs O(num_blocks)."""
    offset = jnp.arange(queue.capacity, dtype=jnp.int32)
    ids = queue.ring[(queue.head + offset) % queue.capacity]
    is_live = (offset < queue.span) & (ids >= 0)
    rank = jnp.cumsum(is_live, dtype=jnp.int32) - 1
    return replace(
        queue,
        ring=jnp.full_like(queue.ring, FreeQueue.HOLE)
        .at[jnp.where(is_live, rank, queue.capacity)]
        .set(ids, mode="drop"),
        place=queue.place.at[jnp.where(is_live, ids, queue.num_blocks)].set(rank, mode="drop"),
        counters=_counters(queue, head=-queue.head, span=queue.num_free - queue.span),
    )


type Count = int | Int[Array, ""]


def _counters(queue: FreeQueue, *, head: Count = 0, span: Count = 0, num_free: Count = 0) -> Int[Array, "3"]:
    """Return the queue's counters with these amounts added."""
    return jnp.stack([(queue.head + head) % queue.capacity, queue.span + span, queue.num_free + num_free])


def _make_room(queue: FreeQueue, count: Int[Array, ""]) -> FreeQueue:
    """Compact if `count` more entries would not fit; without holes they always do."""
    return lax.cond(queue.span + count > queue.capacity, compact, lambda same: same, queue)


def _put(
    queue: FreeQueue,
    ids: Int[Array, " num_ids"],
    mask: Bool[Array, " num_ids"],
    place: Int[Array, " num_ids"],
) -> FreeQueue:
    count = jnp.sum(mask, dtype=jnp.int32)
    return replace(
        queue,
        ring=queue.ring.at[jnp.where(mask, place, queue.capacity)].set(ids, mode="drop"),
        place=queue.place.at[jnp.where(mask, ids, queue.num_blocks)].set(place, mode="drop"),
        counters=_counters(queue, span=count, num_free=count),
    )
