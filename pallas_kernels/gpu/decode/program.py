"""A unit of work of decode attention: the problem that it is a part of, a program's memory, and its tokens.

A program has two Pallas threads (warpgroups): the producer brings tiles of K and V through a ring of
`num_stages` slots (`fetch`), the consumer takes the softmax over them (`softmax`). Per slot
there are two barriers: `full` (all copies of a tile have landed) and `empty` (the consumer has done with it).
Both threads number the tiles of the whole program from 0; tile i lives in slot i % num_stages. The queries of
a unit of work come the same way, in a ring of two slots.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, int4_cache, tuning
from pallas_kernels.gpu.common import Extras
from pallas_kernels.gpu.tuning import TuningConfig
from pallas_kernels.layouts import PackedView, View
from pallas_kernels.support import Arrays, BlockSparse, Options, sizes_of, view_of

NUM_QUERY_SLOTS = 2  # units of work whose queries are there or under way


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static shape of a call, and what follows from it."""

    num_kv_heads: int
    group_size: int
    query_len: int  # new tokens of a row
    head_dim: int
    block_size: int
    block_stride: int  # from one block of a part to the next, among the arrays' blocks
    dtype: Any  # of q and the output
    cache_dtype: Any
    new_dtype: Any  # of the newest tokens in a cache of 4 bits a number
    view: View
    scale: float
    soft_cap: float | None
    sliding_window: int | None
    block_sparse: BlockSparse | None
    tile_kv: int
    num_stages: int
    has_table_rows: bool  # whether items say which row of the block tables a row has
    is_interpreted: bool
    widens_in_registers: bool  # K of a quantised cache
    packed: PackedView | None  # of a cache of 4 bits a number

    @property
    def num_columns(self) -> int:
        """Queries of a row that share a kv head, padded to what a wgmma takes as columns.

        Column i * group_size + g is query head g of the group for the row's new token i.
        """
        return tuning.num_columns(self.group_size * self.query_len)

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(first row, rows) of the wgmmas that make the output's head_dim rows: multiples of 64.

        Those of head_dim 80, 96 and 112 overlap, and compute the rows they share twice, to the same bits.
        """
        if self.head_dim % 64 == 0:
            return ((0, self.head_dim),)
        return ((0, 64), (self.head_dim - 64, 64))

    @property
    def piece_rows(self) -> int:
        return self.pieces[0][1]

    @property
    def is_quantised(self) -> bool:
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def operand_dtype(self) -> Any:
        """What is multiplied. float16 holds every 8-bit number exactly, and is quickly made of them."""
        return jnp.dtype(jnp.float16) if self.is_quantised else self.dtype

    @property
    def copy_tokens(self) -> int:
        return common.copy_tokens(self.block_size, self.tile_kv)

    @property
    def copies_per_tile(self) -> int:
        """Of K, and of V."""
        return self.tile_kv // self.copy_tokens

    @property
    def scale_copies(self) -> int:
        """Of the scales that each token's K has, and of those of V; 0 if there are none."""
        if self.view.k_scale is None:
            return 0
        return self.tile_kv // common.scale_tokens(self.block_size, self.tile_kv)

    @property
    def packed_copies(self) -> int:
        """Of the scales and zeros of a cache of 4 bits a number."""
        its = len(int4_cache.Scales._fields) * int4_cache.num_copies(self.block_size, self.tile_kv)
        return 0 if self.packed is None else its

    @property
    def line(self) -> int:
        """What the ring has of a token's head: a number each, or half as many bytes."""
        return self.head_dim if self.packed is None else self.head_dim // 2


def make_problem(
    arrays: Arrays, options: Options, config: TuningConfig, query_len: int, *, is_interpreted: bool
) -> Problem:
    """The problem of arguments that `ops` has checked, with `query_len` lines of q a row."""
    q, cache = arrays.q, sizes_of(arrays, options)
    return Problem(
        num_kv_heads=cache.num_kv_heads,
        group_size=q.shape[1] // cache.num_kv_heads,
        query_len=query_len,
        head_dim=cache.head_dim,
        block_size=cache.block_size,
        block_stride=common.block_stride(options),
        dtype=q.dtype,
        cache_dtype=arrays.k_cache.dtype,
        new_dtype=q.dtype if options.packed is None else options.packed.k_new.dtype,
        view=view_of(options),
        scale=options.scale,
        soft_cap=options.soft_cap,
        sliding_window=options.sliding_window,
        block_sparse=options.block_sparse,
        tile_kv=config.tile_kv,
        num_stages=config.num_stages,
        has_table_rows=arrays.table_rows is not None,
        is_interpreted=is_interpreted,
        widens_in_registers=not is_interpreted
        and tuning.widens_in_registers(
            cache.head_dim, arrays.k_cache.dtype, is_scaled=options.token_scales is not None
        ),
        packed=options.kv_layout.packed_view(),
    )


