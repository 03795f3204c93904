"""Requests, one after the other, through the package's own block tables and prefix cache, in one compiled
program: each is looked up, holds what it hits, takes the rest, makes it findable, and gives all back when
another needs its row.

A block of a prompt is one symbol here (`traces.Blocks`), so the tables are of blocks of one token: what a
block holds is not looked at, only whether it is the same.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.memory import block_pool, block_table, prefix_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.entries import PIECE
from jaxpaged.memory.policies import Policy
from jaxpaged.status import Status

NO_SALT = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """What `traces.Blocks` says of some requests; one that holds nothing is passed over."""

    start: Int[Array, " n"]
    num_findable: Int[Array, " n"]
    num_lookup: Int[Array, " n"]
    num_held: Int[Array, " n"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """One cache that requests go through."""

    tables: BlockTables
    next_row: Int[Array, ""]
    status: Int[Array, ""]  # `Status` bits of all that was done: anything but OK is a bug


@functools.partial(jax.jit, static_argnames=("policy", "num_blocks", "max_blocks", "num_rows"))
def create(
    num_usable: Int[Array, ""], *, policy: Policy, num_blocks: int, max_blocks: int, num_rows: int
) -> Cache:
    """An empty cache of `num_usable` blocks, at most `num_blocks - 1`, for prompts of up to `max_blocks`.

    The arrays are of `num_blocks`, whatever is usable: so caches of all sizes share one program. The last
    `num_rows` requests hold their blocks at the same time.
    """
    pool = block_pool.create(num_blocks, policy)
    pool, info = block_pool.allocate(pool, num_blocks - 1 - num_usable, num_blocks - 1)
    pool = replace(pool, prefix_cache=prefix_cache.create(num_blocks, 1))
    return Cache(block_table.create(pool, num_rows, max_blocks, 1), jnp.int32(0), info.status)


@functools.partial(jax.jit, donate_argnames="cache")
def replay(cache: Cache, symbols: Int[Array, " total"], requests: Requests) -> tuple[Cache, Int[Array, " n"]]:
    """Let the requests go through, and say how many blocks each has hit. The cache is donated.

    Each takes the row of the one that has been there for longest; where blocks are short, those after it go
    early, too.
    """

    return lax.scan(lambda cache, request: _send(cache, symbols, request), cache, requests)


def _send(cache: Cache, symbols: Int[Array, " total"], request: Requests) -> tuple[Cache, Int[Array, ""]]:
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
    num_hits, chain = hit.chain.num_blocks, jax.tree.map(lambda leaf: leaf[None], hit.chain)
    tables, adopted = block_table.adopt(tables, row[None], hit.block_ids[None], chain, jnp.ones(1, bool))
    type Carry = tuple[BlockTables, Int[Array, ""]]

    def is_short(carry: tuple[Int[Array, ""], BlockTables, Int[Array, ""]]) -> Bool[Array, ""]:
        after, tables, _ = carry
        return (after < num_rows) & (request.num_held - num_hits > tables.pool.num_free)

    def go_early(
        carry: tuple[Int[Array, ""], BlockTables, Int[Array, ""]],
    ) -> tuple[Int[Array, ""], BlockTables, Int[Array, ""]]:
        after, tables, status = carry
        tables, freed = block_table.free_rows(tables, jnp.arange(num_rows) == (row + after) % num_rows)
        return after + 1, tables, status | freed.status

    status = cache.status | freed.status | adopted.status
    if num_rows > 1:
        _, tables, status = lax.while_loop(is_short, go_early, (jnp.int32(1), tables, status))

    def wants_blocks(carry: Carry) -> Bool[Array, ""]:
        tables, status = carry
        return (tables.seq_lens[row] < request.num_held) & (status == Status.OK)

    def take(carry: Carry) -> Carry:
        tables, status = carry
        count = jnp.minimum(request.num_held - tables.seq_lens[row], PIECE)
        tables, info = block_table.append(tables, jnp.where(is_row, count, 0), max_new_blocks=PIECE)
        return tables, status | info.status

    def is_unfindable(carry: Carry) -> Bool[Array, ""]:
        tables, status = carry
        return (tables.chains.num_blocks[row] < request.num_findable) & (status == Status.OK)

    def publish(carry: Carry) -> Carry:
        tables, status = carry
        num_tokens = jnp.minimum(tables.chains.num_blocks[row] + PIECE, request.num_findable)
        num_tokens = jnp.where(is_row, num_tokens, 0)
        tables, info = block_table.cache_full_blocks(tables, symbols_at, num_tokens, max_blocks=PIECE)
        return tables, status | info.status

    tables, status = lax.while_loop(wants_blocks, take, (tables, status))
    tables, status = lax.while_loop(is_unfindable, publish, (tables, status))
    return Cache(tables, (row + 1) % num_rows, status), num_hits
