"""Attention of tiles of query tokens on CPUs: `attention.h`, and over caches of 4 bits a number
`packed_attention.cc`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.layouts import Layout, Location, Pool
from pallas_kernels.native import library

CACHE_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")  # beside the queries' own
UNBOUNDED = 2**31 - 1  # tokens: a window or chunk that holds any sequence
MOST_HEADS = 16  # query heads of one KV head that a tile has: more are tiles of their own, for other threads
LEAST_SAVED = 256  # tokens: for fewer, the lists of work of a shared prefix take as long as reading it again
GROUP = 16  # tokens of a packed cache that have K's scales in common


def why_not_cache(layout: Layout, dtype: jnp.dtype) -> str | None:
    """Return why XLA must compute attention over caches of a layout; None if the kernels serve them.

    Registers the kernel with XLA, so that a program from the disk cache finds it, too.
    """
    if why := library.why_not(dtype) or why_not_layout(layout, dtype):
        return why
    return library.why_not(dtype, _function(layout, dtype))


def why_not_layout(layout: Layout, dtype: jnp.dtype) -> str | None:
    """Return why the kernels do not serve a layout, in words; None if they do. Registers nothing."""
    if packed := layout.packed_view():
        return None if packed.group == GROUP else f"kv_layout {layout} has groups of {packed.group} tokens"
    if layout.view() is None:
        return f"kv_layout {layout} has no view for kernels"
    numbers = numbers_of(layout, dtype)
    if numbers != dtype and numbers.name not in CACHE_DTYPES:
        return f"kv_layout {layout} has numbers of {numbers}"
    return None


def numbers_of(layout: Layout, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of K's and V's numbers in a layout with a view."""
    view = layout.view()
    assert view is not None
    if view.numbers is not None:
        return view.numbers
    return jnp.dtype(layout.arrays(1, 1, 1, 1, dtype)[view.k.array].dtype)


def _function(layout: Layout, dtype: jnp.dtype) -> str:
    """Return the name in `library.FUNCTIONS` of the function that reads a layout."""
    if layout.packed_view() is not None:
        return "attention_of_nibbles"
    return "attention" if numbers_of(layout, dtype) == dtype else "attention_of_bytes"