class Scratch(NamedTuple):
    """Shared memory and barriers of one program; all live as long as it."""

    q_rows: Any  # [NUM_QUERY_SLOTS, pieces, num_columns, piece_rows] as they come from memory
    q: Any  # [num_columns, head_dim] as a wgmma wants it
    k: Any  # [num_stages, tile_kv, line] the ring
    v: Any  # [num_stages, tile_kv, line]
    k_scales: Any  # [num_stages, tile_kv] of each token, else None
    v_scales: Any  # [num_stages, tile_kv] likewise
    packed: Any  # `int4_cache.Scales`, else None
    k_new: Any  # [NUM_QUERY_SLOTS, 16, head_dim] the newest tokens of K, else None
    k16: Any  # [tile_kv, head_dim] the widened tile, else None
    v16: Any  # [tile_kv, head_dim] likewise
    p: Any  # [num_columns, tile_kv] the weights of one tile
    q_full: Any  # [NUM_QUERY_SLOTS], an arrival per copy
    q_empty: Any  # [NUM_QUERY_SLOTS]
    full: Any  # [num_stages], an arrival per copy
    empty: Any  # [num_stages]


def scratch_types(p: Problem) -> Scratch:
    """The types of `Scratch`, for plgpu.kernel."""
    as_operand = common.tiled(p.line)
    in_ring = () if p.is_quantised else as_operand
    tile = (p.tile_kv, p.head_dim)
    widened = plgpu.SMEM(tile, p.operand_dtype, transforms=as_operand) if p.is_quantised else None
    scales = plgpu.SMEM((p.num_stages, p.tile_kv), jnp.float32) if p.scale_copies else None
    packed = k_new = None
    if p.packed is not None:
        packed = int4_cache.scratch_types(p.num_stages, p.tile_kv, p.head_dim)
        k_new = plgpu.SMEM((NUM_QUERY_SLOTS, int4_cache.GROUP, p.head_dim), p.new_dtype)
    num_query_copies = len(p.pieces) * p.query_len + (p.packed is not None)
    num_copies = 2 * (p.copies_per_tile + p.scale_copies) + p.packed_copies
    return Scratch(
        q_rows=plgpu.SMEM((NUM_QUERY_SLOTS, len(p.pieces), p.num_columns, p.piece_rows), p.dtype),
        q=plgpu.SMEM((p.num_columns, p.head_dim), p.operand_dtype, transforms=as_operand),
        k=plgpu.SMEM((p.num_stages, p.tile_kv, p.line), p.cache_dtype, transforms=in_ring),
        v=plgpu.SMEM((p.num_stages, p.tile_kv, p.line), p.cache_dtype, transforms=in_ring),
        k_scales=scales,
        v_scales=scales,
        packed=packed,
        k_new=k_new,
        k16=None if p.widens_in_registers else widened,
        v16=widened,
        p=plgpu.SMEM((p.num_columns, p.tile_kv), p.operand_dtype, transforms=as_operand),
        q_full=plgpu.Barrier(num_arrivals=num_query_copies, num_barriers=NUM_QUERY_SLOTS),
        q_empty=plgpu.Barrier(num_barriers=NUM_QUERY_SLOTS),
        full=plgpu.Barrier(num_arrivals=num_copies, num_barriers=p.num_stages),
        empty=plgpu.Barrier(num_barriers=p.num_stages),
    )


class WorkUnit(NamedTuple):
    """A unit of work: the tokens [start, end) of a row that one softmax runs over, for one kv head."""

    row: jax.Array
    table: jax.Array  # the row's row of the block tables
    kv_head: jax.Array
    position: jax.Array  # of the row's first new token
    start: jax.Array
    end: jax.Array

    def tiles(self, p: Problem) -> tuple[jax.Array, jax.Array]:
        """First tile and number of tiles; tiles lie on multiples of tile_kv."""
        first = lax.div(self.start, jnp.int32(p.tile_kv))
        return first, jnp.maximum(pl.cdiv(self.end, jnp.int32(p.tile_kv)) - first, 0)


def last_block_of(p: Problem, span: WorkUnit, gmem: Any, extras: Extras) -> jax.Array:
    """The place of the span's last token's block; that of the null block, if it has none."""
    column = lax.div(jnp.maximum(span.end - 1, 0), jnp.int32(p.block_size))
    block_id = jnp.where(span.end > span.start, gmem.block_tables[span.table, column], 0)
    return common.places(extras, p.block_stride)(block_id)


def group_heads(p: Problem, kv_head: jax.Array, token: int) -> tuple[Any, Any]:
    """The places of a group's heads: among all query heads, and among the columns, for that new token."""
    return pl.ds(kv_head * p.group_size, p.group_size), pl.ds(token * p.group_size, p.group_size)
