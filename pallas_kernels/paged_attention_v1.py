"""Decode attention on Hopper GPUs, one program per (sequence, kv head).

    out[row, h] = softmax over the row's tokens t of (scale * q[row, h] . k[t]), applied to v[t]

with the options of `ops.paged_attention_v1`. The query heads of a group share every read of K and V. A
program has a producer thread, which fetches tiles of the row's blocks by TMA into a ring in shared memory,
and a consumer, which computes on them with wgmma: `_decode_tile` is their code. Here the whole row is one
softmax.

Not for: float32, block sizes under 8, other head_dims than those in `support.SUPPORT`. A
block-sparse pattern is served, but blocks it leaves out are read all the same. Few long rows are v2's.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _decode_tile as tile
from pallas_kernels import tuning
from pallas_kernels.support import Arrays, Options


def _kernel(
    gmem: Any,  # `Arrays`, as refs
    extras: tile.Extras,
    out_gmem: Any,  # [num_seqs, num_q_heads, head_dim]
    out_smem: Any,  # [pieces, num_columns, piece_rows], used once, at the end
    scratch: tile.Scratch,
    *,
    problem: tile.Problem,
) -> None:
    p = problem
    row, kv_head, thread = lax.axis_index("row"), lax.axis_index("kv_head"), lax.axis_index("thread")
    span = tile.row_span(p, row, kv_head, gmem.seq_lens)

    @pl.when(thread == 1)
    def _producer() -> None:
        done = tile.produce(p, span, gmem, scratch, jnp.int32(0))
        tile.drain(p, scratch, done)

    @pl.when(thread == 0)
    def _consumer() -> None:
        state, _ = tile.consume(p, span, gmem.q, extras, scratch, jnp.int32(0))
        out = tile.normalised(p, state, extras, kv_head)
        tile.store_heads(p, out, p.pieces, out_smem, out_gmem.at[row], kv_head)


def paged_attention_v1(
    arrays: Arrays,
    options: Options,
    *,
    config: tuning.TuningConfig | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Launch the kernel. Arguments as `ops` has checked them; interpret: bool or plgpu.InterpretGPUParams."""
    p = tile.make_problem(arrays, options, config or tuning.config_for(arrays, options))

    def paged_attention_v1_kernel(*refs: Any) -> None:
        _kernel(*refs, problem=p)

    return plgpu.kernel(
        paged_attention_v1_kernel,
        out_type=jax.ShapeDtypeStruct(arrays.q.shape, arrays.q.dtype),
        grid=(arrays.q.shape[0], p.num_kv_heads),
        grid_names=("row", "kv_head"),
        num_threads=2,
        thread_name="thread",
        scratch_types=[
            plgpu.SMEM((len(p.pieces), p.num_columns, p.piece_rows), p.dtype),
            tile.scratch_types(p),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tile.interpret_params(interpret),
    )(arrays, tile.extras_of(options))
