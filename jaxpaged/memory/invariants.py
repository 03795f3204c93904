"""Invariants of a state after every transition, checked on the host with NumPy. For tests and debugging."""

from collections import Counter

import jax
import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory.block_pool import NULL_BLOCK, BlockPool
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.free_queue import FreeQueue
from jaxpaged.memory.prefix_cache import PrefixCache
from jaxpaged.memory.ranked_queue import RankedQueue


class InvariantError(AssertionError):
    """A state that no history of transitions can lead to; the message names what disagrees."""


def check_invariants(state: BlockTables | BlockPool) -> None:
    """Raise `InvariantError` unless `state` is consistent.

    Free, used and null blocks are all blocks, each once; the free queue's parts agree; reference counts are
    those of the tables (of tables only); what is cached can be found, and what can be found is cached.
    """
    state = jax.device_get(state)
    pool = state.pool if isinstance(state, BlockTables) else state
    _check_pool(pool)
    if pool.prefix_cache is not None:
        _check_prefix_cache(pool.prefix_cache)
    if isinstance(state, BlockTables):
        _check_tables(state)


def free_block_ids(pool: BlockPool) -> list[int]:
    """Return the free blocks in the order in which they will be given out; size class by size class."""
    queues = zip(jax.device_get(pool.queues), pool.offsets, strict=True)
    return [number + offset for queue, offset in queues for number in _queued_ids(queue)]


def _require(condition: object, sentence: str) -> None:
    if not condition:
        raise InvariantError(sentence)


def _queued_ids(queue: FreeQueue) -> list[int]:
    if isinstance(queue, RankedQueue):  # in order of rank; a policy may spare some blocks
        free, rank = np.flatnonzero(queue.place >= 0), queue.rank - queue.clock
        return [int(free[i]) for i in np.lexsort(rank[free].T[::-1])]
    head, span, _ = queue.counters
    places = (int(head) + np.arange(int(span))) % queue.capacity
    return [int(block_id) for block_id in queue.ring[places] if block_id >= 0]


def _check_pool(pool: BlockPool) -> None:
    for queue, offset in zip(pool.queues, pool.offsets, strict=True):
        _check_queue(queue, offset)


def _check_queue(queue: FreeQueue, offset: int) -> None:
    """Check the queue of a size class, whose blocks have ids beyond `offset`."""
    head, span, num_free = queue.counters
    _require(0 <= span <= queue.capacity, f"the queue spans {span} of {queue.capacity} places")
    _require(0 <= head < max(1, queue.capacity), f"the queue's head is {head}, of {queue.capacity} places")
    free = _queued_ids(queue)
    if isinstance(queue, RankedQueue):
        for kind, winner in enumerate(queue.winners[-1]):
            first = next((number for number in free if queue.kind[number] == kind), NULL_BLOCK)
            _require(winner == first, f"of kind {kind} block {first} is the first, but {winner} has won")
    _require(len(free) == num_free, f"the queue holds {free}, num_free is {num_free}")
    _require(len(set(free)) == len(free), f"a block is in the queue twice: {free}")
    _require(NULL_BLOCK not in free, "the null block is in the free queue")
    holders = FreeQueue.NOT_QUEUED - queue.place[NULL_BLOCK]
    _require(holders == 0, f"the null block has {holders} holders")
    free_set = set(free)
    for number in range(1, queue.num_blocks):
        block_id = number + offset
        place = queue.place[number]
        holders = FreeQueue.NOT_QUEUED - place
        is_free = number in free_set
        if place < 0:
            _require(
                not is_free and holders > 0,
                f"block {block_id} has {holders} holders, and is free: {is_free}",
            )
        else:
            _require(is_free, f"block {block_id} is not free, but its place is {place}")
            if isinstance(queue, RankedQueue):
                continue
            queued_ids = queue.ring[place]
            _require(
                queued_ids == number, f"block {block_id} should be at place {place}, where {queued_ids} is"
            )


