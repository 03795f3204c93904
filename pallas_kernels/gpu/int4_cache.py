"""Tiles of a cache of 4 bits a number: their scales are fetched, and codes become float16 in shared memory.

    x[token, d] = code[token, d] * scale + zero     of K for a channel of 16 tokens, of V for a token

16 tokens at a time are widened: they share K's scales, and each thread has four bytes of a line, eight
numbers. A code needs no conversion: put behind the bits of 1,024 in float16, it counts ones. The newest
tokens of K, which have no codes yet, replace what was widened in their rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common
from pallas_kernels.gpu.common import FLOAT16_MAX
from pallas_kernels.layouts import PackedView

GROUP = common.LINES  # tokens that have K's scales in common
THOUSAND = 0x6400  # 1,024 in float16, whose last bit counts ones


class Scales(NamedTuple):
    """The scales and zeros of a ring's tiles, bfloat16 in shared memory."""

    k_scale: Any  # [num_stages, groups, head_dim]
    k_zero: Any  # likewise
    v_scale: Any  # [num_stages, tile_kv]
    v_zero: Any  # likewise


def scratch_types(num_stages: int, tile_kv: int, head_dim: int) -> Scales:
    """Return the types of `Scales`, for plgpu.kernel."""
    of_channel = plgpu.SMEM((num_stages, tile_kv // GROUP, head_dim), jnp.bfloat16)
    of_token = plgpu.SMEM((num_stages, tile_kv), jnp.bfloat16)
    return Scales(of_channel, of_channel, of_token, of_token)


def num_copies(block_size: int, tile_kv: int) -> int:
    """Return the copies of each array of scales, for a tile."""
    return tile_kv // common.scale_tokens(block_size, tile_kv)


def fetch(
    name: str,
    view: PackedView | None,
    gmem: Any,  # `PackedArrays`
    ring: Scales,
    slot: jax.Array,
    barrier: Any,
    first_token: jax.Array,
    find: Callable[[Any, int], tuple[jax.Array, Any]],
    kv_head: jax.Array,
    block_size: int,
    copy: Callable[[Any, Any, Any], None],
) -> None:
    """Start the copies of a tile's scales, or zeros, of one array.

    name: the array, a field of `Scales`.
    first_token: of the tile, in its sequence.
    find: see `attention.token_finder`; copy: see `AttentionProblem.copier`.
    """
    assert view is not None
    target = getattr(ring, name)
    unit = GROUP if name.startswith("k") else 1
    tile_kv = target.shape[1] * unit
    num_tokens = common.scale_tokens(block_size, tile_kv)
    for offset in range(0, tile_kv, num_tokens):
        block_id, tokens = find(first_token + offset, num_tokens)
        start = (
            tokens.start // unit if isinstance(tokens.start, int) else lax.div(tokens.start, jnp.int32(unit))
        )
        index = getattr(view, name).at(block_id, pl.ds(start, num_tokens // unit), kv_head)
        slot_target = target.at[slot, pl.ds(offset // unit, num_tokens // unit)]
        copy(getattr(gmem, name).at[index], slot_target, barrier)


def widen(codes: Any, scale: Any, zero: Any, target: Any, newest: Any = None, place: Any = None) -> None:
    """Widen a tile of codes [tile_kv, head_dim / 2] uint8 into float16 [tile_kv, head_dim], both in shared
    memory.

    scale, zero: of K [groups, head_dim], of V [tile_kv].
    newest: [16, head_dim] K of the tile's group `place`, which may lie outside the tile; None for V.
    """
    by_channel = len(scale.shape) == 2

    def widen_group(group: jax.Array, _: None) -> None:
        rows = pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP)
        at = group if by_channel else rows
        _widen(codes.at[rows], scale.at[at], zero.at[at], target.at[rows], by_channel=by_channel)
        if newest is not None:
            pl.when(place == group)(lambda: _copy(newest, target.at[rows]))

    lax.fori_loop(0, codes.shape[0] // GROUP, widen_group, None)


def _widen(codes: Any, scale: Any, zero: Any, target: Any, *, by_channel: bool) -> None:
    width = codes.shape[1]
    size = piece_width(width)
    layout = common.lines(size)
    for first in range(0, width, size):
        bits = plgpu.load(codes.at[:, pl.ds(first, size)], layout=layout, optimized=False).astype(jnp.uint16)
        high = lax.shift_right_logical(bits, jnp.full_like(bits, 4))
        for column, nibbles in ((first, bits & jnp.uint16(15)), (width + first, high)):
            columns = pl.ds(column, size)

            def spread(ref: Any, columns: Any = columns) -> jax.Array:
                part = ref.at[columns] if by_channel else ref
                x = _as_float16(part, layout.reduce(0 if by_channel else 1))
                return lax.broadcast_in_dim(x, (GROUP, size), [int(by_channel)])

            code = lax.bitcast_convert_type(nibbles | jnp.uint16(THOUSAND), jnp.float16) - jnp.float16(1024)
            x = code * spread(scale) + spread(zero)
            target[:, columns] = jnp.clip(x, -FLOAT16_MAX, FLOAT16_MAX)


def _copy(source: Any, target: Any) -> None:
    size = piece_width(source.shape[1] // 2)
    for first in range(0, source.shape[1], size):
        columns = pl.ds(first, size)
        target[:, columns] = _as_float16(source.at[:, columns], common.lines(size))


def _as_float16(ref: Any, layout: Any) -> jax.Array:
    x = plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
    return jnp.clip(x, -FLOAT16_MAX, FLOAT16_MAX).astype(jnp.float16)


def piece_width(width: int) -> int:
    """Return how many bytes of a line are widened at a time: as many as numbers lie side by side in shared
    memory.
    """
    return 64 if width % 64 == 0 else 32
