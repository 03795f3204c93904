"""S3-FIFO: a small queue for new blocks, and a main one for those that were found, or that come back soon.

While the main queue has more than nine tenths of the free blocks with content, its first is taken, else the
small one's. A block of the small queue that was found twice moves to the main queue's end instead, and the
small queue's next one is looked at. A block of the main queue that was found moves to its end again, with one
hit less.

Contents that were taken from the small queue are remembered, first in first out: nine tenths as many as there
are free blocks with content. Remembered content that comes back begins in the main queue. When the first
block with content is taken, all but the first tenth of the free ones move to the main queue. All this is as
in libCacheSim, the authors' simulator, to the last hit.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import next_power_of_two
from jaxpaged.checks import INT32_MAX
from jaxpaged.memory import ranked_queue
from jaxpaged.memory.entries import first_equal
from jaxpaged.memory.free_queue import FreeQueue
from jaxpaged.memory.ranked_queue import RankedQueue, Ranking, Spared

SMALL, MAIN = 0, 1
SMALL_SHARE = 10  # the small queue has one block in so many
MOST_HITS = 3  # that count in the main queue
# Ways of each set of remembered contents. There is one set for two blocks. A set overflows, and so forgets a
# content too early, about once in 10 billion.
GHOST_WAYS = 16
NUMBERS_A_BLOCK = 4  # remembered contents may lie so far apart in the order of their eviction


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ghosts:
    """Contents that were evicted from the small queue, each numbered by its eviction."""

    contents: Int[Array, "num_sets ways 2"]  # fingerprint and number; 0: none
    is_kept: Int[Array, " ring"]  # whether a number, modulo the ring's size, is still remembered
    newest: Int[Array, ""]  # the last number given
    oldest: Int[Array, ""]  # no smaller number is remembered
    num_kept: Int[Array, ""]
    stays: Bool[Array, ""]  # whether the last turn of taking moved a block of the small queue
    is_full: Bool[Array, ""]  # whether a block with content was ever taken

    def keeps(self, number: Int[Array, "*n"]) -> Bool[Array, "*n"]:
        """Return whether these numbers are remembered. Numbers may go round."""
        age = self.newest - number
        in_time = (number != 0) & (age >= 0) & (age <= self.newest - self.oldest)
        return in_time & (self.is_kept[self.place(number)] == 1)

    def place(self, number: Int[Array, "*n"]) -> Int[Array, "*n"]:
        return number & (self.is_kept.shape[0] - 1)

    def set_of(self, fingerprint: Int[Array, "*n"]) -> Int[Array, "*n"]:
        return fingerprint & (self.contents.shape[0] - 1)


def create(num_blocks: int) -> Ghosts:
    """Make a memory for the blocks of a pool, in which nothing is remembered."""
    size = max(next_power_of_two(num_blocks), 2)
    return Ghosts(
        contents=jnp.zeros((size // 2, GHOST_WAYS, 2), jnp.int32),
        is_kept=jnp.zeros(NUMBERS_A_BLOCK * size, jnp.int32),
        newest=jnp.int32(0),
        oldest=jnp.int32(1),
        num_kept=jnp.int32(0),
        stays=jnp.bool_(False),
        is_full=jnp.bool_(False),
    )


def _as_it_was(
    queue: RankedQueue, ids: Int[Array, " n"], is_first: Bool[Array, " n"], now: Int[Array, " n"]
) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Put new blocks behind all others; every other block stays where it was."""
    return jnp.zeros_like(now), jnp.where(is_first, now, queue.rank[ids, 1])


