"""Attention of decode steps, of prompts, and of any mixture."""

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp

from pallas_kernels import layouts, native
from pallas_kernels.gpu.decode import attention as mosaic
from pallas_kernels.gpu.decode.attention import SharedPlan
from pallas_kernels.gpu.partitioning import Partitioning
from pallas_kernels.gpu.prompt import attention as mosaic_prompts
from pallas_kernels.layouts import Layout, Pool
from pallas_kernels.ops import checks, choice, ragged
from pallas_kernels.ops.checks import AttentionOptions
from pallas_kernels.ops.choice import Implementation, TiledImplementation
from pallas_kernels.support import (
    Arrays,
    Options,
    PackedArrays,
    refuse_unserved,
    view_of,
)
from pallas_kernels.xla import operations as xla
from pallas_kernels.xla import tiled_attention as xla_tiles


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array | Pool,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """As `paged_attention_v1`, with each row cut as its own length asks: the one to use.

    "mosaic_gpu" computes long rows in partitions (`decode.attention.default_partitioning`), so that few long
    rows keep a GPU as busy as many short ones; "xla" takes all tokens of a row in one running softmax.
    """
    arrays = Arrays(q, k_cache, v_cache, block_tables, seq_lens)
    checked = checks.check_attention(arrays, options)
    if _choose(implementation, interpret, arrays, checked) == "xla":
        return xla.paged_attention_v1(_batch(arrays, checked), checked)
    return mosaic.paged_attention(*_seen(arrays, checked), interpret=interpret)


