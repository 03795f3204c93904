"""The public operations on a paged KV cache: check the arguments, choose an implementation, call it.

Wrong arguments raise ValueError while tracing. An implementation that cannot serve a combination raises
NotImplementedError with what can; nothing is ever replaced in silence. `support.SUPPORT` says who serves
what.

Shared by all operations:

* A block is `block_size` neighbouring token places of a cache. A cache is [num_blocks, block_size,
  num_kv_heads, head_dim] (kv_layout "token_major", the default) or [num_blocks, num_kv_heads, block_size,
  head_dim] ("head_major").
* Block 0 is the null block: nobody owns it, padding may be written into it, its content means nothing.
* A quantised cache (float8_e4m3fn, float8_e5m2, int8) holds x / scale, with a float32 scale for all heads,
  shape (), or per kv head, shape [num_kv_heads]. A cache in another type takes no scale.
* implementation: "mosaic_gpu" (Hopper GPUs), "xla" (anything), or None: the kernel if the default device is a
  Hopper GPU, XLA otherwise. interpret=True runs the Mosaic kernel in Pallas' GPU interpreter, on the CPU.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import native, xla, xla_tiles
from pallas_kernels import paged_attention_v1 as mosaic_v1
from pallas_kernels import paged_attention_v2 as mosaic_v2
from pallas_kernels.support import QUANTISED_DTYPES, BlockSparse, Options, refuse_unserved

Implementation = Literal["mosaic_gpu", "xla"]
TiledImplementation = Literal["mosaic_gpu", "native", "xla"]
Layout = Literal["token_major", "head_major"]
Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]  # q, k_cache, v_cache, tables, lengths


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    partition_size: int = 512,
    implementation: Implementation | None = None,
    interpret: bool = False,
    **options: Any,
) -> jax.Array:
    """`paged_attention_v1` or `paged_attention_v2`, by `use_v1`. Arguments and result as theirs."""
    block_size = _block_size(k_cache, options.get("kv_layout", "token_major"))
    capacity = block_tables.shape[-1] * block_size
    args = (q, k_cache, v_cache, block_tables, seq_lens)
    if use_v1(capacity, q.shape[0], k_cache.shape[_heads_axis(options)], partition_size):
        return paged_attention_v1(*args, implementation=implementation, interpret=interpret, **options)
    return paged_attention_v2(
        *args, partition_size=partition_size, implementation=implementation, interpret=interpret, **options
    )


def use_v1(max_seq_len: int, num_seqs: int, num_kv_heads: int, partition_size: int = 512) -> bool:
    """The rule of `paged_attention`: v1 for short tables, or where rows and heads alone fill the GPU.

    It follows vLLM's (v1 if max_seq_len <= 8192 and there is one partition or num_seqs * num_heads > 512),
    with
    the count of programs in place of its count of heads: our v1 runs one program per kv head, not per query
    head. It looks at capacities only, never at lengths, so a row's bits do not depend on its neighbours.
    """
    one_partition = max_seq_len <= partition_size
    return max_seq_len <= 8192 and (one_partition or num_seqs * num_kv_heads > 512)


def paged_attention_v1(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    block_sparse: BlockSparse | None = None,
    kv_layout: Layout = "token_major",
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of one query token per sequence over its cached tokens, one program per (sequence, kv head).

    For query head h of a row of n tokens, with t over the tokens it sees:

        s[t] = scale * dot(q[h], k[t]); then soft_cap * tanh(s[t] / soft_cap); then + alibi_slopes[h] * (t
        - n + 1) out[h] = sum_t exp(s[t]) * v[t] / (sum_t exp(s[t]) + exp(sinks[h]))

    Args:
        q: [num_seqs, num_q_heads, head_dim] float16, bfloat16 or float32. The query is the row's last token.
        k_cache, v_cache: the pools, of q's type or quantised.
        block_tables: [num_seqs, max_blocks_per_seq] int32. Entries past a row's tokens are never read.
        seq_lens: [num_seqs] int32, tokens in the cache, the query's own included; 0 makes a row of zeros.
        scale: factor on the dot products; 1 / sqrt(head_dim) if None.
        alibi_slopes: [num_q_heads].
        sliding_window: only the last so many tokens are seen, the query's own among them.
        soft_cap: bound of the logits, positive.
        sinks: [num_q_heads], a logit per head that takes its share of the weights and has no value.
        k_scale, v_scale: of a quantised cache; see above.
        block_sparse: see `BlockSparse`.

    Returns: [num_seqs, num_q_heads, head_dim] of q's type.
    Raises: ValueError on wrong shapes, types or options; NotImplementedError where the implementation does
    not
        serve the combination.
    """
    args, checked = _check_attention(
        q, k_cache, v_cache, block_tables, seq_lens,
        Options(
            _scale(scale, q), alibi_slopes, sliding_window, soft_cap, sinks,
            _array(k_scale), _array(v_scale), block_sparse, kv_layout,
        ),
    )  # fmt: skip
    chosen = _choose(implementation, interpret, args, checked)
    if chosen == "xla":
        return xla.paged_attention_v1(*args, checked)
    return mosaic_v1.paged_attention_v1(*args, checked, interpret=interpret)


