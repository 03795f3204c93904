"""Free blocks by rank, whatever order they came in: for policies that know more of a block than when it was
freed.

A tournament: the blocks are the leaves of a tree, and each node above knows the lowest in rank of the free
blocks below it. A block that comes or goes plays again on its way to the root, so that costs O(log
num_blocks). Taking goes one block after the other: a policy may spare the first in rank, which then gets
another rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import INT32_MAX
from jaxpaged.memory.free_queue import FreeQueue

FAN_OUT = 16  # children of a node
WITHOUT_CONTENT = 1 << 29  # rank offset of blocks without content, below all others


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RankedQueue(FreeQueue):
    """The ring is empty; `place` of a free block is 0. Of the counters only `num_free` has a meaning.

    Ranks are pairs, and lower goes first. They are compared by how far they are from `clock`'s first two, so
    they may go round.
    """

    rank: Int[Array, "num_blocks 2"]
    kind: Int[Array, " num_blocks"]  # each kind of blocks has its own tournament
    winners: Int[Array, "num_nodes num_kinds"]  # all levels from above the leaves to the root; 0: none
    notes: Int[Array, "num_blocks 5"]  # statistics of each block: the columns below
    clock: Int[Array, "2"]  # the floor (first part of the last rank taken); number of blocks freed
    num_queued: Int[Array, " num_kinds"]  # free blocks of each kind with content
    marks: Int[Array, " num_blocks"]  # all 0 between two calls
    memory: Any = None  # what else a policy keeps: a pytree

    HITS: ClassVar[int] = 0  # times the block was found with its present content
    BORN: ClassVar[int] = 1  # when the block was first freed with this content; 0: not yet
    DEPTH: ClassVar[int] = 2  # blocks of its prompt up to this one; 0: no content since it was taken
    FINGERPRINT: ClassVar[int] = 3  # fingerprint of its content
    NEXT_USE: ClassVar[int] = 4  # next use of its content, where the future is known
    OTHER: ClassVar[int] = 4  # for a policy's own use, where it is not

    @property
    def floor(self) -> Int[Array, ""]:
        return self.clock[0]

    @property
    def now(self) -> Int[Array, ""]:
        return self.clock[1]

    def note(self, column: int, block_ids: Int[Array, "*n"]) -> Int[Array, "*n"]:
        return self.notes[block_ids, column]


@dataclass(frozen=True)
class Ranking:
    """A policy of this queue, as pure functions of the queue and of block ids."""

    # The rank of blocks with content that are given back: (queue, ids, is it the first time, now) -> rank.
    rank: Callable[
        [RankedQueue, Int[Array, " n"], Bool[Array, " n"], Int[Array, " n"]],
        tuple[Int[Array, " n"], Int[Array, " n"]],
    ]
    # Whether the first in rank is spared: (queue, id) -> (spared, its new rank, kind and hits).
    spare: Callable[[RankedQueue, Int[Array, ""]], "Spared"] | None = None
    # Choice of the kind from which the next block is taken.
    choose: Callable[[RankedQueue, Int[Array, " num_kinds"]], Int[Array, ""]] | None = None
    num_kinds: int = 1
    # Whether the floor rises to the lowest rank that is left when a block is evicted.
    floor_follows_lowest: bool = False
    # The queue's `memory` at first: (number of blocks) -> pytree.
    memory: Callable[[int], Any] | None = None
    # The memory after a turn of taking: (queue before it, the notes of the first in rank, its kind, whether
    # it was spared, whether its content was evicted).
    note_turn: (
        Callable[[RankedQueue, Int[Array, " 5"], Int[Array, ""], Bool[Array, ""], Bool[Array, ""]], Any]
        | None
    ) = None
    contract: int = 1  # version of the contract that it is written for (docs/research/contracts.md)


type Spared = tuple[Bool[Array, ""], Int[Array, "2"], Int[Array, ""], Int[Array, ""]]


def _levels(num_blocks: int) -> list[int]:
    """Return the number of nodes of each level, from above the leaves to the root."""
    sizes = [cdiv(num_blocks, FAN_OUT)]
    while sizes[-1] > 1:
        sizes.append(cdiv(sizes[-1], FAN_OUT))
    return sizes


def create(num_blocks: int, ranking: Ranking) -> RankedQueue:
    """Make a queue of all blocks but the null block, the lowest id first."""
    ids = jnp.arange(num_blocks, dtype=jnp.int32)
    queue = RankedQueue(
        ring=jnp.zeros(0, jnp.int32),
        place=jnp.where(ids == 0, FreeQueue.NOT_QUEUED, 0),
        counters=jnp.array([0, 0, num_blocks - 1], jnp.int32),
        rank=jnp.stack([jnp.full_like(ids, -WITHOUT_CONTENT), ids], axis=1),
        kind=jnp.zeros_like(ids),
        winners=jnp.zeros((sum(_levels(num_blocks)), ranking.num_kinds), jnp.int32),
        notes=jnp.zeros((num_blocks, 5), jnp.int32),
        clock=jnp.array([0, num_blocks], jnp.int32),
        num_queued=jnp.zeros(ranking.num_kinds, jnp.int32),
        marks=jnp.zeros_like(ids),
        memory=None if ranking.memory is None else ranking.memory(num_blocks),
    )
    return play(queue, ids, jnp.ones(num_blocks, bool))


def push(
    ranking: Ranking,
    queue: RankedQueue,
    ids: Int[Array, " n"],
    mask: Bool[Array, " n"],
    *,
    content: bool,
) -> RankedQueue:
    """Give the masked ids back, one after the other; all of them hold content, or none does."""
    order = jnp.cumsum(mask, dtype=jnp.int32)
    now = queue.now + order
    target = jnp.where(mask, ids, queue.num_blocks)
    if content:
        born = queue.note(RankedQueue.BORN, ids)
        is_first = born == 0
        notes = queue.notes.at[target, RankedQueue.BORN].set(jnp.where(is_first, now, born), mode="drop")
        queue = replace(queue, notes=notes)
        rank = jnp.stack(ranking.rank(queue, ids, is_first, now), axis=1)
        joins = jnp.where(mask, queue.kind[ids], queue.num_queued.shape[0])
        queue = replace(queue, num_queued=queue.num_queued.at[joins].add(1, mode="drop"))
    else:
        rank = jnp.stack([jnp.broadcast_to(queue.floor - WITHOUT_CONTENT, now.shape), now], axis=1)
        queue = replace(queue, kind=queue.kind.at[target].set(0, mode="drop"))
    count = order[-1]
    queue = replace(
        queue,
        place=queue.place.at[target].set(0, mode="drop"),
        rank=queue.rank.at[target].set(rank, mode="drop"),
        clock=queue.clock.at[1].add(count),
        counters=queue.counters.at[2].add(count),
    )
    return play(queue, ids, mask)


def remove(queue: RankedQueue, ids: Int[Array, " n"], mask: Bool[Array, " n"]) -> RankedQueue:
    """Take the masked ids, all of them free, out of wherever they are; an id may be named several times."""
    target = jnp.where(mask, ids, queue.num_blocks)
    mark = 1 + jnp.arange(ids.shape[0], dtype=jnp.int32)
    marks = queue.marks.at[target].max(mark, mode="drop")
    old_marks = marks[ids]
    leaves = mask & (old_marks == mark)
    kind = jnp.where(leaves & has_content(queue, ids), queue.kind[ids], queue.num_queued.shape[0])
    queue = replace(
        queue,
        place=queue.place.at[target].set(FreeQueue.NOT_QUEUED, mode="drop"),
        marks=marks.at[target].set(jnp.minimum(old_marks, 0), mode="drop"),  # XLA must read before it writes
        counters=queue.counters.at[2].add(-jnp.sum(leaves, dtype=jnp.int32)),
        num_queued=queue.num_queued.at[kind].add(-1, mode="drop"),
    )
    return play(queue, ids, mask)


def take(
    ranking: Ranking,
    queue: RankedQueue,
    count: Int[Array, ""],
    max_count: int,
    *,
    place: int = FreeQueue.NOT_QUEUED,
) -> tuple[RankedQueue, Int[Array, " max_count"]]:
    """Take the first `count` ids in rank, without those spared; ids beyond are 0: see `free_queue`."""
    type Progress = tuple[RankedQueue, Int[Array, ""], Int[Array, " max_count"]]

    def one(progress: Progress) -> Progress:
        queue, num_taken, taken_ids = progress
        # Arrays that are written below are read here, once.
        heads = lax.optimization_barrier(queue.winners[-1])
        kind = jnp.int32(0) if ranking.choose is None else ranking.choose(queue, heads)
        block_id = heads[kind]
        was = queue.rank[block_id], kind, queue.note(RankedQueue.HITS, block_id)
        may_be, *changed = (jnp.bool_(False), *was)
        if ranking.spare is not None:
            may_be, *changed = ranking.spare(queue, block_id)
        holds, notes = has_content(queue, block_id), queue.notes[block_id]
        kind, block_id, was, may_be, changed, holds, notes = lax.optimization_barrier(
            (kind, block_id, was, may_be, changed, holds, notes)
        )
        spared = may_be & holds
        rank, new_kind, hits = (jnp.where(spared, a, b) for a, b in zip(changed, was, strict=True))
        evicted = holds & ~spared
        if ranking.note_turn is not None:
            queue = replace(queue, memory=ranking.note_turn(queue, notes, kind, spared, evicted))
        moves = jnp.zeros_like(queue.num_queued).at[kind].add(-1)
        moves = moves.at[new_kind].add(spared)
        kept = notes.at[RankedQueue.HITS].set(hits)
        queue = replace(
            queue,
            place=queue.place.at[block_id].set(jnp.where(spared, 0, place)),
            rank=queue.rank.at[block_id].set(rank),
            kind=queue.kind.at[block_id].set(jnp.where(spared, new_kind, 0)),
            notes=queue.notes.at[block_id].set(jnp.where(spared, kept, 0)),
            clock=jnp.stack([jnp.where(evicted, rank[0], queue.floor), queue.now + spared]),
            counters=queue.counters.at[2].add(jnp.where(spared, 0, -1)),
            num_queued=queue.num_queued + jnp.where(holds, moves, 0),
        )
        queue = play(queue, block_id[None], jnp.ones(1, bool))
        if ranking.floor_follows_lowest:
            lowest = queue.winners[-1, 0]  # 0: no free block is left
            rises = evicted & (lowest != 0) & has_content(queue, lowest)
            rise = jnp.where(rises, jnp.maximum(queue.rank[lowest, 0] - queue.floor, 0), 0)
            queue = replace(queue, clock=queue.clock.at[0].add(rise))
        at = jnp.where(spared, max_count, num_taken)
        return queue, num_taken + ~spared, taken_ids.at[at].set(block_id, mode="drop")

    start = (queue, jnp.int32(0), jnp.zeros(max_count, jnp.int32))
    queue, _, taken_ids = lax.while_loop(lambda progress: progress[1] < count, one, start)
    return queue, taken_ids


def note_hits(queue: RankedQueue, ids: Int[Array, " n"], mask: Bool[Array, " n"]) -> RankedQueue:
    """Note that the masked blocks were found; a block named several times counts as often."""
    target = jnp.where(mask, ids, queue.num_blocks)
    return replace(queue, notes=queue.notes.at[target, RankedQueue.HITS].add(1, mode="drop"))


def note_content(
    ranking: Ranking,
    queue: RankedQueue,
    ids: Int[Array, " n"],
    depth: Int[Array, " n"],
    fingerprint: Int[Array, " n"],
    mask: Bool[Array, " n"],
) -> RankedQueue:
    """Note that the masked blocks, which are held, now have content; those that had before are left."""
    old = queue.notes[ids]
    target = jnp.where(mask & (old[:, RankedQueue.DEPTH] == 0), ids, queue.num_blocks)
    nothing = jnp.zeros_like(depth)
    notes = jnp.stack([nothing, nothing, depth + 1, fingerprint, nothing], axis=1)
    return replace(queue, notes=queue.notes.at[target].set(notes, mode="drop"))


def has_content(queue: RankedQueue, block_id: Int[Array, "*n"]) -> Bool[Array, "*n"]:
    """Return whether each free block still has content that can be found; for free blocks only."""
    return queue.rank[block_id, 0] - queue.floor > -WITHOUT_CONTENT // 2


def play(queue: RankedQueue, ids: Int[Array, " n"], mask: Bool[Array, " n"]) -> RankedQueue:
    """Find the winners again of all nodes above the masked blocks."""
    children, first, below = queue.winners, 0, None
    for level, size in enumerate(_levels(queue.num_blocks)):
        node = ids // FAN_OUT ** (level + 1)
        place = node[:, None] * FAN_OUT + jnp.arange(FAN_OUT, dtype=jnp.int32)
        target = first + jnp.where(mask, node, children.shape[0])
        for kind in range(children.shape[1]):
            if below is None:
                rivals = jnp.where(place < queue.num_blocks, place, 0)
                rivals = jnp.where(queue.kind[rivals] == kind, rivals, 0)
            else:
                rivals = children.at[below + place, kind].get(mode="clip")
                rivals = jnp.where(below + place < first, rivals, 0)
            children = children.at[target, kind].set(_lowest(queue, rivals), mode="drop")
        below, first = first, first + size
    # These arrays are written after they have been read.
    place, rank, kind, winners = lax.optimization_barrier((queue.place, queue.rank, queue.kind, children))
    return replace(queue, place=place, rank=rank, kind=kind, winners=winners)


def _lowest(queue: RankedQueue, rivals: Int[Array, "n rivals"]) -> Int[Array, " n"]:
    """Return the first in rank of each line; 0 where none is free."""
    is_free = queue.place[rivals] >= 0
    major, minor = jnp.moveaxis(queue.rank[rivals] - queue.clock, -1, 0)
    major = jnp.where(is_free, major, INT32_MAX)
    is_low = is_free & (major == jnp.min(major, axis=1, keepdims=True))
    best = jnp.argmin(jnp.where(is_low, minor, INT32_MAX), axis=1)
    winner = jnp.take_along_axis(rivals, best[:, None], axis=1)[:, 0]
    return jnp.where(jnp.any(is_free, axis=1), winner, 0)