def _choose(queue: RankedQueue, heads: Int[Array, " num_kinds"]) -> Int[Array, ""]:
    num_free, num_main = jnp.sum(queue.num_queued), queue.num_queued[MAIN]
    is_empty = ~ranked_queue.has_content(queue, heads[SMALL])
    takes_small = is_empty | queue.memory.stays | (num_main <= num_free - num_free // SMALL_SHARE)
    return jnp.where(takes_small & (heads[SMALL] != 0), SMALL, MAIN)


def _moved(queue: RankedQueue, block_id: Int[Array, ""]) -> Spared:
    """Move blocks from the small queue to the main one's end, or there to the end again with one hit less."""
    hits = jnp.minimum(queue.note(RankedQueue.HITS, block_id), MOST_HITS)
    is_small = queue.kind[block_id] == SMALL
    at_the_end = jnp.stack([queue.rank[block_id, 0], queue.now + 1])
    left = jnp.where(is_small, 0, hits - 1)
    return jnp.where(is_small, hits > 1, hits > 0), at_the_end, jnp.int32(MAIN), left


def _note_turn(
    queue: RankedQueue,
    notes: Int[Array, " 5"],
    kind: Int[Array, ""],
    spared: Bool[Array, ""],
    evicted: Bool[Array, ""],
) -> Ghosts:
    """Forget contents that are too many; then remember what is evicted from the small queue."""
    ghosts: Ghosts = queue.memory
    num_free = jnp.sum(queue.num_queued)
    max_main = (SMALL_SHARE - 1) * num_free // SMALL_SHARE
    holds, ring = spared | evicted, ghosts.is_kept.shape[0]

    def too_many(ghosts: Ghosts) -> Bool[Array, ""]:
        return holds & ((ghosts.num_kept > max_main) | (ghosts.newest - ghosts.oldest + 2 > ring))

    def forget(ghosts: Ghosts) -> Ghosts:
        at = ghosts.place(ghosts.oldest)
        was = ghosts.is_kept[at]
        return replace(
            ghosts,
            is_kept=ghosts.is_kept.at[at].set(jnp.minimum(was, 0)),
            oldest=ghosts.oldest + 1,
            num_kept=ghosts.num_kept - was,
        )

    ghosts = lax.while_loop(too_many, forget, ghosts)
    fingerprint = notes[RankedQueue.FINGERPRINT]
    at = ghosts.set_of(fingerprint)
    former = ghosts.contents[at]
    kept = ghosts.keeps(former[:, 1])
    is_known = jnp.any(kept & (former[:, 0] == fingerprint))
    remembers = evicted & (kind == SMALL) & ~is_known
    way = jnp.argmin(jnp.where(kept, former[:, 1] - ghosts.newest, -INT32_MAX))
    number = ghosts.newest + 1
    place = jnp.where(remembers, ghosts.place(number), ring)
    return replace(
        ghosts,
        contents=ghosts.contents.at[jnp.where(remembers, at, ghosts.contents.shape[0]), way].set(
            jnp.stack([fingerprint, number]), mode="drop"
        ),
        is_kept=ghosts.is_kept.at[place].set(1, mode="drop"),
        newest=ghosts.newest + remembers,
        num_kept=ghosts.num_kept + remembers,
        stays=spared & (kind == SMALL),
        is_full=ghosts.is_full | evicted,
    )


RANKING = Ranking(_as_it_was, spare=_moved, choose=_choose, num_kinds=2, memory=create, note_turn=_note_turn)


def take(
    ranking: Ranking,
    queue: RankedQueue,
    count: Int[Array, ""],
    max_count: int,
    *,
    place: int = FreeQueue.NOT_QUEUED,
) -> tuple[RankedQueue, Int[Array, " max_count"]]:
    """Take blocks, as `ranked_queue.take`; the first time with content, divide the queue into two first."""
    num_empty = queue.num_free - jnp.sum(queue.num_queued)
    divides = ~queue.memory.is_full & (count > num_empty)
    queue = lax.cond(divides, _divide, lambda same: same, queue)
    return ranked_queue.take(ranking, queue, count, max_count, place=place)


def _divide(queue: RankedQueue) -> RankedQueue:
    """Move all but the first tenth of the free blocks with content to the main queue. Costs O(num_blocks)."""
    num_free = jnp.sum(queue.num_queued)
    ids = jnp.arange(queue.num_blocks, dtype=jnp.int32)
    is_free = (queue.place >= 0) & ranked_queue.has_content(queue, ids)
    age = jnp.where(is_free, queue.rank[:, 1] - queue.now, INT32_MAX)
    num_small = num_free // SMALL_SHARE
    moves = is_free & (age >= jnp.sort(age)[num_small])
    queue = replace(
        queue,
        kind=jnp.where(moves, MAIN, queue.kind),
        num_queued=jnp.stack([num_small, num_free - num_small]),
    )
    return ranked_queue.play(queue, ids, jnp.ones(queue.num_blocks, bool))


def note_content(
    ranking: Ranking,
    queue: RankedQueue,
    ids: Int[Array, " n"],
    depth: Int[Array, " n"],
    fingerprint: Int[Array, " n"],
    mask: Bool[Array, " n"],
) -> RankedQueue:
    """Note that the masked blocks, which are held, now have content; what was remembered begins in the main
    queue, and is remembered no longer.
    """
    is_new = mask & (queue.note(RankedQueue.DEPTH, ids) == 0)
    queue = ranked_queue.note_content(ranking, queue, ids, depth, fingerprint, mask)
    ghosts: Ghosts = queue.memory
    former = ghosts.contents[ghosts.set_of(fingerprint)]  # [n, ways, 2]
    is_it = ghosts.keeps(former[:, :, 1]) & (former[:, :, 0] == fingerprint[:, None])
    is_back = is_new & jnp.any(is_it, axis=1)
    is_back &= first_equal(fingerprint, mask=is_back) == jnp.arange(ids.shape[0], dtype=jnp.int32)
    number = jnp.sum(jnp.where(is_it, former[:, :, 1], 0), axis=1)
    forgotten = jnp.where(is_back, ghosts.place(number), ghosts.is_kept.shape[0])
    return replace(
        queue,
        kind=queue.kind.at[jnp.where(is_new, ids, queue.num_blocks)].set(
            is_back.astype(jnp.int32), mode="drop"
        ),
        memory=replace(
            ghosts,
            is_kept=ghosts.is_kept.at[forgotten].set(0, mode="drop"),
            num_kept=ghosts.num_kept - jnp.sum(is_back, dtype=jnp.int32),
        ),
    )
