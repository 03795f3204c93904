"""Requests, one after the other, through the package's own block tables and prefix cache, in one compiled
program: each is looked up, holds what it hits, takes the rest, makes it findable, and gives all back.

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
    """One cache that requests go through: a table of one row, and so many of its pool's blocks in use."""

    tables: BlockTables
    status: Int[Array, ""]  # `Status` bits of all that was done: anything but OK is a bug


@functools.partial(jax.jit, static_argnames=("policy", "num_blocks", "max_blocks"))
def create(num_usable: Int[Array, ""], *, policy: Policy, num_blocks: int, max_blocks: int) -> Cache:
    """An empty cache of `num_usable` blocks, at most `num_blocks - 1`, for prompts of up to `max_blocks`.

    The arrays are of `num_blocks`, whatever is usable: so caches of all sizes share one program.
    """
    pool = block_pool.create(num_blocks, policy)
    pool, info = block_pool.allocate(pool, num_blocks - 1 - num_usable, num_blocks - 1)
    pool = replace(pool, prefix_cache=prefix_cache.create(num_blocks, 1))
    return Cache(block_table.create(pool, 1, max_blocks, 1), info.status)


@functools.partial(jax.jit, donate_argnames="cache")
def replay(cache: Cache, symbols: Int[Array, " total"], requests: Requests) -> tuple[Cache, Int[Array, " n"]]:
    """Let the requests go through, and say how many blocks each has hit. The cache is donated."""

    def one(cache: Cache, request: Requests) -> tuple[Cache, Int[Array, ""]]:
        def symbols_at(*at: Int[Array, "*n"]) -> Int[Array, "*n"]:
            return symbols.at[request.start + at[-1]].get(mode="clip")

        tables, status = cache.tables, cache.status
        max_tokens = tables.max_blocks_per_seq + 1
        salt = jnp.int32(NO_SALT)
        assert tables.pool.prefix_cache is not None
        hit = prefix_cache.lookup(
            tables.pool.prefix_cache, symbols_at, request.num_lookup + 1, salt, max_tokens=max_tokens
        )
        row, chain = jnp.zeros(1, jnp.int32), jax.tree.map(lambda leaf: leaf[None], hit.chain)
        tables, info = block_table.adopt(tables, row, hit.block_ids[None], chain, jnp.ones(1, bool))
        status |= info.status
        type Carry = tuple[BlockTables, Int[Array, ""]]

        def is_short(carry: Carry) -> Bool[Array, ""]:
            return carry[0].seq_lens[0] < request.num_held

        def take(carry: Carry) -> Carry:
            tables, status = carry
            count = jnp.minimum(request.num_held - tables.seq_lens, PIECE)
            tables, info = block_table.append(tables, count, max_new_blocks=PIECE)
            # A refusal would be a bug; with what it says the loop ends.
            refused = jnp.where(info.status == 0, tables.seq_lens, request.num_held)
            return replace(tables, seq_lens=refused), status | info.status

        tables, status = lax.while_loop(is_short, take, (tables, status))

        def is_unfindable(carry: Carry) -> Bool[Array, ""]:
            return carry[0].chains.num_blocks[0] < request.num_findable

        def publish(carry: Carry) -> Carry:
            tables, status = carry
            num_tokens = jnp.minimum(tables.chains.num_blocks + PIECE, request.num_findable)
            tables, info = block_table.cache_full_blocks(tables, symbols_at, num_tokens, max_blocks=PIECE)
            return tables, status | info.status

        tables, status = lax.while_loop(is_unfindable, publish, (tables, status))
        tables, freed = block_table.free_rows(tables, jnp.ones(1, bool))
        return Cache(tables, status | freed.status), hit.chain.num_blocks

    return lax.scan(one, cache, requests)