def paged_attention_v2(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    partition_size: int = 512,
    scale: float | None = None,
    alibi_slopes: jax.Array | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    block_sparse: BlockSparse | None = None,
    kv_layout: Layout = "token_major",
    implementation: Implementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As `paged_attention_v1`, with each row cut into partitions of `partition_size` tokens.

    Partitions are computed in parallel, each to sum exp(s - max) * v, sum exp(s - max) and max in float32;
    then a row's partitions are merged. For few long rows, where v1 would leave most of the GPU idle.

    partition_size: tokens, a multiple of the block size (of 64 as well for "mosaic_gpu").
    """
    args, checked = _check_attention(
        q, k_cache, v_cache, block_tables, seq_lens,
        Options(
            _scale(scale, q), alibi_slopes, sliding_window, soft_cap, sinks,
            _array(k_scale), _array(v_scale), block_sparse, kv_layout,
        ),
    )  # fmt: skip
    block_size = _block_size(k_cache, kv_layout)
    if partition_size <= 0 or partition_size % block_size:
        raise ValueError(f"{partition_size=} must be a positive multiple of {block_size=}")
    chosen = _choose(implementation, interpret, args, checked)
    if chosen == "xla":
        return xla.paged_attention_v2(*args, checked, partition_size)
    return mosaic_v2.paged_attention_v2(*args, checked, partition_size, interpret=interpret)


def tiled_paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    query_starts: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    implementation: TiledImplementation | None = None,
) -> jax.Array:
    """Causal attention of tiles of neighbouring query tokens, each over its own line of the block table.

    Query i of tile t stands at position `query_starts[t] + i` and sees the positions up to its own that are
    below `seq_lens[t]`. The queries' own K and V are in the cache already.

    Args:
        q: [num_tiles, tile_len, num_q_heads, head_dim] float16, bfloat16 or float32.
        k_cache, v_cache: the pools, token-major and of q's type.
        block_tables: [num_tiles, max_blocks_per_seq] int32. Entries of blocks that no query of the tile sees,
            past its sequence's tokens or before its window, are never read.
        query_starts: [num_tiles] int32. A tile of one token is its sequence's last: seq_lens - 1.
        seq_lens: [num_tiles] int32, tokens in the cache that the tile may see; 0 makes a tile of zeros.
        scale: factor on the dot products.
        sliding_window: only the last so many tokens are seen, the query's own among them.
        implementation: None stands for `default_tiled_implementation`. "mosaic_gpu" serves tiles of one
            token, "native" CPUs as `native.why_not` says, "xla" everything.

    Returns: [num_tiles, tile_len, num_q_heads, head_dim] of q's type. Queries at or beyond seq_lens are
        padding: what they get has no meaning.
    Raises: ValueError on wrong shapes, types or options; NotImplementedError for what the implementation
        does not serve.
    """
    if q.ndim != 4:
        raise ValueError(f"{q.shape=} must be [num_tiles, tile_len, num_q_heads, head_dim]")
    num_tiles, tile_len = q.shape[:2]
    options = Options(scale=scale, sliding_window=sliding_window)
    _check_attention(q[:, 0], k_cache, v_cache, block_tables, seq_lens, options)
    _check_int32("query_starts", query_starts, (num_tiles,))
    if k_cache.dtype != q.dtype:
        raise ValueError(f"{k_cache.dtype=} must be q's {q.dtype}: tiles read no quantised cache yet")
    chosen = implementation or default_tiled_implementation(q.dtype, tile_len)
    arrays = (q, k_cache, v_cache, block_tables, query_starts, seq_lens)
    if chosen == "xla":
        return xla_tiles.tiled_paged_attention(*arrays, scale=scale, sliding_window=sliding_window)
    if chosen == "native":
        if why := native.why_not(q.dtype):
            raise NotImplementedError(f"'native' attention does not serve this call: {why}. Use 'xla'.")
        return native.tiled_paged_attention(*arrays, scale=scale, sliding_window=sliding_window)
    if tile_len > 1:
        raise NotImplementedError(f"{chosen} serves tiles of one token, not {tile_len=}. Use 'xla'.")
    args = (q[:, 0], k_cache, v_cache, block_tables, seq_lens)
    out = paged_attention(*args, scale=scale, sliding_window=sliding_window, implementation=chosen)
    return out[:, None]


def reshape_and_cache(
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    kv_layout: Layout = "token_major",
) -> tuple[jax.Array, jax.Array]:
    """Write new tokens to their slots; in place where the caches are donated to the surrounding jit.

    One implementation, XLA's scatter: compiled for a GPU it has no temporary and no copy, so there is
    nothing for a kernel to save.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], any floating type.
        slot_mapping: [num_tokens] int32, slot = block_id * block_size + offset. A slot outside the cache
            (-1, say) is padding and goes to slot 0, in the null block. Other slots must be distinct.

    Returns: the new k_cache and v_cache. A quantised cache stores x / scale, saturated (int8: rounded).
    Raises: ValueError on wrong shapes or types.
    """
    _check_caches(k_cache, v_cache, kv_layout)
    num_kv_heads, head_dim = k_cache.shape[2 if kv_layout == "token_major" else 1], k_cache.shape[3]
    _check_shape("k", k, (k.shape[0] if k.ndim else 0, num_kv_heads, head_dim))
    _check_shape("v", v, k.shape)
    _check_int32("slot_mapping", slot_mapping, k.shape[:1])
    k_scale, v_scale = _check_scales(k_scale, v_scale, k_cache, num_kv_heads)
    return xla.reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_layout)


def copy_blocks(caches: Sequence[jax.Array], pairs: jax.Array) -> list[jax.Array]:
    """Copy block pairs[i, 0] onto block pairs[i, 1] in every cache, as if one pair came after the other.

    Args:
        caches: arrays [num_blocks, ...] with one num_blocks, such as the k and v of every layer.
        pairs: [num_pairs, 2] int32. Chains and repeated targets are fine. (0, 0), or a pair that names a
            block outside the cache, is padding and changes nothing.

    Returns: the new caches, in place where they are donated.
    Raises: ValueError on wrong shapes or types.
    """
    _check_int32("pairs", pairs, (pairs.shape[0] if pairs.ndim else 0, 2))
    for i, cache in enumerate(caches):
        if cache.shape[0] != caches[0].shape[0]:
            raise ValueError(
                f"caches[{i}].shape={cache.shape} must begin with num_blocks={caches[0].shape[0]}"
            )
    return xla.copy_blocks(caches, pairs) if caches else []


def swap_blocks(source: jax.Array, target: jax.Array, pairs: jax.Array) -> jax.Array:
    """Copy block pairs[i, 0] of one pool onto block pairs[i, 1] of another, between device and host memory.

    Each pool may lie in device memory or in the host's (`jax.device_put(pool, jax.memory.Space.Host)`);
    only the named blocks travel. Call it under jit, with the target donated to have it written in place.

    Args:
        source, target: [num_blocks, ...] with equal block shapes and types; num_blocks may differ.
        pairs: [num_pairs, 2] int32, done in order. A pair with a block outside its pool changes nothing.

    Returns: the new target, in target's memory.
    Raises: ValueError on wrong shapes or types.
    """
    _check_int32("pairs", pairs, (pairs.shape[0] if pairs.ndim else 0, 2))
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"source {source.dtype}{source.shape} must hold blocks like target's {target.dtype}{target.shape}"
        )
    return xla.swap_blocks(source, target, pairs)


@functools.cache
def default_implementation() -> Implementation:
    """What implementation=None stands for: "mosaic_gpu" if the default device is a Hopper GPU, else "xla"."""
    device = jax.devices()[0]
    is_hopper = device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"
    return "mosaic_gpu" if is_hopper else "xla"


def default_tiled_implementation(dtype: jnp.dtype, tile_len: int) -> TiledImplementation:
    """What None stands for in `tiled_paged_attention`: a kernel of this device if one serves, else "xla"."""
    if native.serves(dtype):
        return "native"
    return default_implementation() if tile_len == 1 else "xla"


def _choose(
    implementation: Implementation | None, interpret: bool, args: Arrays, options: Options
) -> Implementation:
    if implementation is None:
        implementation = "mosaic_gpu" if interpret else default_implementation()
    if implementation not in ("mosaic_gpu", "xla"):
        raise ValueError(f"{implementation=} must be 'mosaic_gpu', 'xla' or None")
    if interpret and implementation != "mosaic_gpu":
        raise ValueError(f"{interpret=} needs implementation='mosaic_gpu', not {implementation!r}")
    q, k_cache = args[:2]
    num_kv_heads = k_cache.shape[2 if options.kv_layout == "token_major" else 1]
    refuse_unserved(
        implementation,
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
        head_dim=q.shape[2],
        block_size=_block_size(k_cache, options.kv_layout),
        group_size=q.shape[1] // num_kv_heads,
        options=options,
    )
    return implementation


def _check_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    options: Options,
) -> tuple[Arrays, Options]:
    """Refuse what is wrong; give every optional array its full shape and float32."""
    _check_caches(k_cache, v_cache, options.kv_layout)
    if q.ndim != 3:
        raise ValueError(f"{q.shape=} must be [num_seqs, num_q_heads, head_dim]")
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2 if options.kv_layout == "token_major" else 1]
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"{k_cache.shape=} must end with q's head_dim={head_dim}")
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads=} must be a multiple of {num_kv_heads=}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"{q.dtype=} must be a floating type")
    if k_cache.dtype != q.dtype and k_cache.dtype.name not in QUANTISED_DTYPES:
        raise ValueError(f"{k_cache.dtype=} must be q's {q.dtype} or one of {QUANTISED_DTYPES}")
    if block_tables.ndim != 2:
        raise ValueError(f"{block_tables.shape=} must be [num_seqs, max_blocks_per_seq]")
    _check_int32("block_tables", block_tables, (num_seqs, block_tables.shape[1]))
    if block_tables.shape[1] == 0:
        raise ValueError(f"{block_tables.shape=} must have room for at least one block per sequence")
    _check_int32("seq_lens", seq_lens, (num_seqs,))
    if not math.isfinite(options.scale):
        raise ValueError(f"scale={options.scale} must be finite")
    window, soft_cap, sparse = options.sliding_window, options.soft_cap, options.block_sparse
    if window is not None and window < 1:
        raise ValueError(f"sliding_window={window} must be at least 1")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap} must be positive")
    if sparse is not None and (
        sparse.block_size < 1 or sparse.vertical_stride < 1 or sparse.local_blocks < 0
    ):
        raise ValueError(f"{sparse} must have block_size >= 1, vertical_stride >= 1 and local_blocks >= 0")
    per_head = {}
    for name in ("alibi_slopes", "sinks"):
        value = getattr(options, name)
        if value is not None:
            value = jnp.asarray(value, jnp.float32)
            _check_shape(name, value, (num_q_heads,))
        per_head[name] = value
    k_scale, v_scale = _check_scales(options.k_scale, options.v_scale, k_cache, num_kv_heads)
    checked = Options(
        scale=options.scale, sliding_window=window, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale,
        block_sparse=sparse, kv_layout=options.kv_layout, **per_head,
    )  # fmt: skip
    return (q, k_cache, v_cache, block_tables, seq_lens), checked


def _check_caches(k_cache: jax.Array, v_cache: jax.Array, kv_layout: str) -> None:
    if kv_layout not in ("token_major", "head_major"):
        raise ValueError(f"{kv_layout=} must be 'token_major' or 'head_major'")
    if k_cache.ndim != 4:
        axes = "block_size, num_kv_heads" if kv_layout == "token_major" else "num_kv_heads, block_size"
        raise ValueError(f"{k_cache.shape=} must be [num_blocks, {axes}, head_dim]")
    _check_shape("v_cache", v_cache, k_cache.shape)
    if v_cache.dtype != k_cache.dtype:
        raise ValueError(f"{v_cache.dtype=} must be k_cache's {k_cache.dtype}")


def _check_scales(
    k_scale: jax.Array | float | None,
    v_scale: jax.Array | float | None,
    k_cache: jax.Array,
    num_kv_heads: int,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Both scales as float32 [num_kv_heads], or None for a cache that is not quantised."""
    is_quantised = k_cache.dtype.name in QUANTISED_DTYPES
    scales = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None and is_quantised:
            raise ValueError(f"{name}=None must be a scale for a cache of {k_cache.dtype}")
        if scale is not None and not is_quantised:
            raise ValueError(f"{name} must be None for a cache of {k_cache.dtype}")
        if scale is not None:
            scale = jnp.asarray(scale, jnp.float32)
            if scale.shape not in ((), (num_kv_heads,)):
                raise ValueError(f"{name}.shape={scale.shape} must be () or [num_kv_heads]=({num_kv_heads},)")
            scale = jnp.broadcast_to(scale, (num_kv_heads,))
        scales.append(scale)
    return scales[0], scales[1]


def _check_shape(name: str, array: jax.Array, want: tuple[int, ...]) -> None:
    if array.shape != want:
        raise ValueError(f"{name}.shape={array.shape} must be {want}")


def _check_int32(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    _check_shape(name, array, shape)
    if array.dtype != jnp.int32:
        raise ValueError(f"{name}.dtype={array.dtype} must be int32")


def _array(value: jax.Array | float | None) -> jax.Array | None:
    return None if value is None else jnp.asarray(value, jnp.float32)


def _scale(scale: float | None, q: jax.Array) -> float:
    head_dim = q.shape[-1] if q.ndim else 1  # a wrong rank is refused afterwards
    return head_dim**-0.5 if scale is None else float(scale)


def _block_size(k_cache: jax.Array, kv_layout: str) -> int:
    return k_cache.shape[1 if kv_layout == "token_major" else 2]


def _heads_axis(options: dict[str, Any]) -> int:
    return 2 if options.get("kv_layout", "token_major") == "token_major" else 1
