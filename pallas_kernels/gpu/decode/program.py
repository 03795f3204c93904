"""A program of decode attention: the problem it works on, its shared memory, and its units of work.

A program has two Pallas threads (warpgroups): the producer brings tiles of K and V through a ring (`fetch`,
`gpu.attention`), the consumer takes the softmax over them (`softmax`). Both threads number the tiles of the
whole program from 0. The queries of a unit of work come the same way, in a ring of two slots, or one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, int4_cache, targets, tuning
from pallas_kernels.gpu.attention import AttentionProblem, Ring, problem_fields, ring_types
from pallas_kernels.gpu.tuning import TuningConfig
from pallas_kernels.support import Arrays, BlockSparse, Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(AttentionProblem):
    """The static shape of a call, and what follows from it; query_len counts new tokens of a row."""

    block_sparse: BlockSparse | None
    has_table_rows: bool  # whether items of the plan name the row's row of the block tables
    widens_in_registers: bool  # K of a quantised cache
    num_query_slots: int  # units of work whose queries are there or under way

    @property
    def widens_in_turn(self) -> bool:
        """Whether K and V of a quantised cache are widened into the same memory, V once K is multiplied.

        An mma.sync is done when its warp goes on. A wgmma, which is not, has memory for both.
        """
        return self.is_quantised and not self.has_wgmma

    @property
    def num_columns(self) -> int:
        """The queries of a row that share a kv head, padded to what a wgmma takes as columns.

        Column i * group_size + g is query head g of the group for the row's new token i.
        """
        return tuning.num_columns(self.group_size * self.query_len)

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """The wgmmas that make the output's head_dim rows, each (first row, rows): multiples of 64.

        Those of head_dim 80, 96 and 112 overlap, and compute the rows they share twice, to the same bits.
        """
        if self.head_dim % 64 == 0:
            return ((0, self.head_dim),)
        return ((0, 64), (self.head_dim - 64, 64))

    @property
    def piece_rows(self) -> int:
        return self.pieces[0][1]

    @property
    def operand_dtype(self) -> Any:
        """The dtype of products. float16 holds every 8-bit number exactly, and is quickly made of them."""
        return jnp.dtype(jnp.float16) if self.is_quantised else self.dtype


def make_problem(
    arrays: Arrays, options: Options, config: TuningConfig, query_len: int, *, is_interpreted: bool
) -> Problem:
    """Return the problem of arguments that `ops` has checked, with `query_len` lines of q a row."""
    target = targets.compiled_for()
    head_dim, is_scaled = arrays.q.shape[-1], options.token_scales is not None
    return Problem(
        **problem_fields(arrays, options),
        query_len=query_len,
        dtype=arrays.q.dtype,
        block_sparse=options.block_sparse,
        tile_kv=config.tile_kv,
        num_stages=config.num_stages,
        has_table_rows=arrays.table_rows is not None,
        is_interpreted=is_interpreted,
        **Problem.fields_of(target),
        widens_in_registers=not is_interpreted
        and tuning.widens_in_registers(head_dim, arrays.k_cache.dtype, is_scaled=is_scaled, target=target),
        num_query_slots=config.num_query_slots,
    )


class Scratch(NamedTuple):
    """Shared memory and barriers of one program; all live as long as it."""

    q_rows: Any  # [num_query_slots, pieces, num_columns, piece_rows] as they come from memory
    q: Any  # [num_columns, head_dim] as a wgmma wants it
    q_full: Any  # [num_query_slots], an arrival per copy
    q_free: Any  # [num_query_slots]
    ring: Ring  # with one barrier for K and V
    k_new: Any  # [num_query_slots, 16, head_dim] the newest tokens of K, else None
    k16: Any  # [tile_kv, head_dim] float16, the widened tile of K, else None
    v16: Any  # [tile_kv, head_dim] float16, likewise of V; of each in turn, if `Problem.widens_in_turn`
    p: Any  # [num_columns, tile_kv] the weights of one tile


def scratch_types(p: Problem) -> Scratch:
    """Return the types of `Scratch`, for plgpu.kernel."""
    as_operand = common.tiled(p.line)
    widened = None
    if p.is_quantised:
        widened = plgpu.SMEM((p.tile_kv, p.head_dim), p.operand_dtype, transforms=as_operand)
    tiles = plgpu.SMEM((p.num_stages, p.tile_kv, p.line), p.cache_dtype, transforms=p.in_ring)
    k_new = None
    if p.packed is not None:
        k_new = plgpu.SMEM((p.num_query_slots, int4_cache.GROUP, p.head_dim), p.new_dtype)
    num_copies = 2 * (p.copies_per_tile + p.scale_copies + p.packed_copies)
    num_query_copies = len(p.pieces) * p.query_len + (p.packed is not None)
    return Scratch(
        q_rows=plgpu.SMEM((p.num_query_slots, len(p.pieces), p.num_columns, p.piece_rows), p.dtype),
        q=plgpu.SMEM((p.num_columns, p.head_dim), p.operand_dtype, transforms=as_operand),
        q_full=p.barrier(num_query_copies, p.num_query_slots, of_copies=True),
        q_free=p.barrier(1, p.num_query_slots),
        ring=ring_types(p, tiles, p.num_stages, writers=num_copies, readers=1, by_array=False),
        k_new=k_new,
        k16=None if p.widens_in_registers or p.widens_in_turn else widened,
        v16=widened,
        p=plgpu.SMEM((p.num_columns, p.tile_kv), p.operand_dtype, transforms=as_operand),
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
        """Return the first tile and the number of tiles; tiles lie on multiples of tile_kv."""
        first = lax.div(self.start, jnp.int32(p.tile_kv))
        return first, jnp.maximum(pl.cdiv(self.end, jnp.int32(p.tile_kv)) - first, 0)


def group_heads(p: Problem, kv_head: jax.Array, token: int) -> tuple[Any, Any]:
    """Return the slices of a group's heads: of all query heads, and of the columns for that new token."""
    return pl.ds(kv_head * p.group_size, p.group_size), pl.ds(token * p.group_size, p.group_size)
