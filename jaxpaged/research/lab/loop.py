"""Requests, one after the other, through the package's own block tables and prefix cache, in one compiled
program: each is looked up, holds what it hits, takes the rest, makes it findable, and gives all back when
another needs its row.

A block of a prompt is one symbol here (`traces.Blocks`), so the tables are of blocks of one token: what a
block holds is not looked at, only whether it is the same.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.memory import block_pool, block_table, group_content, prefix_cache
from jaxpaged.memory.block_pool import BlockPool
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.memory.entries import CHUNK, after_reading, in_chunks
from jaxpaged.memory.policies import Policy, sized
from jaxpaged.memory.ranked_queue import RankedQueue
from jaxpaged.status import Status

NO_SALT = 0
LIFETIMES = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """Requests as `traces.Blocks` describes them; one that holds nothing is skipped."""

    start: Int[Array, " n"]
    num_findable: Int[Array, " n"]
    num_lookup: Int[Array, " n"]
    num_held: Int[Array, " n"]
    arrival_ms: Int[Array, " n"]
    # Start and `num_lookup` of the requests that wait meanwhile, the next one first; None: nobody asks.
    waiting: Int[Array, "n num_waiting 2"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """State of one simulated cache: block tables and statistics."""

    tables: BlockTables
    next_row: Int[Array, ""]
    since: Int[Array, " num_blocks"]  # ms when each block got its content, and 1; 0: it has none
    lifetimes: Int[Array, " lifetimes"]  # evicted blocks whose content was there for less than 2**i ms
    status: Int[Array, ""]  # `Status` bits of all that was done: anything but OK is a bug


@functools.partial(jax.jit, static_argnames=("policy", "num_blocks", "max_blocks", "num_rows", "kinds"))
def create(
    num_usable: Int[Array, ""],
    *,
    policy: Policy,
    num_blocks: int,
    max_blocks: int,
    num_rows: int,
    kinds: tuple[CacheSpec, ...] = (),
) -> Cache:
    """Create an empty cache of `num_usable` blocks, at most `num_blocks - 1`, for prompts of up to
    `max_blocks`.

    The arrays are of `num_blocks`, whatever is usable: so caches of all sizes share one program. The last
    `num_rows` requests hold their blocks at the same time. `kinds` are what the groups of layers read, in
    blocks; empty: there is one, which reads everything.
    """
    pool, status = limited_pool(num_usable, policy, num_blocks, 1)
    first_blocks = tuple(kind.first_tokens for kind in kinds)
    return Cache(
        block_table.create(
            pool,
            num_rows,
            max_blocks,
            block_size=1,
            num_groups=max(len(kinds), 1),
            first_blocks=first_blocks if any(first_blocks) else (),
        ),
        jnp.int32(0),
        jnp.zeros(num_blocks, jnp.int32),
        jnp.zeros(LIFETIMES, jnp.int32),
        status,
    )


def limited_pool(
    num_usable: Int[Array, ""], policy: Policy, num_blocks: int, block_size: int
) -> tuple[BlockPool, Int[Array, ""]]:
    """Create a pool with a prefix cache in which all but `num_usable` blocks are held for ever; return its
    status, too.
    """
    pool = block_pool.create(num_blocks, sized(policy, block_size))
    pool, info = block_pool.allocate(pool, num_blocks - 1 - num_usable, num_blocks - 1)
    return replace(pool, prefix_cache=prefix_cache.create(num_blocks, block_size)), info.status


def most_held[T: (np.ndarray, Array)](num_blocks: T, kinds: Sequence[CacheSpec], step_blocks: int) -> T:
    """Return how many blocks a prompt of so many holds at most at any time, in all groups."""
    total = num_blocks * 0
    for kind in kinds:
        max_kept = kind.most_kept(step_blocks)
        total += num_blocks if max_kept is None else (num_blocks).clip(max=max_kept + kind.first_tokens)
    return total


@functools.partial(jax.jit, donate_argnames="cache", static_argnames=("kinds", "step_blocks"))
def replay(
    cache: Cache,
    symbols: Int[Array, " total"],
    next_use: Int[Array, " total"] | None,
    requests: Requests,
    *,
    kinds: tuple[CacheSpec, ...] = (),
    step_blocks: int = CHUNK,
) -> tuple[Cache, Int[Array, " n"]]:
    """Pass the requests through the cache, and return the number of blocks that each has hit. The cache is
    donated.

    Each takes the row of the one that has been there for longest; where blocks are short, those after it go
    early, too. `next_use`, of each symbol, is for policies that know the future. With `kinds`, as in
    `create`, a prompt comes in steps of `step_blocks`, and after each what no layer reads any more is given
    back.
    """

    def send(cache: Cache, request: Requests) -> tuple[Cache, Int[Array, ""]]:
        return _send(cache, symbols, next_use, request, kinds, step_blocks)

    return lax.scan(send, cache, requests)


def _send(
    cache: Cache,
    symbols: Int[Array, " total"],
    next_use: Int[Array, " total"] | None,
    request: Requests,
    kinds: tuple[CacheSpec, ...],
    step_blocks: int,
) -> tuple[Cache, Int[Array, ""]]:
    tables, row = cache.tables, cache.next_row
    num_rows = tables.max_seqs
    is_row = jnp.arange(num_rows) == row
    tables, freed = block_table.free_rows(tables, is_row)
    assert tables.pool.prefix_cache is not None

    def symbols_at(*at: Int[Array, "*n"]) -> Int[Array, "*n"]:
        return symbols.at[request.start + at[-1]].get(mode="clip")

    hit = prefix_cache.lookup(
        tables.pool.prefix_cache,
        symbols_at,
        request.num_lookup + 1,
        jnp.int32(NO_SALT),
        max_tokens=tables.max_blocks_per_seq + 1,
    )
    if len(kinds) > 1:
        hit = group_content.lookup(tables.pool.prefix_cache, hit, kinds)
    num_hits, chain = hit.chain.num_blocks, jax.tree.map(lambda leaf: leaf[None], hit.chain)
    block_ids = hit.block_ids if len(kinds) > 1 else hit.block_ids[None]
    tables, adopted = block_table.adopt(tables, row[None], block_ids, chain, jnp.ones(1, bool))
    need = request.num_held - num_hits
    if kinds:
        tables, _ = block_table.slide_windows(tables, is_row, kinds)
        need = most_held(request.num_held, kinds, step_blocks) - tables.num_held[row]
    type Carry = tuple[BlockTables, Int[Array, ""]]
    type Leaving = tuple[Int[Array, ""], BlockTables, Int[Array, ""]]

    def is_short(carry: Leaving) -> Bool[Array, ""]:
        after, tables, _ = carry
        return (after < num_rows) & (need > tables.pool.num_free)

    def go_early(carry: Leaving) -> Leaving:
        after, tables, status = carry
        tables, freed = block_table.free_rows(tables, jnp.arange(num_rows) == (row + after) % num_rows)
        return after + 1, tables, status | freed.status

    status = cache.status | freed.status | adopted.status
    if request.waiting is not None:
        tables = _note_waiting(tables, symbols, request.waiting)
    if num_rows > 1:
        _, tables, status = lax.while_loop(is_short, go_early, (jnp.int32(1), tables, status))

    def wants_blocks(carry: Carry) -> Bool[Array, ""]:
        tables, status = carry
        return (tables.seq_lens[row] < request.num_held) & (status == Status.OK)

    def take(carry: Carry) -> Carry:
        tables, status = carry
        count = jnp.minimum(request.num_held - tables.seq_lens[row], CHUNK)
        tables, info = block_table.append(tables, jnp.where(is_row, count, 0), max_new_blocks=CHUNK)
        return tables, status | info.status

    def is_unfindable(carry: Carry) -> Bool[Array, ""]:
        tables, status = carry
        return (tables.chains.num_blocks[row] < request.num_findable) & (status == Status.OK)

    def publish(carry: Carry) -> Carry:
        tables, status = carry
        num_tokens = jnp.minimum(tables.chains.num_blocks[row] + CHUNK, request.num_findable)
        num_tokens = jnp.where(is_row, num_tokens, 0)
        tables, info = block_table.cache_full_blocks(tables, symbols_at, num_tokens, max_blocks=CHUNK)
        return tables, status | info.status

    def compute(carry: Carry) -> Carry:
        """Compute one step of a prompt: allocate blocks, publish them, and free those that no layer reads."""
        tables, status = carry
        count = jnp.where(is_row, jnp.minimum(request.num_held - tables.seq_lens[row], step_blocks), 0)
        tables, info = block_table.append(tables, count, max_new_blocks=step_blocks * len(kinds))
        num_tokens = jnp.where(is_row, jnp.minimum(tables.seq_lens[row], request.num_findable), 0)
        num_tokens = jnp.maximum(num_tokens, jnp.where(is_row, tables.chains.num_blocks[row], 0))
        tables, cached = block_table.cache_full_blocks(tables, symbols_at, num_tokens, max_blocks=step_blocks)
        tables, slid = block_table.slide_windows(tables, is_row, kinds)
        return tables, status | info.status | cached.status | slid.status

    if kinds:
        tables, status = lax.while_loop(wants_blocks, compute, (tables, status))
    else:
        tables, status = lax.while_loop(wants_blocks, take, (tables, status))
        tables, status = lax.while_loop(is_unfindable, publish, (tables, status))
    if next_use is not None:
        tables = _foresee(tables, row, next_use, request)
    since, lifetimes = _age(cache, tables, row, num_hits, request)
    return Cache(tables, (row + 1) % num_rows, since, lifetimes, status), num_hits


def _age(
    cache: Cache, tables: BlockTables, row: Int[Array, ""], num_hits: Int[Array, ""], request: Requests
) -> tuple[Int[Array, " num_blocks"], Int[Array, " lifetimes"]]:
    """Note how old the content was that the row's new blocks had, and since when they have theirs."""
    type Ages = tuple[Int[Array, " num_blocks"], Int[Array, " lifetimes"]]

    def note(_: Array, k: Array, used: Array, ages: Ages) -> Ages:
        since, lifetimes = ages
        place = num_hits + k
        block_id = jnp.where(used, tables.block_tables[tables.line_of(row), place], 0)
        old, now = since[block_id], request.arrival_ms + 1
        bits = LIFETIMES - lax.clz(now - old)
        lifetimes = lifetimes.at[jnp.where(used & (old > 0), bits, LIFETIMES)].add(1, mode="drop")
        new = after_reading(jnp.minimum(old, 0), jnp.where(place < request.num_findable, now, 0))
        target = jnp.where(used, block_id, since.shape[0])
        return since.at[target].set(new, mode="drop"), lifetimes

    counts = (request.num_held - num_hits)[None]
    return in_chunks(counts, note, (cache.since, cache.lifetimes))


