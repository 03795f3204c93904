"""W-TinyLFU: a window for new blocks, and a main part that a block must earn by how often it was used.

The window holds a hundredth, and the main part the rest, of the most free blocks with content that there
were. Both are in the order of use. While the main part has room, the window's first moves on to it. Else the
window's first meets the main part's, and the one used less often goes.

The main part has two halves. A block that is found in probation is protected from then on; while more than
four fifths of the main part are protected, the first of these is in probation again.

How often contents were used is estimated by a count-min sketch: four counts for each content, of which the
smallest is believed. After ten uses for each block all counts are halved. A count is halved when it is next
looked at, as often as all were halved since it was written: so halving costs nothing.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import next_power_of_two
from jaxpaged.memory import ranked_queue
from jaxpaged.memory.ranked_queue import RankedQueue, Ranking, Spared

WINDOW, PROBATION, PROTECTED = range(3)
WINDOW_SHARE = 100  # the window has one block in so many
MOST_USES = 15  # that are counted
USES_A_HALVING = 10  # for each block
FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)  # odd


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Uses:
    """Uses of contents, and what the parts hold."""

    counts: Int[Array, " places"]  # four rows, one after the other
    halvings: Int[Array, " places"]  # of all counts, up to when each was written
    num_uses: Int[Array, ""]  # since the last halving, and half of those before
    num_halvings: Int[Array, ""]
    num_main: Int[Array, ""]  # blocks of the main part, held ones included
    most: Int[Array, ""]  # free blocks with content that there were

    @property
    def row_size(self) -> int:
        return self.counts.shape[0] // len(FACTORS)


def create(num_blocks: int) -> Uses:
    """Make a sketch for the blocks of a pool, in which nothing was used."""
    nothing = jnp.zeros(len(FACTORS) * 2 * next_power_of_two(num_blocks), jnp.int32)
    zero = jnp.int32(0)
    return Uses(nothing, nothing, zero, zero, zero, zero)


def _places(uses: Uses, fingerprint: Int[Array, "*n"]) -> Int[Array, "*n 4"]:
    """Return where in the sketch the counts of contents are."""
    hashed = fingerprint.astype(jnp.uint32)[..., None] * jnp.array(FACTORS, jnp.uint32)
    place = hashed >> jnp.uint32(33 - uses.row_size.bit_length())
    return place.astype(jnp.int32) + uses.row_size * jnp.arange(len(FACTORS), dtype=jnp.int32)


def _counts(uses: Uses, places: Int[Array, "*n"]) -> Int[Array, "*n"]:
    return uses.counts[places] >> jnp.minimum(uses.num_halvings - uses.halvings[places], 31)


def _use(uses: Uses, fingerprint: Int[Array, " n"], mask: Bool[Array, " n"]) -> Uses:
    """Count a use of each masked content, as if one after the other."""
    places = _places(uses, fingerprint).ravel()
    target = jnp.where(jnp.repeat(mask, len(FACTORS)), places, uses.counts.shape[0])
    counts = uses.counts.at[target].set(_counts(uses, places), mode="drop")
    counts = counts.at[target].add(1, mode="drop").at[target].min(MOST_USES, mode="drop")
    return replace(
        uses,
        counts=counts,
        halvings=uses.halvings.at[target].set(uses.num_halvings, mode="drop"),
        num_uses=uses.num_uses + jnp.sum(mask, dtype=jnp.int32),
    )


def _num_used(queue: RankedQueue, block_id: Int[Array, ""]) -> Int[Array, ""]:
    places = _places(queue.memory, queue.note(RankedQueue.FINGERPRINT, block_id))
    return jnp.min(_counts(queue.memory, places))


def _moves_and_takes_window(
    queue: RankedQueue, heads: Int[Array, " num_kinds"]
) -> tuple[Bool[Array, ""], Bool[Array, ""], Bool[Array, ""]]:
    """Return whether the protected part's first moves, whether the window's does, and whether else the
    window's is taken.
    """
    window, probation, protected = queue.num_queued
    smallest, room = _smallest_window(queue.memory), _room(queue.memory)
    demotes = 5 * protected > 4 * (probation + protected)
    has_main = probation + protected > 0
    wins = has_main & (room >= 0) & (_num_used(queue, heads[WINDOW]) > _num_used(queue, heads[PROBATION]))
    grows = (room > 0) & (window > smallest)
    moves = ~demotes & (window > 0) & (grows | wins)
    return demotes, moves, (window > 0) & ((room >= 0) | ~has_main)


def _smallest_window(uses: Uses) -> Int[Array, ""]:
    return jnp.maximum(1, uses.most // WINDOW_SHARE)


def _room(uses: Uses) -> Int[Array, ""]:
    """Return how many blocks the main part has room for; negative if it has too many."""
    return uses.most - _smallest_window(uses) - uses.num_main


def _choose(queue: RankedQueue, heads: Int[Array, " num_kinds"]) -> Int[Array, ""]:
    is_empty = (heads[WINDOW] != 0) & ~ranked_queue.has_content(queue, heads[WINDOW])
    demotes, moves, takes_window = _moves_and_takes_window(queue, heads)
    kind = jnp.where(moves | takes_window, WINDOW, PROBATION)
    return jnp.where(is_empty, WINDOW, jnp.where(demotes, PROTECTED, kind))


def _moved(queue: RankedQueue, block_id: Int[Array, ""]) -> Spared:
    """Move the chosen block to the end of probation, unless it is to be taken."""
    kind = queue.kind[block_id]
    _, moves, _ = _moves_and_takes_window(queue, queue.winners[-1])
    at_the_end = jnp.stack([jnp.zeros_like(queue.now), queue.now + 1])
    spared = (kind == PROTECTED) | (moves & (kind == WINDOW))
    return spared, at_the_end, jnp.int32(PROBATION), queue.note(RankedQueue.HITS, block_id)


def _note_turn(
    queue: RankedQueue,
    notes: Int[Array, " 5"],
    kind: Int[Array, ""],
    spared: Bool[Array, ""],
    evicted: Bool[Array, ""],
) -> Uses:
    uses: Uses = queue.memory
    halves = evicted & (uses.num_uses >= USES_A_HALVING * uses.most)
    enters, leaves = spared & (kind == WINDOW), evicted & (kind != WINDOW)
    return replace(
        uses,
        num_uses=jnp.where(halves, uses.num_uses // 2, uses.num_uses),
        num_halvings=uses.num_halvings + halves,
        num_main=uses.num_main + enters - leaves,
    )


def _by_use(
    queue: RankedQueue, ids: Int[Array, " n"], is_first: Bool[Array, " n"], now: Int[Array, " n"]
) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    return jnp.zeros_like(now), now


RANKING = Ranking(_by_use, spare=_moved, choose=_choose, num_kinds=3, memory=create, note_turn=_note_turn)


def push(
    ranking: Ranking, queue: RankedQueue, ids: Int[Array, " n"], mask: Bool[Array, " n"], *, content: bool
) -> RankedQueue:
    """Give the masked ids back, as `ranked_queue.push`; blocks without content leave the main part."""
    leave = jnp.sum(mask & (queue.kind[ids] != WINDOW), dtype=jnp.int32)
    queue = ranked_queue.push(ranking, queue, ids, mask, content=content)
    uses: Uses = queue.memory
    if content:
        uses = replace(uses, most=jnp.maximum(uses.most, jnp.sum(queue.num_queued)))
    else:
        uses = replace(uses, num_main=uses.num_main - leave)
    return replace(queue, memory=uses)


def note_hits(queue: RankedQueue, ids: Int[Array, " n"], mask: Bool[Array, " n"]) -> RankedQueue:
    """Note that the masked blocks, which are held by now, were found: a use; those in probation become
    protected.
    """
    queue = ranked_queue.note_hits(queue, ids, mask)
    promoted = jnp.where(mask & (queue.kind[ids] == PROBATION), ids, queue.num_blocks)
    return replace(
        queue,
        kind=queue.kind.at[promoted].set(PROTECTED, mode="drop"),
        memory=_use(queue.memory, queue.note(RankedQueue.FINGERPRINT, ids), mask),
    )


def note_content(
    ranking: Ranking,
    queue: RankedQueue,
    ids: Int[Array, " n"],
    depth: Int[Array, " n"],
    fingerprint: Int[Array, " n"],
    mask: Bool[Array, " n"],
) -> RankedQueue:
    """Note that the masked blocks, which are held, now have content: a use of it, if it is new."""
    is_new = mask & (queue.note(RankedQueue.DEPTH, ids) == 0)
    queue = ranked_queue.note_content(ranking, queue, ids, depth, fingerprint, mask)
    return replace(queue, memory=_use(queue.memory, fingerprint, is_new))
