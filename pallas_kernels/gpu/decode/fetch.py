"""Queries, and tiles of K and V, for the consumer of a program of decode attention.

The producer's four warps read the block table and start the TMA copies of a tile's blocks, every fourth copy
each, so that none waits for another.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, int4_cache
from pallas_kernels.gpu.common import NUM_WARPS, Extras
from pallas_kernels.gpu.decode.program import (
    NUM_QUERY_SLOTS,
    Problem,
    Scratch,
    WorkUnit,
    group_heads,
    last_block_of,
)


def produce(
    p: Problem,
    span: WorkUnit,
    unit: jax.Array,
    gmem: Any,
    extras: Extras,
    scratch: Scratch,
    done: jax.Array,
    warp: jax.Array,
) -> jax.Array:
    """Fetch what this warp has of the program's unit of that number; `done` tiles went before.

    Returns the number of tiles fetched so far.
    """
    pl.when(warp == 0)(lambda: _fetch_queries(p, span, unit, gmem, extras, scratch))
    first_tile, num_tiles = span.tiles(p)
    place_of = common.places(extras, p.block_stride)
    # Only blocks that hold tokens of the span are looked up. Copies beyond them fetch the nearest again.
    first_block = lax.div(span.start, jnp.int32(p.block_size))
    last_block = jnp.maximum(pl.cdiv(span.end, jnp.int32(p.block_size)) - 1, first_block)

    def fetch(i: jax.Array, _: None) -> None:
        slot = lax.rem(done + i, jnp.int32(p.num_stages))

        @pl.when(done + i >= p.num_stages)
        def _wait() -> None:
            plgpu.barrier_wait(scratch.empty.at[slot])

        def source(place: Any, num_tokens: int) -> tuple[jax.Array, Any]:
            """The block of the tile's tokens from a place on, and where in it they are."""
            token = (first_tile + i) * p.tile_kv + place
            column = lax.div(token, jnp.int32(p.block_size))
            block_id = place_of(gmem.block_tables[span.table, jnp.clip(column, first_block, last_block)])
            offset = lax.rem(token, jnp.int32(p.block_size)) if p.block_size > num_tokens else 0
            return block_id, pl.ds(offset, num_tokens)

        for copy in range(p.copies_per_tile // NUM_WARPS):
            place = (copy * NUM_WARPS + warp) * p.copy_tokens  # in the tile
            block_id, tokens = source(place, p.copy_tokens)
            k, v = (its.at(block_id, tokens, span.kv_head) for its in (p.view.k, p.view.v))
            target = (slot, pl.ds(place, p.copy_tokens))
            plgpu.copy_gmem_to_smem(gmem.k_cache.at[k], scratch.k.at[target], scratch.full.at[slot])
            plgpu.copy_gmem_to_smem(gmem.v_cache.at[v], scratch.v.at[target], scratch.full.at[slot])
        if p.packed is not None:
            for number, name in enumerate(int4_cache.Scales._fields):

                @pl.when(warp == number)
                def _fetch_packed(name: str = name) -> None:
                    ring, full = scratch.packed, scratch.full.at[slot]
                    at = source, span.kv_head, p.block_size
                    int4_cache.fetch(name, p.packed, extras.packed, ring, slot, full, *at)

        if p.scale_copies:

            @pl.when(warp < p.scale_copies)
            def _fetch_scales() -> None:
                num_tokens = common.scale_tokens(p.block_size, p.tile_kv)
                place = warp * num_tokens
                block_id, tokens = source(place, num_tokens)
                target = (slot, pl.ds(place, num_tokens))
                places = [its for its in (p.view.k_scale, p.view.v_scale) if its is not None]
                rings = scratch.k_scales, scratch.v_scales
                for its, scales, ring in zip(places, extras.token_scales, rings, strict=True):
                    found = scales.at[its.at(block_id, tokens, span.kv_head)]
                    plgpu.copy_gmem_to_smem(found, ring.at[target], scratch.full.at[slot])

    lax.fori_loop(0, num_tiles, fetch, None)
    return done + num_tiles


def _fetch_queries(
    p: Problem, span: WorkUnit, unit: jax.Array, gmem: Any, extras: Extras, scratch: Scratch
) -> None:
    slot = lax.rem(unit, jnp.int32(NUM_QUERY_SLOTS))

    @pl.when(unit >= NUM_QUERY_SLOTS)
    def _wait_for_slot() -> None:
        plgpu.barrier_wait(scratch.q_empty.at[slot])

    for token in range(p.query_len):
        heads, columns = group_heads(p, span.kv_head, token)
        for i, (first, size) in enumerate(p.pieces):
            source = gmem.q.at[span.row * p.query_len + token, heads, pl.ds(first, size)]
            plgpu.copy_gmem_to_smem(source, scratch.q_rows.at[slot, i, columns], scratch.q_full.at[slot])
    if p.packed is not None:
        its = p.packed.k_new.at(
            last_block_of(p, span, gmem, extras), pl.ds(0, int4_cache.GROUP), span.kv_head
        )
        plgpu.copy_gmem_to_smem(extras.packed.k_new.at[its], scratch.k_new.at[slot], scratch.q_full.at[slot])
