"""Tiles of K and V for the consumers of a program of the prompt kernel.

The producer warpgroup fetches them by TMA into a ring, every fourth copy to each of its warps.

A quantised cache comes into a ring of its own as it is. One more warpgroup widens it from there into the ring
that the consumers read, in float16, which holds every 8-bit number exactly: both are the second operand of a
product, which must lie in shared memory. The scale of K is a factor of the logits; that of V, and of the
output, is the caller's. Scales of each token come into the former ring, too: factors of what is widened. A
cache of 4 bits a number (`int4_cache`) goes the same way; its newest tokens come once, before the tiles.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, int4_cache
from pallas_kernels.gpu.common import NUM_WARPS, Extras
from pallas_kernels.gpu.prompt.program import KeyRange, Problem, Scratch
from pallas_kernels.layouts import Location


def _last_block(p: Problem, span: KeyRange, gmem: Any, extras: Extras, row: jax.Array) -> jax.Array:
    """The place of the span's last token's block; that of the null block, if it has none."""
    column = lax.div(jnp.maximum(span.end - 1, 0), jnp.int32(p.block_size))
    block_id = jnp.where(span.end > span.begin, gmem.block_tables[row, column], 0)
    return common.places(extras, p.block_stride)(block_id)


def produce(
    p: Problem,
    span: KeyRange,
    gmem: Any,
    extras: Extras,
    row: jax.Array,
    kv_head: jax.Array,
    scratch: Scratch,
    warp: jax.Array,
) -> None:
    """Fetch what this warp has of the tiles of K and V."""
    place_of = common.places(extras, p.block_stride)
    # Only blocks that hold tokens of the span are looked up. Copies beyond them fetch the nearest again.
    first_block = lax.div(span.begin, jnp.int32(p.block_size))
    last_block = jnp.maximum(pl.cdiv(span.end, jnp.int32(p.block_size)) - 1, first_block)

    ring, num_stages = (
        (scratch.ring, p.num_stages) if scratch.raw is None else (scratch.raw, p.num_raw_stages)
    )

    if (packed := p.packed) is not None:

        @pl.when(warp == 0)
        def _fetch_newest() -> None:
            its = packed.k_new.at(
                _last_block(p, span, gmem, extras, row), pl.ds(0, int4_cache.GROUP), kv_head
            )
            plgpu.copy_gmem_to_smem(extras.packed.k_new.at[its], scratch.k_new, scratch.new_full)

    def fetch(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, jnp.int32(num_stages))

        def tokens_of(place: Any, num_tokens: int) -> tuple[jax.Array, Any]:
            """The block of the tile's tokens from a place on, and where in it they are."""
            token = (span.first + i) * p.tile_kv + place
            column = jnp.clip(lax.div(token, jnp.int32(p.block_size)), first_block, last_block)
            offset = lax.rem(token, jnp.int32(p.block_size)) if p.block_size > num_tokens else 0
            return place_of(gmem.block_tables[row, column]), pl.ds(offset, num_tokens)

        def source(its: Location, place: jax.Array, num_tokens: int) -> Any:
            return its.at(*tokens_of(place, num_tokens), kv_head)

        caches = (gmem.k_cache, p.view.k, p.view.k_scale), (gmem.v_cache, p.view.v, p.view.v_scale)
        for which, ((cache, its, scale), (tiles, full, free)) in enumerate(
            zip(caches, ring.arrays, strict=True)
        ):

            @pl.when(i >= num_stages)
            def _wait(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            for copy in range(p.copies_per_tile // NUM_WARPS):
                place = (copy * NUM_WARPS + warp) * p.copy_tokens  # in the tile
                target = tiles.at[slot, pl.ds(place, p.copy_tokens)]
                plgpu.copy_gmem_to_smem(cache.at[source(its, place, p.copy_tokens)], target, full.at[slot])
            if p.packed is not None:
                for number, name in enumerate(int4_cache.Scales._fields[2 * which : 2 * which + 2]):

                    @pl.when(warp == number)
                    def _fetch_packed(name: str = name, full: Any = full) -> None:
                        at = tokens_of, kv_head, p.block_size
                        int4_cache.fetch(name, p.packed, extras.packed, ring.packed, slot, full.at[slot], *at)

            if scale is not None:

                @pl.when(warp < p.scale_copies)
                def _fetch_scales(which: int = which, scale: Location = scale, full: Any = full) -> None:
                    num_tokens = common.scale_tokens(p.block_size, p.tile_kv)
                    place = warp * num_tokens
                    found = extras.token_scales[which].at[source(scale, place, num_tokens)]
                    target = ring.scales[which].at[slot, pl.ds(place, num_tokens)]
                    plgpu.copy_gmem_to_smem(found, target, full.at[slot])

    lax.fori_loop(0, span.num_tiles, fetch, None)
    for _, _, free in ring.arrays:
        common.drain(free, num_stages, span.num_tiles)


def widen(p: Problem, span: KeyRange, gmem: Any, extras: Extras, row: jax.Array, scratch: Scratch) -> None:
    """Widen the tiles of a quantised cache, from one ring into the other."""
    raw, ring = scratch.raw, scratch.ring
    assert raw is not None
    newest = jnp.int32(-1)
    if p.packed is not None:  # the group of tokens, of all of the row's, that is not yet codes
        group = extras.packed.new_group[_last_block(p, span, gmem, extras, row)]
        column = lax.div(jnp.maximum(span.end - 1, 0), jnp.int32(p.block_size))
        newest = jnp.where(group < 0, -1, column * (p.block_size // int4_cache.GROUP) + group)
        plgpu.barrier_wait(scratch.new_full)

    def widen_tile(i: jax.Array, _: None) -> None:
        slot, raw_slot = lax.rem(i, jnp.int32(p.num_stages)), lax.rem(i, jnp.int32(p.num_raw_stages))
        for which, ((source, source_full, source_free), scales, (target, full, free)) in enumerate(
            zip(raw.arrays, raw.scales, ring.arrays, strict=True)
        ):

            @pl.when(i >= p.num_stages)
            def _wait_for_readers(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            plgpu.barrier_wait(source_full.at[raw_slot])
            if raw.packed is None:
                its = None if scales is None else scales.at[raw_slot]
                common.widen(source.at[raw_slot], target.at[slot], its, is_interpreted=p.is_interpreted)
            else:
                scale, zero = (each.at[raw_slot] for each in raw.packed[2 * which : 2 * which + 2])
                place = newest - (span.first + i) * (p.tile_kv // int4_cache.GROUP)
                news = () if which else (scratch.k_new, place)
                int4_cache.widen(source.at[raw_slot], scale, zero, target.at[slot], *news)
            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[slot])
            plgpu.barrier_arrive(source_free.at[raw_slot])

    lax.fori_loop(0, span.num_tiles, widen_tile, None)
    for _, _, free in ring.arrays:
        common.drain(free, p.num_stages, span.num_tiles)
