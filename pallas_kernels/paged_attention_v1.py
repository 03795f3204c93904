"""Decode attention on Hopper GPUs, one program per (sequence, kv head).

    out[row, h] = softmax over the row's tokens of (scale * q[row, h] . k[t]) , applied to v[t]

with the options of `ops.paged_attention_v1`. The query heads of a group share every read of K and V. A
program has a producer thread, which fetches tiles of the row's blocks by TMA into a ring in shared memory,
and a consumer,
which computes on them with wgmma: `_decode_tile` is their code. Here the whole row is one softmax.

Not for: float32, block sizes under 8, block-sparse patterns (see `support.SUPPORT`); few long rows are v2's.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _decode_tile as tile
from pallas_kernels import tuning
from pallas_kernels.support import Options


def _kernel(*refs: Any, problem: tile.Problem, has_sinks: bool) -> None:
    """Arguments: q, k_cache, v_cache, block_tables, seq_lens, [alibi_slopes], [sinks], out, scratch."""
    p = problem
    q_gmem, k_gmem, v_gmem, tables_gmem, seq_lens_gmem, *optional, out_gmem, out_smem, scratch = refs
    alibi_gmem = optional.pop(0) if p.has_alibi else None
    sinks_gmem = optional.pop(0) if has_sinks else None
    row, kv_head, thread = lax.axis_index("row"), lax.axis_index("kv_head"), lax.axis_index("thread")
    span = tile.row_span(p, row, kv_head, seq_lens_gmem)

    @pl.when(thread == 1)
    def _producer() -> None:
        done = tile.produce(p, span, k_gmem, v_gmem, tables_gmem, scratch, jnp.int32(0))
        tile.drain(p, scratch, done)

    @pl.when(thread == 0)
    def _consumer() -> None:
        state, _ = tile.consume(p, span, q_gmem, alibi_gmem, scratch, jnp.int32(0))
        out = tile.normalised(p, state, sinks_gmem, kv_head)
        tile.store_transposed(out_smem, out.astype(p.dtype))
        plgpu.commit_smem()
        heads = pl.ds(kv_head * p.group_size, p.group_size)
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, p.group_size)], out_gmem.at[row, heads])
        plgpu.wait_smem_to_gmem(0)


def paged_attention_v1(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    options: Options,
    *,
    config: tuning.TuningConfig | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Launch the kernel. Arguments as `ops` has checked them; interpret: bool or plgpu.InterpretGPUParams."""
    p = tile.make_problem(q, k_cache, options, config or tile.config_of(q, k_cache, options))
    optional = [a for a in (options.alibi_slopes, options.sinks) if a is not None]

    def paged_attention_v1_kernel(*refs: Any) -> None:
        _kernel(*refs, problem=p, has_sinks=options.sinks is not None)

    return plgpu.kernel(
        paged_attention_v1_kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(q.shape[0], p.num_kv_heads),
        grid_names=("row", "kv_head"),
        num_threads=2,
        thread_name="thread",
        scratch_types=[plgpu.SMEM((p.num_columns, p.head_dim), p.dtype), tile.scratch_types(p)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tile.interpret_params(interpret),
    )(q, k_cache, v_cache, block_tables, seq_lens, *optional)