def tiled_paged_attention(
    q: Float[Array, "num_tiles tile_len num_q_heads head_dim"],
    pool: Pool,
    block_tables: Int[Array, "num_tables max_blocks_per_seq"],
    query_starts: Int[Array, " num_tiles"],
    seq_lens: Int[Array, " num_tiles"],
    table_rows: Int[Array, " num_tiles"] | None,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, " num_q_heads"] | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
    least_saved: int | None = None,
) -> Float[Array, "num_tiles tile_len num_q_heads head_dim"]:
    """Compute `ops.tiled_paged_attention`, where `serves(q.dtype)` and `why_not_layout` is None.

    table_rows: each tile's row of block_tables; None: tile t has row t.
    window, chunk: the options `sliding_window` and `attention_chunk`. Others have their names.
    least_saved: how many tokens less must be read for tiles to be computed together, whose rows of
        block_tables begin with the same blocks (`shared_prefixes.h`); None: LEAST_SAVED, 0: any number. A
        negative number keeps all apart. The bits are the same.

    Queries at or beyond seq_lens get zeros.
    """
    num_tiles, tile_len, num_q_heads, head_dim = q.shape
    if pool.sizes.num_kv_heads == 1 and num_q_heads > MOST_HEADS and alibi_slopes is None and sinks is None:
        parts = next(n for n in range(-(-num_q_heads // MOST_HEADS), num_q_heads + 1) if num_q_heads % n == 0)
        split = q.reshape(num_tiles, tile_len, parts, -1, head_dim).swapaxes(1, 2)
        rows = jnp.arange(num_tiles, dtype=jnp.int32) if table_rows is None else table_rows
        out = tiled_paged_attention(
            split.reshape(num_tiles * parts, tile_len, -1, head_dim),
            pool,
            block_tables,
            *(jnp.repeat(x, parts) for x in (query_starts, seq_lens, rows)),
            scale=scale,
            window=window,
            chunk=chunk,
            soft_cap=soft_cap,
            least_saved=least_saved,
        )
        return out.reshape(split.shape).swapaxes(1, 2).reshape(q.shape)
    function = library.registered(_function(pool.layout, q.dtype), q.dtype)
    call = jax.ffi.ffi_call(function, jax.ShapeDtypeStruct(q.shape, q.dtype))
    at = (block_tables, query_starts, seq_lens)
    if pool.layout.packed_view() is not None:
        arrays, places = packed_operands(pool)
        given: tuple[jax.Array, ...] = (q, *at, *arrays)
    else:
        k, v, k_scales, v_scales, places = operands(pool)
        given = (q, k, v, *at, k_scales, v_scales)
    first, stride = (jnp.int32(0), 1) if pool.blocks is None else (pool.blocks.first, pool.blocks.stride)
    rows = jnp.zeros(0, jnp.int32) if table_rows is None else table_rows
    biases = [jnp.zeros(0, jnp.float32) if bias is None else bias for bias in (alibi_slopes, sinks)]
    bounds = {"window": np.int64(window or UNBOUNDED), "chunk": np.int64(chunk or UNBOUNDED)}
    numbers = {"scale": np.float32(scale), "soft_cap": np.float32(soft_cap or 0)}
    options = {**numbers, "block_stride": np.int64(stride), **bounds}
    options["least_saved"] = np.int64(LEAST_SAVED if least_saved is None else least_saved)
    return call(*given, first, rows, *biases, **options, places=np.array(places, np.int64))


def operands(pool: Pool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, list[int]]:
    """Return the arrays of K, V and their scales, and the numbers by which the kernel finds a token in them.

    Absent scales are empty arrays. The numbers, counted in elements, are: num_kv_heads and block_size; the
    first element of K and of V, and the strides of a block, a token and a head, which K and V share; the same
    five of the scales; and the exponent bits of a float8 that is stored as bytes, or 0.
    """
    view, arrays = pool.layout.view(), pool.arrays
    assert view is not None
    numbers = [(view.k, arrays[view.k.array]), (view.v, arrays[view.v.array])]
    nothing = Location("", ()), jnp.zeros(0, jnp.float32)
    scales = [nothing, nothing]
    if view.k_scale is not None and view.v_scale is not None:
        scales = [(place, arrays[place.array]) for place in (view.k_scale, view.v_scale)]
    elif pool.scales is not None:
        scales = [(Location("", ("head",)), scale) for scale in pool.scales]
    places = [pool.sizes.num_kv_heads, pool.sizes.block_size]
    for pair in (numbers, scales):
        k_at, v_at = (place.strides(array.shape) for place, array in pair)
        steps = [k_at[name] for name in ("block", "token", "head")]
        assert steps == [v_at[name] for name in ("block", "token", "head")], "K and V lie alike"
        places += [k_at["first"], v_at["first"], *steps]
    places.append(0 if view.numbers is None else jnp.finfo(view.numbers).nexp)
    return numbers[0][1], numbers[1][1], scales[0][1], scales[1][1], places


def packed_operands(pool: Pool) -> tuple[list[jax.Array], list[int]]:
    """Return the arrays of a packed view in its order, and the numbers by which the kernel finds a token in
    them.

    The numbers, counted in elements, are: num_kv_heads and block_size; then the strides of a block, a token
    and a head in the codes, in K's scales (where "token" counts groups), in `k_new`, and in V's scales.
    """
    view = pool.layout.packed_view()
    assert view is not None
    locations = [getattr(view, name) for name in view._fields if name != "group"]
    arrays = [pool.arrays[place.array] for place in locations]
    strides = {
        name: place.strides(array.shape)
        for name, place, array in zip(view._fields[1:], locations, arrays, strict=True)
    }
    assert all(stride["first"] == 0 for stride in strides.values()), "each has an array of its own"
    assert strides["new_group"]["block"] == 1
    places = [pool.sizes.num_kv_heads, pool.sizes.block_size]
    for pair in (("k", "v"), ("k_scale", "k_zero"), ("k_new", "k_new"), ("v_scale", "v_zero")):
        strides_of_first, strides_of_second = (strides[name] for name in pair)
        assert strides_of_first == strides_of_second, "K and V, scales and zeros lie alike"
        places += [strides_of_first[axis] for axis in ("block", "token", "head")]
    return arrays, places
