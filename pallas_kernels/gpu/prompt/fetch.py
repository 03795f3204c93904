"""The producer of a program of the prompt kernel, and the warpgroup that widens a quantised cache.

The producer fetches tiles of K and V by TMA into a ring. A quantised cache comes as it is into a ring of its
own (`Scratch.raw`). One more warpgroup widens it into the ring that the consumers read, in float16, which
holds every 8-bit number exactly: K and V are each the second operand of a product, which must lie in shared
memory. With long heads and mma.sync the consumer does, from the producer's ring
(`Problem.widens_itself`). The scale of K is a factor of the logits; the caller multiplies the output by that
of V. Scales of each token come with the tiles, and are factors of what is widened. A cache of 4 bits a number
(`int4_cache`) goes the same way; its newest tokens come once, before the tiles.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import int4_cache
from pallas_kernels.gpu.attention import fetch_tile, last_block, newest_group, token_finder, widen_slot
from pallas_kernels.gpu.common import Extras
from pallas_kernels.gpu.prompt.program import KeyRange, Problem, Scratch


def produce(
    p: Problem,
    keys: KeyRange,
    gmem: Any,
    extras: Extras,
    row: jax.Array,
    kv_head: jax.Array,
    scratch: Scratch,
    warp: jax.Array,
) -> None:
    """Fetch this warp's copies of the tiles of K and V.

    gmem: `support.Arrays`, as refs; row: of the block tables.
    """
    find = token_finder(p, gmem.block_tables, row, keys.start, keys.end, extras)
    ring, num_stages = (
        (scratch.ring, p.num_stages) if scratch.raw is None else (scratch.raw, p.num_raw_stages)
    )

    if (packed := p.packed) is not None:

        @pl.when(warp == 0)
        def _fetch_newest() -> None:
            block = last_block(p, gmem.block_tables, row, keys.start, keys.end, extras)
            newest = packed.k_new.at(block, pl.ds(0, int4_cache.GROUP), kv_head)
            p.copier()(extras.packed.k_new.at[newest], scratch.k_new, scratch.new_full)

    def fetch(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, jnp.int32(num_stages))
        first_token = (keys.first + i) * p.tile_kv
        for array, (_tiles, full, free) in enumerate(ring.arrays):

            @pl.when(i >= num_stages)
            def _wait(free: Any = free) -> None:
                p.waiter(num_stages, i, is_refill=True)(free.at[slot])

            fetch_tile(p, (array,), first_token, find, gmem, extras, ring, slot, full.at[slot], kv_head, warp)

    lax.fori_loop(0, keys.num_tiles, fetch, None)
    for _, _, free in ring.arrays:
        p.drain(free, num_stages, keys.num_tiles)


def widen(p: Problem, keys: KeyRange, gmem: Any, extras: Extras, row: jax.Array, scratch: Scratch) -> None:
    """Widen the tiles of a quantised cache, from one ring into the other."""
    raw, ring = scratch.raw, scratch.ring
    assert raw is not None
    newest = jnp.int32(-1)
    if p.packed is not None:
        newest = newest_group(p, gmem.block_tables, row, keys.start, keys.end, extras)
        p.waiter(1, jnp.int32(0))(scratch.new_full)

    def widen_tile(i: jax.Array, _: None) -> None:
        slot, raw_slot = lax.rem(i, jnp.int32(p.num_stages)), lax.rem(i, jnp.int32(p.num_raw_stages))
        for array, ((_, source_full, source_free), (target, full, free)) in enumerate(
            zip(raw.arrays, ring.arrays, strict=True)
        ):

            @pl.when(i >= p.num_stages)
            def _wait_for_readers(free: Any = free) -> None:
                p.waiter(p.num_stages, i, is_refill=True)(free.at[slot])

            p.waiter(p.num_raw_stages, i)(source_full.at[raw_slot])
            if p.packed is None:
                widen_slot(p, raw, raw_slot, array, target.at[slot])
            else:
                place = newest - (keys.first + i) * (p.tile_kv // int4_cache.GROUP)
                widen_slot(p, raw, raw_slot, array, target.at[slot], scratch.k_new, place)
            p.commit_smem()
            p.barrier_arrive(full.at[slot])
            p.barrier_arrive(source_free.at[raw_slot])

    lax.fori_loop(0, keys.num_tiles, widen_tile, None)
    for _, _, free in ring.arrays:
        p.drain(free, p.num_stages, keys.num_tiles)
