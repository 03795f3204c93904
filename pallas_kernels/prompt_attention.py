"""Attention of prompts on Hopper GPUs: tiles of neighbouring query tokens, causal, over a paged cache.

    out[i, h] = softmax over the tokens t of the tile's sequence up to query i of (scale * q[i, h] . k[t]),
                applied to v[t]

with the options of `ops.tiled_paged_attention`. A program computes one tile for up to 128 rows of a kv head's
group, for example 4 query heads of 32 tokens; `_prompt_tile` is its code. The tiles of K and V lie on
multiples of tile_kv whatever else is computed, so a token's bits do not depend on its company.

A quantised cache is multiplied in float16: queries are brought into that type before, and the output, still
in units of the cache, is multiplied by the scale of V and brought back after the kernel, by XLA.

Not for: float32, block sizes under 8, tiles of more than 64 tokens, other head_dims than those in
`support.SUPPORT`. A long sequence is not cut: its last tiles take longest.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _gpu, support
from pallas_kernels import _prompt_tile as tile
from pallas_kernels._prompt_tile import TILE_LENS, Problem
from pallas_kernels.support import Arrays, Options, sizes_of, view_of


def _kernel(
    gmem: Any,  # `Arrays`, as refs, q as [num_tiles, tile_len, num_q_heads, head_dim]
    positions_gmem: Any,  # [num_tiles] of the tiles' first queries
    extras: _gpu.Extras,
    out_gmem: Any,  # like q
    scratch: tile.Scratch,
    *,
    problem: Problem,
) -> None:
    p = problem
    row, chunk, kv_head, warpgroup = (
        lax.axis_index(name) for name in ("tile", "chunk", "kv_head", "warpgroup")
    )
    span = tile.span_of(p, positions_gmem[row], gmem.seq_lens[row])

    @pl.when(warpgroup == p.num_warpgroups)
    def _producer() -> None:
        if p.shares_registers:
            plgpu.set_max_registers(tile.PRODUCER_REGISTERS, action="decrease")
        plgpu.warp_map(lambda warp: tile.produce(p, span, gmem, extras, row, kv_head, scratch, warp))

    if scratch.raw is not None:

        @pl.when(warpgroup == p.num_warpgroups + 1)
        def _widener() -> None:
            if p.shares_registers:
                plgpu.set_max_registers(tile.WIDENER_REGISTERS, action="decrease")
            tile.widen(p, span, gmem, extras, row, scratch)

    @pl.when(warpgroup < p.num_warpgroups)
    def _consumer() -> None:
        if p.shares_registers:
            plgpu.set_max_registers(p.consumer_registers, action="increase")
        first_head = (chunk * p.num_warpgroups + warpgroup) * p.warpgroup_heads  # in the group
        tile.load_queries(p, gmem.q.at[row], kv_head, first_head, scratch, warpgroup)
        head = kv_head * p.group_size + first_head
        out = tile.consume(p, span, extras, kv_head, head, scratch, warpgroup)
        tile.store_output(p, out, out_gmem.at[row], kv_head, first_head, scratch, warpgroup)


def prompt_attention(
    arrays: Arrays,
    query_starts: jax.Array,
    options: Options,
    *,
    in_registers: bool | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Launch the kernel. Arguments as `ops.tiled_paged_attention` has checked them, with q of four axes.

    in_registers: whether P stays in registers; by default unless it is interpreted.
    interpret: bool or plgpu.InterpretGPUParams.
    """
    num_tiles, query_len, num_q_heads, head_dim = arrays.q.shape
    if query_len > TILE_LENS[-1]:
        raise NotImplementedError(
            f"mosaic_gpu serves tiles of at most {TILE_LENS[-1]} tokens, not {query_len}. Use 'xla'."
        )
    if not interpret:
        support.refuse_ptxas(support.ptxas_version())
    tile_len = next(length for length in TILE_LENS if length >= query_len)
    cache = sizes_of(arrays, options)
    is_quantised = arrays.k_cache.dtype.itemsize == 1
    p = Problem(
        num_kv_heads=cache.num_kv_heads,
        group_size=num_q_heads // cache.num_kv_heads,
        tile_len=tile_len,
        query_len=query_len,
        head_dim=head_dim,
        block_size=cache.block_size,
        block_stride=_gpu.block_stride(options),
        dtype=jnp.dtype(jnp.float16) if is_quantised else arrays.q.dtype,
        cache_dtype=arrays.k_cache.dtype,
        new_dtype=arrays.q.dtype if options.packed is None else options.packed.k_new.dtype,
        view=view_of(options),
        scale=options.scale,
        has_slopes=options.alibi_slopes is not None,
        soft_cap=options.soft_cap,
        sliding_window=options.sliding_window,
        in_registers=not interpret if in_registers is None else in_registers,
        is_interpreted=bool(interpret),
        packed=options.kv_layout.packed_view(),
    )
    q = jnp.pad(arrays.q, [(0, 0), (0, tile_len - query_len), (0, 0), (0, 0)])
    if q.dtype != p.dtype:  # bfloat16's numbers go further
        q = jnp.clip(q, -_gpu.FLOAT16_MAX, _gpu.FLOAT16_MAX).astype(p.dtype)

    run = _kernel_of(p, num_tiles, interpret) if interpret else _shared_kernel_of(p, num_tiles)
    out = run(arrays._replace(q=q), query_starts, _gpu.extras_of(options))
    out = out[:, :query_len]
    if options.v_scale is None:
        return out.astype(arrays.q.dtype)
    per_head = jnp.repeat(options.v_scale, p.group_size)
    return (out * per_head[:, None]).astype(arrays.q.dtype)


@functools.cache
def _shared_kernel_of(p: Problem, num_tiles: int) -> Callable[..., jax.Array]:
    """The kernel as one function for all calls of a shape: a model is lowered once, not layer by layer."""
    return jax.jit(_kernel_of(p, num_tiles, interpret=False))


def _kernel_of(p: Problem, num_tiles: int, interpret: Any) -> Callable[..., jax.Array]:
    """(arrays, positions, extras) -> output."""

    def prompt_attention_kernel(*refs: Any) -> None:
        _kernel(*refs, problem=p)

    shape = (num_tiles, p.tile_len, p.num_kv_heads * p.group_size, p.head_dim)
    return plgpu.kernel(
        prompt_attention_kernel,
        out_type=jax.ShapeDtypeStruct(shape, p.dtype),
        grid=(num_tiles, p.num_chunks, p.num_kv_heads),
        grid_names=("tile", "chunk", "kv_head"),
        num_threads=p.num_threads,
        thread_name="warpgroup",
        scratch_types=[tile.scratch_types(p)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=_gpu.interpret_params(interpret),
    )
