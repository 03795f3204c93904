"""Attention of tiles of query tokens: `attention.h`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.layouts import Layout, Place, Pool
from pallas_kernels.native import library

CACHE_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")  # beside the queries' own


def why_not_cache(layout: Layout, dtype: jnp.dtype) -> str | None:
    """In words, why attention over caches of a layout is left to XLA; None if it is not.

    What XLA will call is known to it from now on, by a program that was compiled earlier, too.
    """
    if why := library.why_not(dtype) or why_not_layout(layout, dtype):
        return why
    return library.why_not(dtype, _function(_numbers(layout, dtype), dtype))


def why_not_layout(layout: Layout, dtype: jnp.dtype) -> str | None:
    """In words, why caches of a layout are left to XLA; None if they are not."""
    if layout.view() is None:
        return f"kv_layout {layout} has no view for kernels"
    numbers = _numbers(layout, dtype)
    if numbers != dtype and numbers.name not in CACHE_DTYPES:
        return f"kv_layout {layout} has numbers of {numbers}"
    return None


def _numbers(layout: Layout, dtype: jnp.dtype) -> jnp.dtype:
    """Of what type are the numbers of K and V in a layout that has a view."""
    view = layout.view()
    assert view is not None
    return jnp.dtype(layout.arrays(1, 1, 1, 1, dtype)[view.k.array].dtype)


def _function(numbers: jnp.dtype, dtype: jnp.dtype) -> str:
    return "attention" if numbers == dtype else "attention_of_bytes"


def tiled_paged_attention(
    q: Float[Array, "num_tiles tile_len num_q_heads head_dim"],
    pool: Pool,
    block_tables: Int[Array, "num_tiles max_blocks_per_seq"],
    query_starts: Int[Array, " num_tiles"],
    seq_lens: Int[Array, " num_tiles"],
    *,
    scale: float,
    sliding_window: int | None,
) -> Float[Array, "num_tiles tile_len num_q_heads head_dim"]:
    """As `ops.tiled_paged_attention`, where `serves(q.dtype)`, and `why_not_layout` has nothing to say.

    Queries at or beyond seq_lens get zeros.
    """
    window = np.iinfo(np.int32).max if sliding_window is None else sliding_window
    k, v, k_scales, v_scales, places = operands(pool)
    function = library.registered(_function(k.dtype, q.dtype))
    call = jax.ffi.ffi_call(function, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        k,
        v,
        block_tables,
        query_starts,
        seq_lens,
        k_scales,
        v_scales,
        scale=np.float32(scale),
        window=np.int64(window),
        places=np.array(places, np.int64),
    )


def operands(pool: Pool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, list[int]]:
    """The arrays of K, V and their scales, these empty where there are none, and where in them a token's are.

    Places are, in elements: num_kv_heads and block_size; of K and V the first of each, then from one block,
    token and head to the next, which both have in common; the same of the scales.
    """
    view, arrays = pool.layout.view(), pool.arrays
    assert view is not None
    numbers = [(view.k, arrays[view.k.array]), (view.v, arrays[view.v.array])]
    nothing = Place("", ()), jnp.zeros(0, jnp.float32)
    scales = [nothing, nothing]
    if view.k_scale is not None and view.v_scale is not None:
        scales = [(place, arrays[place.array]) for place in (view.k_scale, view.v_scale)]
    elif pool.scales is not None:
        scales = [(Place("", ("head",)), scale) for scale in pool.scales]
    places = [pool.sizes.num_kv_heads, pool.sizes.block_size]
    for pair in (numbers, scales):
        k_at, v_at = (place.strides(array.shape) for place, array in pair)
        steps = [k_at[name] for name in ("block", "token", "head")]
        assert steps == [v_at[name] for name in ("block", "token", "head")], "K and V lie alike"
        places += [k_at["first"], v_at["first"], *steps]
    return numbers[0][1], numbers[1][1], scales[0][1], scales[1][1], places
