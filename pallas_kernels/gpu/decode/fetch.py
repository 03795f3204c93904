"""The producer of a program of decode attention: it fetches queries, and tiles of K and V.

The queries of a unit of work come into a ring of their own; with a cache of 4 bits a number the newest tokens
of K come with them.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import int4_cache
from pallas_kernels.gpu.attention import fetch_tile, last_block, token_finder
from pallas_kernels.gpu.common import Extras
from pallas_kernels.gpu.decode.program import Problem, Scratch, WorkUnit, group_heads


def produce(
    p: Problem,
    work: WorkUnit,
    number: jax.Array,
    gmem: Any,
    extras: Extras,
    scratch: Scratch,
    done: jax.Array,
    warp: jax.Array,
) -> jax.Array:
    """Fetch this warp's copies for the program's unit of work of that number.

    gmem: `support.Arrays`, as refs.
    done: tiles that were fetched for the units before.

    Returns: the number of tiles fetched so far.
    """
    pl.when(warp == 0)(lambda: _fetch_queries(p, work, number, gmem, extras, scratch))
    first_tile, num_tiles = work.tiles(p)
    find = token_finder(p, gmem.block_tables, work.table, work.start, work.end, extras)

    def fetch(i: jax.Array, _: None) -> None:
        slot = lax.rem(done + i, jnp.int32(p.num_stages))

        @pl.when(done + i >= p.num_stages)
        def _wait() -> None:
            p.waiter(p.num_stages, done, i, is_refill=True)(scratch.ring.k_free.at[slot])

        first_token = (first_tile + i) * p.tile_kv
        full = scratch.ring.k_full.at[slot]
        fetch_tile(p, (0, 1), first_token, find, gmem, extras, scratch.ring, slot, full, work.kv_head, warp)

    lax.fori_loop(0, num_tiles, fetch, None)
    return done + num_tiles


def _fetch_queries(
    p: Problem, work: WorkUnit, number: jax.Array, gmem: Any, extras: Extras, scratch: Scratch
) -> None:
    slot = lax.rem(number, jnp.int32(p.num_query_slots))

    @pl.when(number >= p.num_query_slots)
    def _wait_for_slot() -> None:
        p.waiter(p.num_query_slots, number, is_refill=True)(scratch.q_free.at[slot])

    for token in range(p.query_len):
        heads, columns = group_heads(p, work.kv_head, token)
        for i, (first, size) in enumerate(p.pieces):
            source = gmem.q.at[work.row * p.query_len + token, heads, pl.ds(first, size)]
            p.copier()(source, scratch.q_rows.at[slot, i, columns], scratch.q_full.at[slot])
    if p.packed is not None:
        block = last_block(p, gmem.block_tables, work.table, work.start, work.end, extras)
        newest = p.packed.k_new.at(block, pl.ds(0, int4_cache.GROUP), work.kv_head)
        p.copier()(extras.packed.k_new.at[newest], scratch.k_new.at[slot], scratch.q_full.at[slot])