def paged_attention_v1(
    q: jax.Array,
    k_cache: jax.Array | Pool,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    implementation: Implementation | None = None,
    interpret: bool = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """Attention of one query token per sequence over its cached tokens, each sequence in one running softmax.

    For query head h of a row of n tokens, with t over the tokens it sees:

        s[t]   = scale * dot(q[h], k[t])
        s[t]   = soft_cap * tanh(s[t] / soft_cap)          if there is a soft cap
        s[t]  += alibi_slopes[h] * (t - n + 1)             if there are slopes
        out[h] = sum_t exp(s[t]) * v[t] / (sum_t exp(s[t]) + exp(sinks[h]))      the last if there are sinks

    Args:
        q: [num_seqs, num_q_heads, head_dim] float16, bfloat16 or float32. The query is the row's last token.
        k_cache, v_cache: a `Pool` and None; or two arrays, of q's type or quantised.
        block_tables: [num_seqs, max_blocks_per_seq] int32. Entries past a row's tokens are never read.
        seq_lens: [num_seqs] int32, tokens in the cache, the query's own included; 0 makes a row of zeros.
        options: see `AttentionOptions`.

    Returns: [num_seqs, num_q_heads, head_dim] of q's type.
    Raises: ValueError on wrong shapes, types or options; NotImplementedError where the implementation does
        not serve the combination.
    """
    arrays = Arrays(q, k_cache, v_cache, block_tables, seq_lens)
    checked = checks.check_attention(arrays, options)
    if _choose(implementation, interpret, arrays, checked) == "xla":
        return xla.paged_attention_v1(_batch(arrays, checked), checked)
    whole = Partitioning(_capacity(arrays, checked), max_partitions=1)
    return mosaic.paged_attention(*_seen(arrays, checked), partitioning=whole, interpret=interpret)


def paged_attention_v2(
    q: jax.Array,
    k_cache: jax.Array | Pool,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    *,
    partition_size: int = 512,
    implementation: Implementation | None = None,
    interpret: bool = False,
    **options: Unpack[AttentionOptions],
) -> jax.Array:
    """As `paged_attention_v1`, with each row cut into partitions of `partition_size` tokens.

    Partitions are computed in parallel, each to sum exp(s - max) * v, sum exp(s - max) and max in float32;
    then a row's partitions are merged.

    partition_size: tokens, a multiple of the block size.
    """
    arrays = Arrays(q, k_cache, v_cache, block_tables, seq_lens)
    checked = checks.check_attention(arrays, options)
    block_size = _pool(checked).sizes.block_size
    if partition_size <= 0 or partition_size % block_size:
        raise ValueError(f"{partition_size=} must be a positive multiple of {block_size=}")
    if _choose(implementation, interpret, arrays, checked) == "xla":
        return xla.paged_attention_v2(_batch(arrays, checked), checked, partition_size)
    partitioning = Partitioning(
        partition_size, max_partitions=-(-_capacity(arrays, checked) // partition_size)
    )
    return mosaic.paged_attention(*_seen(arrays, checked), partitioning=partitioning, interpret=interpret)


def tiled_paged_attention(
    q: jax.Array,
    k_cache: jax.Array | Pool,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    query_starts: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    kv_layout: str | Layout = layouts.TOKEN_MAJOR,
    table_rows: jax.Array | None = None,
    plan: SharedPlan | None = None,
    implementation: TiledImplementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of tiles of neighbouring query tokens, each over its own line of the block table.

    Query i of tile t stands at position `query_starts[t] + i` and sees the positions up to its own that are
    below `seq_lens[t]`. The queries' own K and V are in the cache already.

    Args:
        q: [num_tiles, tile_len, num_q_heads, head_dim] float16, bfloat16 or float32.
        k_cache, v_cache: a `Pool` and None; or two arrays, of q's type or quantised.
        block_tables: [num_tiles, max_blocks_per_seq] int32. Entries of blocks that no query of the tile sees,
            past its sequence's tokens or before its window, are never read.
        query_starts: [num_tiles] int32. A tile of one token is its sequence's last: seq_lens - 1.
        seq_lens: [num_tiles] int32, tokens in the cache that the tile may see; 0 makes a tile of zeros.
        scale: factor on the dot products.
        sliding_window, alibi_slopes, soft_cap, sinks, k_scale, v_scale, kv_layout: see `AttentionOptions`.
        table_rows: [num_tiles] int32, each tile's row of block_tables, which may then have any number of
            them; None: tile t has row t. The kernels for decode steps, and for CPUs, copy no rows.
        plan: by `plan_of_tiles` of the same lengths, places, window and table_rows, for calls that share it;
            None: each call makes its own, where it needs one.
        implementation: None stands for `choice.default_tiled_implementation`. "mosaic_gpu" takes tiles of up
            to 64 tokens, a few (`paged_attention.serves`) with the kernel for decode steps; "native" serves
            CPUs as `native.why_not` says, without slopes, soft cap, sinks and scales; "xla" all.

    Returns: [num_tiles, tile_len, num_q_heads, head_dim] of q's type. Queries at or beyond seq_lens are
        padding: what they get has no meaning.
    Raises: ValueError on wrong shapes, types or options; NotImplementedError for what the implementation
        does not serve.
    """
    if q.ndim != 4:
        raise ValueError(f"{q.shape=} must be [num_tiles, tile_len, num_q_heads, head_dim]")
    num_tiles, tile_len = q.shape[:2]
    decode = Arrays(q[:, 0], k_cache, v_cache, block_tables, seq_lens, table_rows)
    given = AttentionOptions(
        scale=scale,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
        soft_cap=soft_cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_layout=kv_layout,
    )
    options = checks.check_attention(decode, given)
    checks.check_int32("query_starts", query_starts, (num_tiles,))
    if table_rows is not None:  # a tile of nothing may say anything
        table_rows = jnp.clip(table_rows, 0, block_tables.shape[0] - 1)
        decode = decode._replace(table_rows=table_rows)
    not_native = ("alibi_slopes", "soft_cap", "sinks", "k_scale", "v_scale")
    biases = [name for name in not_native if getattr(options, name) is not None]
    pool = _pool(options)
    not_native_layout = native.why_not_layout(pool.layout, q.dtype)
    if implementation is None and not interpret:
        implementation = choice.default_tiled_implementation(q.dtype, tile_len)
        if implementation == "native" and (biases or not_native_layout):
            implementation = "xla"
    if implementation == "native":
        why = f"it has no {', '.join(biases)}" if biases else native.why_not(q.dtype) or not_native_layout
        if why:
            raise NotImplementedError(f"'native' attention does not serve this call: {why}. Use 'xla'.")
        arrays = (q, pool, block_tables, query_starts, seq_lens, table_rows)
        return native.tiled_paged_attention(*arrays, scale=scale, sliding_window=sliding_window)
    chosen = _choose(implementation, interpret, decode, options)
    group_size = q.shape[2] // pool.sizes.num_kv_heads
    is_prompt = tile_len > 1 and not mosaic.serves(tile_len, group_size, q.shape[3])
    if table_rows is not None and (
        chosen == "xla" or is_prompt or not mosaic.finds_tables(num_tiles, block_tables.shape[0])
    ):
        block_tables = block_tables[table_rows]
        decode = decode._replace(block_tables=block_tables, table_rows=None)
    if chosen == "xla":
        return xla_tiles.tiled_paged_attention(q, pool, block_tables, query_starts, seq_lens, options)
    decode, options = _seen(decode, options)
    if is_prompt:
        return mosaic_prompts.prompt_attention(
            decode._replace(q=q), query_starts, options, interpret=interpret
        )
    rows = decode._replace(q=q.reshape(-1, *q.shape[2:]))
    out = mosaic.paged_attention(rows, options, query_starts=query_starts, shared=plan, interpret=interpret)
    return out.reshape(q.shape)


def plan_of_tiles(
    pool: Pool,
    block_tables: jax.Array,
    query_starts: jax.Array,
    seq_lens: jax.Array,
    *,
    tile_len: int,
    num_q_heads: int,
    sliding_window: int | None = None,
    table_rows: jax.Array | None = None,
    implementation: TiledImplementation,
) -> SharedPlan | None:
    """What calls of `tiled_paged_attention` with these arguments have to do, for all layers of a model.

    In a loop over layers XLA would make it anew in each turn. None where no such list is made: only the
    kernel for decode steps on Hopper GPUs has one.
    """
    cache = pool.sizes
    group_size = num_q_heads // cache.num_kv_heads
    if implementation != "mosaic_gpu" or not mosaic.serves(tile_len, group_size, cache.head_dim):
        return None
    num_tables, width = block_tables.shape
    if table_rows is not None:
        finds_tables = mosaic.finds_tables(seq_lens.shape[0], num_tables)
        table_rows = jnp.clip(table_rows, 0, num_tables - 1) if finds_tables else None
    sizes = mosaic.PlanSizes(
        num_rows=seq_lens.shape[0],
        query_len=tile_len,
        num_kv_heads=cache.num_kv_heads,
        group_size=group_size,
        capacity=width * cache.block_size,
        sliding_window=sliding_window,
        has_table_rows=table_rows is not None,
    )
    return mosaic.shared_plan(sizes, seq_lens, query_starts, table_rows)


def ragged_paged_attention(
    q: jax.Array,
    k_cache: jax.Array | Pool,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_query_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: jax.Array | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    kv_layout: str | Layout = layouts.TOKEN_MAJOR,
    max_query_len: int | None = None,
    implementation: TiledImplementation | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of a flat batch: prompts, chunks of them, decode steps and drafts, in any mixture.

    A sequence's queries are its last tokens; each sees its sequence up to itself. `tiled_paged_attention` is
    called twice: with a tile of one token for each sequence of one query, and tiles of up to 32 for others.

    Args:
        q: [num_tokens, num_q_heads, head_dim] float16, bfloat16 or float32.
        k_cache, v_cache: a `Pool` and None; or two arrays, of q's type or quantised. With the queries' own K
        and V. block_tables: [num_seqs, max_blocks_per_seq] int32, as for `tiled_paged_attention`. seq_lens:
        [num_seqs] int32, tokens in the cache, the queries' own included. cu_query_lens: [num_seqs + 1] int32.
        Sequence s has the queries from cu_query_lens[s] to before
            cu_query_lens[s + 1]. It begins with 0, and tokens from its last entry on are padding.
        max_query_len: a promise that no sequence has more queries: the fewer, the less is computed. With
            "mosaic_gpu", few enough take the kernel for decode steps.
        All else: as in `tiled_paged_attention`.

    Returns: [num_tokens, num_q_heads, head_dim] of q's type, zeros for padding.
    Raises: as `tiled_paged_attention`.
    """
    if q.ndim != 3:
        raise ValueError(f"{q.shape=} must be [num_tokens, num_q_heads, head_dim]")
    if seq_lens.ndim != 1 or seq_lens.shape[0] == 0:
        raise ValueError(f"{seq_lens.shape=} must be [num_seqs], with at least one sequence")
    checks.check_int32("cu_query_lens", cu_query_lens, (seq_lens.shape[0] + 1,))
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"{max_query_len=} must be at least 1")
    num_tokens, num_seqs = q.shape[0], seq_lens.shape[0]
    most = min(max_query_len or num_tokens, num_tokens)
    tile_len = max(1, min(most, ragged.TILE_LEN))
    count = ragged.num_tiles(num_tokens, num_seqs, most, tile_len)
    several, places = ragged.tiles(seq_lens, cu_query_lens, num_tokens, count, tile_len)

    def attend(tiles: ragged.Tiles, tile_len: int) -> jax.Array:
        return tiled_paged_attention(
            ragged.queries_of(q, tiles, tile_len),
            k_cache,
            v_cache,
            block_tables,
            tiles.position,
            tiles.seq_len,
            scale=scale,
            sliding_window=sliding_window,
            alibi_slopes=alibi_slopes,
            soft_cap=soft_cap,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_layout=kv_layout,
            table_rows=tiles.seq,
            implementation=implementation,
            interpret=interpret,
        )

    out = attend(ragged.singles(seq_lens, cu_query_lens), 1)[places.seq, 0]
    if tile_len > 1:
        of_tiles = attend(several, tile_len).at[places.tile, places.offset].get(mode="clip")
        out = jnp.where(places.is_single[:, None, None], out, of_tiles)
    return jnp.where(places.is_query[:, None, None], out, 0)


def _capacity(arrays: Arrays, options: Options) -> int:
    """Tokens that a row of the block table can hold."""
    return arrays.block_tables.shape[1] * _pool(options).sizes.block_size


def _pool(options: Options) -> Pool:
    """The pool of checked options."""
    assert options.pool is not None
    return options.pool


def _batch(arrays: Arrays, options: Options) -> xla.Batch:
    return xla.Batch(arrays.q, _pool(options), arrays.block_tables, arrays.seq_lens)


def _seen(arrays: Arrays, options: Options) -> tuple[Arrays, Options]:
    """What a kernel takes that reads a view: the arrays that it is of, and a pool's scales as options."""
    pool, view = _pool(options), view_of(options)
    k_scale, v_scale = pool.scales or (options.k_scale, options.v_scale)
    arrays = arrays._replace(k_cache=pool.arrays[view.k.array], v_cache=pool.arrays[view.v.array])
    token_scales = None
    if view.k_scale is not None and view.v_scale is not None:
        token_scales = pool.arrays[view.k_scale.array], pool.arrays[view.v_scale.array]
    packed = None
    if its := pool.layout.packed_view():
        packed = PackedArrays(*(pool.arrays[getattr(its, name).array] for name in PackedArrays._fields))
    options = dataclasses.replace(
        options,
        k_scale=k_scale,
        v_scale=v_scale,
        token_scales=token_scales,
        packed=packed,
        pool=None,
        blocks=pool.blocks,
    )
    return arrays, options


def _choose(
    implementation: Implementation | None, interpret: bool, arrays: Arrays, options: Options
) -> Implementation:
    if implementation is None:
        implementation = "mosaic_gpu" if interpret else choice.default_implementation()
    choice.is_mosaic(implementation, interpret=interpret)
    pool = _pool(options)
    cache, view = pool.sizes, pool.layout.view()
    refuse_unserved(
        implementation,
        dtype=arrays.q.dtype,
        cache_dtype=arrays.q.dtype if view is None else pool.arrays[view.k.array].dtype,
        head_dim=cache.head_dim,
        block_size=cache.block_size,
        group_size=arrays.q.shape[1] // cache.num_kv_heads,
        options=options,
    )
    return implementation
