"""Decode attention on Hopper GPUs with each row cut into partitions, for few and long rows.

    partition p of a row:  m_p = max s[t],  l_p = sum exp(s[t] - m_p),  o_p = sum exp(s[t] - m_p) * v[t]
    the row:               sum_p exp(m_p - m) * o_p / sum_p exp(m_p - m) * l_p        with m = max m_p

over the partition's tokens t, with the options of `ops.paged_attention_v2`. A partition is computed as a
row is in v1, by the code in `_decode_tile`; what it makes is kept in float32. Two kernels:

* `_partitions_kernel`: a fixed number of programs shares out the live partitions, listed by `_plan`
  (sequence by sequence), so an empty partition costs nothing. A program's ring of tiles runs on from one
  partition to the next.
* `_merge_kernel`: one program per (sequence, kv head, 64 columns of head_dim) goes over the row's
  partitions, four at a time.

The partitions are cut at multiples of partition_size, whatever the batch holds: a row's bits do not depend
on it.

Not for: what v1 is not for, and partition sizes that are not a multiple of the tile.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _decode_tile as tile
from pallas_kernels import tuning
from pallas_kernels.support import Arrays, Options

MERGED_ROWS = 64  # of a piece of the output
MERGED_AT_A_TIME = 4  # partitions whose loads are in flight together


class Plan(NamedTuple):
    """The live partitions of a batch, in one list: sequence by sequence, from the first to the last."""

    end: jax.Array  # [num_seqs] where each sequence's part of the list ends; the last one ends the list
    seq: jax.Array  # [max_items] the sequence of an item
    partition: jax.Array  # [max_items] which of its partitions


def _plan(seq_lens: jax.Array, max_partitions: int, partition_size: int, window: int | None) -> Plan:
    """A few integers per partition, computed by XLA (once per step: the layers of a model share it)."""
    first = (
        jnp.zeros_like(seq_lens) if window is None else jnp.maximum(seq_lens - window, 0) // partition_size
    )
    count = jnp.maximum(-(-seq_lens // partition_size) - first, 0)
    end = jnp.cumsum(count, dtype=jnp.int32)
    item = jnp.arange(seq_lens.shape[0] * max_partitions, dtype=jnp.int32)
    seq = jnp.sum(item[:, None] >= end[None, :], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, seq_lens.shape[0] - 1)
    return Plan(end, seq, item - (end - count - first)[seq])


def _partitions_kernel(
    gmem: Any,  # `Arrays`, as refs
    plan: Plan,
    extras: tile.Extras,
    out_gmem: Any,  # [max_items, num_kv_heads, head_dim, num_columns] float32
    stats_gmem: Any,  # [max_items, num_kv_heads, 2, num_columns] float32, maximum and sum
    out_smem: Any,  # [head_dim, num_columns] an item's result, until it is copied out
    stats_smem: Any,  # [2, num_columns]
    scratch: tile.Scratch,
    *,
    problem: tile.Problem,
    partition_size: int,
    num_programs: int,
) -> None:
    p = problem
    program, thread = lax.axis_index("program"), lax.axis_index("thread")
    num_items = plan.end[plan.end.shape[0] - 1] * p.num_kv_heads
    num_mine = pl.cdiv(jnp.maximum(num_items - program, 0), jnp.int32(num_programs))

    def my_span(i: jax.Array) -> tuple[jax.Array, tile.Span]:
        number = program + i * num_programs
        item, kv_head = lax.div(number, jnp.int32(p.num_kv_heads)), lax.rem(number, jnp.int32(p.num_kv_heads))
        row = tile.row_span(p, plan.seq[item], kv_head, gmem.seq_lens)
        first = plan.partition[item] * partition_size
        return item, row._replace(
            start=jnp.maximum(row.start, first), end=jnp.minimum(row.end, first + partition_size)
        )

    @pl.when(thread == 1)
    def _producer() -> None:
        def produce_one(i: jax.Array, done: jax.Array) -> jax.Array:
            return tile.produce(p, my_span(i)[1], gmem, scratch, done)

        tile.drain(p, scratch, lax.fori_loop(0, num_mine, produce_one, jnp.int32(0)))

    @pl.when(thread == 0)
    def _consumer() -> None:
        def consume_one(i: jax.Array, done: jax.Array) -> jax.Array:
            item, span = my_span(i)
            state, done = tile.consume(p, span, gmem.q, extras, scratch, done)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the item before
            for (first, rows), piece in zip(p.pieces, state.out, strict=True):
                out_smem[pl.ds(first, rows)] = piece
            stats_smem[0] = state.max
            stats_smem[1] = state.sum
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[item, span.kv_head])
            plgpu.copy_smem_to_gmem(stats_smem, stats_gmem.at[item, span.kv_head])
            return done

        lax.fori_loop(0, num_mine, consume_one, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _merge_kernel(
    partial_gmem: Any,  # [max_items, num_kv_heads, head_dim, num_columns] float32
    stats_gmem: Any,  # [max_items, num_kv_heads, 2, num_columns] float32
    end_gmem: Any,  # [num_seqs], of the plan
    extras: tile.Extras,
    out_gmem: Any,  # [num_seqs, num_q_heads, head_dim]
    out_smem: Any,  # [pieces, num_columns, MERGED_ROWS], used once, at the end
    *,
    problem: tile.Problem,
) -> None:
    p = problem
    row, kv_head, part = lax.axis_index("row"), lax.axis_index("kv_head"), lax.axis_index("part")
    pieces = _merged_pieces(p)
    first_row = part * MERGED_ROWS
    first = jnp.where(row == 0, 0, end_gmem[jnp.maximum(row - 1, 0)])
    last = end_gmem[row] - 1

    def load(ref: Any, layout: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False)

    def merge(i: jax.Array, state: tile.Softmax) -> tile.Softmax:
        parts = []
        for k in range(MERGED_AT_A_TIME):
            number = first + i * MERGED_AT_A_TIME + k
            item = jnp.minimum(number, last)  # past the end: the last one again, with no weight
            largest = load(stats_gmem.at[item, kv_head, 0], tile.PER_HEAD)
            total = load(stats_gmem.at[item, kv_head, 1], tile.PER_HEAD)
            out = [
                load(partial_gmem.at[item, kv_head, pl.ds(first_row + start, rows)], tile.WGMMA)
                for start, rows in pieces
            ]
            largest = largest + jnp.where(number <= last, 0.0, tile.LOWEST)
            parts.append(tile.Softmax(tuple(out), largest, total))
        new_max = state.max
        for one in parts:
            new_max = jnp.maximum(new_max, one.max)
        rescale = jnp.exp2(state.max - new_max)
        out = [piece * lax.broadcast_in_dim(rescale, piece.shape, [1]) for piece in state.out]
        total = state.sum * rescale
        for one in parts:
            weight = jnp.exp2(one.max - new_max)
            total = total + one.sum * weight
            weights = lax.broadcast_in_dim(weight, out[0].shape, [1])
            out = [piece + new * weights for piece, new in zip(out, one.out, strict=True)]
        return tile.Softmax(tuple(out), new_max, total)

    num_rounds = pl.cdiv(jnp.maximum(last + 1 - first, 0), jnp.int32(MERGED_AT_A_TIME))
    state = lax.fori_loop(0, num_rounds, merge, tile.nothing(p, pieces))
    out = tile.normalised(p, state, extras, kv_head)
    places = tuple((first_row + start, rows) for start, rows in pieces)
    tile.store_heads(p, out, places, out_smem, out_gmem.at[row], kv_head)


def _merged_pieces(p: tile.Problem) -> tuple[tuple[int, int], ...]:
    """The pieces of the output that one program merges: 64 rows, or all where pieces overlap."""
    return p.pieces if len(p.pieces) > 1 else ((0, MERGED_ROWS),)


def paged_attention_v2(
    arrays: Arrays,
    options: Options,
    partition_size: int,
    *,
    config: tuning.TuningConfig | None = None,
    num_programs: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Launch both kernels. Arguments as `ops` has checked them; interpret: bool or plgpu.InterpretGPUParams.

    num_programs: how many programs share the partitions; by default what fills the GPU. Results do not
    depend on it.
    """
    config = config or tuning.config_for(arrays, options)
    p = tile.make_problem(arrays, options, config)
    if partition_size % p.tile_kv:
        raise NotImplementedError(
            f"{partition_size=} must be a multiple of {p.tile_kv} for mosaic_gpu. Use implementation='xla'."
        )
    num_seqs = arrays.q.shape[0]
    max_partitions = max(1, -(-arrays.block_tables.shape[1] * p.block_size // partition_size))
    max_items = num_seqs * max_partitions
    num_programs = min(num_programs or tuning.num_cores() * config.ctas_per_core, max_items * p.num_kv_heads)
    plan = _plan(arrays.seq_lens, max_partitions, partition_size, options.sliding_window)

    def partitions_kernel(*refs: Any) -> None:
        _partitions_kernel(*refs, problem=p, partition_size=partition_size, num_programs=num_programs)

    def merge_kernel(*refs: Any) -> None:
        _merge_kernel(*refs, problem=p)

    partial_shape = (p.head_dim, p.num_columns)
    extras = tile.extras_of(options)
    partial, stats = plgpu.kernel(
        partitions_kernel,
        out_type=[
            jax.ShapeDtypeStruct((max_items, p.num_kv_heads, *partial_shape), jnp.float32),
            jax.ShapeDtypeStruct((max_items, p.num_kv_heads, 2, p.num_columns), jnp.float32),
        ],
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="thread",
        scratch_types=[
            plgpu.SMEM(partial_shape, jnp.float32),
            plgpu.SMEM((2, p.num_columns), jnp.float32),
            tile.scratch_types(p),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tile.interpret_params(interpret),
    )(arrays, plan, extras)
    return plgpu.kernel(
        merge_kernel,
        out_type=jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
        grid=(num_seqs, p.num_kv_heads, 1 if len(p.pieces) > 1 else p.head_dim // MERGED_ROWS),
        grid_names=("row", "kv_head", "part"),
        scratch_types=[plgpu.SMEM((len(_merged_pieces(p)), p.num_columns, MERGED_ROWS), p.dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tile.interpret_params(interpret),
    )(partial, stats, plan.end, extras)