def _check_tables(tables: BlockTables) -> None:
    held: Counter[int] = Counter()
    for number, line in enumerate(tables.block_tables):
        row, group = divmod(number, tables.num_groups)
        which = f"row {row}" if tables.num_groups == 1 else f"row {row}, group {group},"
        num_blocks = cdiv(int(tables.seq_lens[row]), tables.block_size)
        num_skipped = int(tables.num_skipped[number])
        first = tables.first_blocks[group] if tables.first_blocks and num_skipped else 0
        _require(
            0 <= num_skipped <= num_blocks - first and num_blocks <= tables.max_blocks_per_seq,
            f"{which} has {num_blocks} blocks, {num_skipped} of them out of its window",
        )
        for place, block_id in enumerate(line):
            is_held = place < num_blocks and not first <= place < first + num_skipped
            _require(
                (block_id != NULL_BLOCK) == is_held,
                f"{which} has {num_blocks} blocks, {num_skipped} of them out of its window, but names "
                f"block {block_id} at place {place}",
            )
        held.update(int(block_id) for block_id in line if block_id != NULL_BLOCK)
        _check_class(tables, which, tables.classes[group] if tables.classes else 0, np.asarray(line))
    places = [queue.place[min(number, 1) :] for number, queue in enumerate(tables.pool.queues)]
    place_of = np.concatenate(places)
    for used_id in range(1, tables.pool.num_blocks):
        count = max(FreeQueue.NOT_QUEUED - place_of[used_id], 0)
        _require(
            held[used_id] == count,
            f"block {used_id} has {count} holders, but {held[used_id]} rows name it",
        )


def _check_class(tables: BlockTables, which: str, size_class: int, line: np.ndarray) -> None:
    """Check that all blocks of a line are of this size class."""
    first = tables.pool.offsets[size_class] + 1
    end = first + tables.pool.queues[size_class].num_blocks - 1
    for block_id in line[line != NULL_BLOCK].tolist():
        _require(
            first <= block_id < end, f"{which} names block {block_id}, which is not of class {size_class}"
        )


def _check_prefix_cache(cache: PrefixCache) -> None:
    _require(cache.slot[NULL_BLOCK] == PrefixCache.NO_SLOT, "the null block has content")
    cached = {int(block_id) for block_id in np.flatnonzero(cache.slot != PrefixCache.NO_SLOT)}
    found_ids: set[int] = set()
    identities: dict[tuple[object, ...], int] = {}
    num_buckets = cache.num_slots // PrefixCache.BUCKET
    for slot in map(int, np.flatnonzero(cache.last)):
        ring = _ring(cache, slot)
        first = ring[0]
        for block_id in ring:
            _require(
                cache.slot[block_id] == slot,
                f"block {block_id} is in slot {slot}'s ring, but says slot {cache.slot[block_id]}",
            )
            for name in ("hash", "parent", "token_ids"):
                mine, theirs = getattr(cache, name)[block_id], getattr(cache, name)[first]
                _require(
                    np.array_equal(mine, theirs),
                    f"blocks {block_id} and {first} are one node, but their {name} are {mine} and {theirs}",
                )
        _require(
            slot // PrefixCache.BUCKET in (np.asarray(cache.hash[first]) % num_buckets).tolist(),
            f"slot {slot} is in neither bucket of its hash {cache.hash[first]}",
        )
        identity = (
            *cache.parent[first].tolist(),
            *cache.token_ids[first].tolist(),
            *cache.hash[first].tolist(),
        )
        _require(identity not in identities, f"slots {identities.get(identity)} and {slot} are the same node")
        identities[identity] = slot
        found_ids.update(ring)
    _require(cached == found_ids, f"blocks {cached - found_ids} have content that cannot be found")


def _ring(cache: PrefixCache, slot: int) -> list[int]:
    """Return the blocks of a node, oldest first."""
    last = int(cache.last[slot])
    ring = [int(cache.neighbours[last, 0])]
    while ring[-1] != last:
        after = int(cache.neighbours[ring[-1], 0])
        _require(after not in ring, f"the ring of slot {slot} does not close: {[*ring, after]}")
        ring.append(after)
    for before, after in zip([last, *ring], ring, strict=False):
        _require(
            cache.neighbours[after, 1] == before,
            f"in the ring of slot {slot} block {before} comes before {after}, "
            f"which names {cache.neighbours[after, 1]}",
        )
    return ring