def _note_waiting(
    tables: BlockTables, symbols: Int[Array, " total"], waiting: Int[Array, "num_waiting 2"]
) -> BlockTables:
    """Tell the policy which blocks waiting requests will find: see `step.waiting.note_waiting`."""
    pool, cache, num_waiting = tables.pool, tables.pool.prefix_cache, waiting.shape[0]
    assert cache is not None
    assert pool.policy.note_waiting is not None

    def mark(place: int | Int[Array, ""], wanted: Int[Array, " num_blocks"]) -> Int[Array, " num_blocks"]:
        start, num_lookup = waiting[place]
        hit = prefix_cache.lookup(
            cache,
            lambda *at: symbols.at[start + at[-1]].get(mode="clip"),
            num_lookup + 1,
            jnp.int32(NO_SALT),
            max_tokens=tables.max_blocks_per_seq + 1,
        )

        def note(_: Array, k: Array, used: Array, wanted: Array) -> Array:
            block_ids = jnp.where(used, hit.block_ids[k], pool.num_blocks)
            return wanted.at[block_ids].max(num_waiting - place, mode="drop")

        return in_chunks(hit.chain.num_blocks[None], note, wanted)

    wanted = lax.fori_loop(0, num_waiting, mark, jnp.zeros(pool.num_blocks, jnp.int32))
    queue = pool.policy.note_waiting(pool.free_queue, wanted)
    return replace(tables, pool=replace(pool, free_queue=queue))


def _foresee(
    tables: BlockTables, row: Int[Array, ""], next_use: Int[Array, " total"], request: Requests
) -> BlockTables:
    """Note of the row's blocks with content when that is asked for next."""

    def note(_: Array, k: Array, used: Array, notes: Array) -> Array:
        block_id = jnp.where(used, tables.block_tables[row, k], tables.pool.num_blocks)
        value = next_use.at[request.start + k].get(mode="clip")
        return notes.at[block_id, RankedQueue.NEXT_USE].set(value, mode="drop")

    queue = tables.pool.free_queue
    assert isinstance(queue, RankedQueue)
    noted = replace(queue, notes=in_chunks(request.num_findable[None], note, queue.notes))
    return replace(tables, pool=replace(tables.pool, free_queue=noted))
