"""Checks of the public operations' arguments, while tracing: an error names the value and the rule it breaks.

Checked arguments are returned in the form that the implementations take.
"""

import math
from collections.abc import Iterable
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from pallas_kernels import layouts
from pallas_kernels.layouts import Dense, Layout, Pool, Sizes
from pallas_kernels.support import QUANTISED_DTYPES, Arrays, Batch, BlockSparse, LayerKind, Options

# The axes of a cache of two arrays, in the order of `Sizes`: a layout's names, and the users'.
AXES = {"block": "num_blocks", "token": "block_size", "head": "num_kv_heads", "dim": "head_dim"}


class TiledOptions(TypedDict, total=False):
    """Keyword options of `tiled_paged_attention` and `ragged_paged_attention`; each is None by default."""

    alibi_slopes: jax.Array | None  # [num_q_heads]
    sliding_window: int | None  # tokens: a query sees only so many, its own the last of them
    attention_chunk: (
        int | None
    )  # tokens: a query at p sees those from p // attention_chunk * attention_chunk on
    layer_kind: LayerKind | None  # what a query sees, in place of a window or chunks; served by "xla"
    soft_cap: float | None  # bound of the logits, positive
    sinks: jax.Array | None  # [num_q_heads], a logit per head that joins the softmax's sum without a value
    k_scale: jax.Array | float | None  # of two quantised arrays, [num_kv_heads] or one for all heads
    v_scale: jax.Array | float | None
    kv_layout: str | Layout  # of two arrays, "token_major" by default; a pool has its own


class AttentionOptions(TiledOptions, total=False):
    """Keyword options of `paged_attention`, `_v1` and `_v2`."""

    scale: float | None  # factor on the dot products; 1 / sqrt(head_dim) if None
    block_sparse: BlockSparse | None


def check_names(function: str, given: Iterable[str], options: type[TiledOptions]) -> None:
    """Raise TypeError, as Python does, for a keyword that is none of these options."""
    if unknown := sorted(set(given) - set(options.__annotations__)):
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}")


def check_attention(arrays: Arrays, given: AttentionOptions) -> tuple[Batch, Options]:
    """Check the arrays and options of an attention call.

    arrays: as a caller gave them; k_cache may be a `Pool`, with v_cache None.

    Returns: the arrays with the cache as a pool, and the options with defaults filled in.
    Raises: ValueError for what is wrong.
    """
    check_names("paged_attention", given, AttentionOptions)
    q, k_cache, v_cache, block_tables, seq_lens, table_rows = arrays
    pool = pool_of(k_cache, v_cache, given.get("kv_layout", layouts.TOKEN_MAJOR))
    if q.ndim != 3:
        raise ValueError(f"{q.shape=} must be [num_seqs, num_q_heads, head_dim]")
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads = pool.sizes.num_kv_heads
    if pool.sizes.head_dim != head_dim:
        cache = f"pool.sizes={pool.sizes}" if v_cache is None else f"{k_cache.shape=}"
        raise ValueError(f"{cache} must end with q's head_dim={head_dim}")
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"{q.dtype=} must be a floating type")
    if v_cache is not None and k_cache.dtype != q.dtype and k_cache.dtype.name not in QUANTISED_DTYPES:
        raise ValueError(f"{k_cache.dtype=} must be q's {q.dtype} or one of {QUANTISED_DTYPES}")
    if block_tables.ndim != 2:
        raise ValueError(f"{block_tables.shape=} must be [num_seqs, max_blocks_per_seq]")
    num_tables = num_seqs if table_rows is None else block_tables.shape[0]
    check_int32("block_tables", block_tables, (num_tables, block_tables.shape[1]))
    if table_rows is not None:
        check_int32("table_rows", table_rows, (num_seqs,))
    if block_tables.shape[1] == 0:
        raise ValueError(f"{block_tables.shape=} must have room for at least one block per sequence")
    check_int32("seq_lens", seq_lens, (num_seqs,))
    options = _filled_in(given, num_q_heads, pool, None if v_cache is None else k_cache.dtype)
    return Batch(q, pool, block_tables, seq_lens, table_rows), options


def _filled_in(
    given: AttentionOptions, num_q_heads: int, pool: Pool, cache_dtype: jnp.dtype | None
) -> Options:
    """Return the options with defaults filled in, and arrays in full shape and float32.

    cache_dtype: of a cache of two arrays; None for a pool, which has its own scales.
    """
    cache = pool.sizes
    packed: dict[str, Any] = dict(given) | {"kv_layout": pool.layout}
    packed["scale"] = cache.head_dim**-0.5 if packed.get("scale") is None else float(packed["scale"])
    for name in ("alibi_slopes", "sinks"):
        if packed.get(name) is not None:
            packed[name] = jnp.asarray(packed[name], jnp.float32)
            check_shape(name, packed[name], (num_q_heads,))
    packed["k_scale"], packed["v_scale"] = check_scales(
        packed.get("k_scale"), packed.get("v_scale"), cache_dtype, cache.num_kv_heads
    )
    options = Options(**packed)
    window, chunk = options.sliding_window, options.attention_chunk
    soft_cap, sparse = options.soft_cap, options.block_sparse
    if not math.isfinite(options.scale):
        raise ValueError(f"scale={options.scale} must be finite")
    if window is not None and window < 1:
        raise ValueError(f"sliding_window={window} must be at least 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"attention_chunk={chunk} must be at least 1")
    if chunk is not None and window is not None:
        raise ValueError(f"attention_chunk={chunk} must be None beside sliding_window={window}")
    if options.layer_kind is not None and (chunk, window) != (None, None):
        raise ValueError(f"layer_kind={options.layer_kind} must be None beside a window or chunks")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be positive")
    if sparse is not None and (min(sparse.block_size, sparse.vertical_stride) < 1 or sparse.local_blocks < 0):
        raise ValueError(f"{sparse} must have block_size >= 1, vertical_stride >= 1 and local_blocks >= 0")
    return options


def pool_of(k_cache: Any, v_cache: Any, kv_layout: str | Layout) -> Pool:
    """Return the cache as a pool. Raise ValueError unless two arrays are alike and in a layout of two."""
    if isinstance(k_cache, Pool):
        if v_cache is not None:
            raise ValueError("v_cache must be None beside a pool")
        return k_cache
    kv_layout = layouts.named(kv_layout)
    if not isinstance(kv_layout, Dense) or kv_layout.names != ("k", "v"):
        raise ValueError(f"{kv_layout=} must be one of an array of K and one of V, or the cache a Pool")
    if k_cache.ndim != 4:
        raise ValueError(f"{k_cache.shape=} must be [{', '.join(AXES[axis] for axis in kv_layout.axes)}]")
    check_shape("v_cache", v_cache, k_cache.shape)
    if v_cache.dtype != k_cache.dtype:
        raise ValueError(f"{v_cache.dtype=} must be k_cache's {k_cache.dtype}")
    size_of = dict(zip(kv_layout.axes, k_cache.shape, strict=True))
    return Pool({"k": k_cache, "v": v_cache}, kv_layout, Sizes(*(size_of[axis] for axis in AXES)))


def check_new(pool: Pool, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> None:
    check_shape("k", k, (k.shape[0] if k.ndim else 0, *pool.sizes[2:]))
    check_shape("v", v, k.shape)
    check_int32("slot_mapping", slot_mapping, k.shape[:1])


def check_scales(
    k_scale: jax.Array | float | None,
    v_scale: jax.Array | float | None,
    cache_dtype: jnp.dtype | None,
    num_kv_heads: int,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Return both scales as float32 [num_kv_heads], or None for a cache that takes none."""
    is_quantised = cache_dtype is not None and cache_dtype.name in QUANTISED_DTYPES
    scales = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None and is_quantised:
            raise ValueError(f"{name}=None must be a scale for a cache of {cache_dtype}")
        if scale is not None and not is_quantised:
            raise ValueError(f"{name} must be None for a cache of {cache_dtype or 'its own scales'}")
        if scale is not None:
            scale = jnp.asarray(scale, jnp.float32)
            if scale.shape not in ((), (num_kv_heads,)):
                raise ValueError(f"{name}.shape={scale.shape} must be () or [num_kv_heads]=({num_kv_heads},)")
            scale = jnp.broadcast_to(scale, (num_kv_heads,))
        scales.append(scale)
    return scales[0], scales[1]


def check_shape(name: str, array: jax.Array, want: tuple[int, ...]) -> None:
    if array.shape != want:
        raise ValueError(f"{name}.shape={array.shape} must be {want}")


def check_int32(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    check_shape(name, array, shape)
    if array.dtype != jnp.int32:
        raise ValueError(f"{name}.dtype={array.dtype} must be int32")
