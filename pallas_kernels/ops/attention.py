"""Attention over a paged cache: decode steps, prompts, and any mixture of both.

The public functions take the cache as a `Pool`, or as an array of K and one of V. `checks.check_attention`
makes a pool of either, and all that follows takes the pool.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Unpack

import jax
import jax.numpy as jnp

from pallas_kernels import native
from pallas_kernels.gpu.decode import attention as decode_kernel
from pallas_kernels.gpu.decode.attention import SharedPlan
from pallas_kernels.gpu.partitioning import Partitioning
from pallas_kernels.gpu.prompt import attention as prompt_kernel
from pallas_kernels.layouts import Pool
from pallas_kernels.ops import checks, choice, ragged
from pallas_kernels.ops.checks import AttentionOptions, TiledOptions
from pallas_kernels.ops.choice import Implementation, TiledImplementation
from pallas_kernels.support import Arrays, Batch, Options, PackedArrays, view_of
from pallas_kernels.xla import attention as xla
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
    """Compute `paged_attention_v1`, with partitions that suit each row's length: the one to use.

    "mosaic_gpu" computes long rows in partitions (`decode.attention.default_partitioning`), so that few long
    rows keep a GPU as busy as many short ones. "xla" takes all tokens of a row in one running softmax.
    """
    batch, checked = checks.check_attention(Arrays(q, k_cache, v_cache, block_tables, seq_lens), options)
    return _decode(batch, checked, implementation, xla.paged_attention_v1, None, interpret=interpret)


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
    """Compute attention of one query token per sequence over its cached tokens, in one running softmax each.

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
    batch, checked = checks.check_attention(Arrays(q, k_cache, v_cache, block_tables, seq_lens), options)
    whole = Partitioning(batch.capacity, max_partitions=1)
    return _decode(batch, checked, implementation, xla.paged_attention_v1, whole, interpret=interpret)


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
    """Compute `paged_attention_v1`, with each row in partitions of `partition_size` tokens.

    Partitions are computed in parallel. Each gives sum exp(s - max) * v, sum exp(s - max) and max in float32;
    then a row's partitions are merged.

    partition_size: tokens, a multiple of the block size.
    """
    batch, checked = checks.check_attention(Arrays(q, k_cache, v_cache, block_tables, seq_lens), options)
    block_size = batch.pool.sizes.block_size
    if partition_size <= 0 or partition_size % block_size:
        raise ValueError(f"{partition_size=} must be a positive multiple of {block_size=}")
    by_xla = functools.partial(xla.paged_attention_v2, partition_size=partition_size)
    equal = Partitioning(partition_size, max_partitions=-(-batch.capacity // partition_size))
    return _decode(batch, checked, implementation, by_xla, equal, interpret=interpret)


def tiled_paged_attention(
    q: jax.Array,
    k_cache: jax.Array | Pool,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    query_starts: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    table_rows: jax.Array | None = None,
    plan: SharedPlan | None = None,
    implementation: TiledImplementation | None = None,
    interpret: bool = False,
    **options: Unpack[TiledOptions],
) -> jax.Array:
    """Compute causal attention of tiles of neighbouring query tokens, each with its own block table.

    Query i of tile t stands at position `query_starts[t] + i` and sees the positions up to its own that are
    below `seq_lens[t]`. The queries' own K and V are in the cache already.

    Args:
        q: [num_tiles, tile_len, num_q_heads, head_dim] float16, bfloat16 or float32.
        k_cache, v_cache: a `Pool` and None; or two arrays, of q's type or quantised.
        block_tables: [num_tiles, max_blocks_per_seq] int32. Entries of blocks that no query of the tile sees,
            past its sequence's tokens or before its window or chunk, are never read.
        query_starts: [num_tiles] int32. A tile of one token is its sequence's last: seq_lens - 1.
        seq_lens: [num_tiles] int32, tokens in the cache that the tile may see; 0 makes a tile of zeros.
        scale: factor on the dot products.
        table_rows: [num_tiles] int32, each tile's row of block_tables, which may then have any number of
            rows; None: tile t has row t. The kernels for decode steps, and for CPUs, copy no rows.
        plan: from `plan_of_tiles` with the same lengths, starts, window, chunk and table_rows, for calls that
            share it; None: each call makes its own, where it needs one.
        implementation: None stands for `choice.default_tiled_implementation`. "mosaic_gpu" takes tiles of up
            to 64 tokens; the kernel for decode steps computes short ones (`decode.attention.serves`).
            "native" serves CPUs as `native.why_not` says, without scales of heads and kinds of layers from
            outside. "xla" serves all.
        options: see `TiledOptions`.

    Returns: [num_tiles, tile_len, num_q_heads, head_dim] of q's type. Queries at or beyond seq_lens are
        padding: their results have no meaning.
    Raises: ValueError on wrong shapes, types or options; NotImplementedError for what the implementation
        does not serve.
    """
    if q.ndim != 4:
        raise ValueError(f"{q.shape=} must be [num_tiles, tile_len, num_q_heads, head_dim]")
    checks.check_names("tiled_paged_attention", options, TiledOptions)
    num_tiles, tile_len = q.shape[:2]
    decode = Arrays(q[:, 0], k_cache, v_cache, block_tables, seq_lens, table_rows)
    batch, checked = checks.check_attention(decode, AttentionOptions(scale=scale, **options))
    checks.check_int32("query_starts", query_starts, (num_tiles,))
    pool = batch.pool
    if table_rows is not None:  # a tile without tokens may name any row
        batch = batch._replace(table_rows=jnp.clip(table_rows, 0, block_tables.shape[0] - 1))
    not_native = ("layer_kind", "k_scale", "v_scale")
    lacking = [name for name in not_native if getattr(checked, name) is not None]
    not_native_layout = native.why_not_layout(pool.layout, q.dtype)
    if implementation is None and not interpret:
        implementation = choice.default_tiled_implementation(q.dtype, tile_len)
        if implementation == "native" and (lacking or not_native_layout):
            implementation = "xla"
    if implementation == "native":
        why = f"it has no {', '.join(lacking)}" if lacking else native.why_not(q.dtype) or not_native_layout
        if why:
            raise NotImplementedError(f"'native' attention does not serve this call: {why}. Use 'xla'.")
        return native.tiled_paged_attention(
            q,
            pool,
            block_tables,
            query_starts,
            seq_lens,
            batch.table_rows,
            scale=scale,
            window=checked.sliding_window,
            chunk=checked.attention_chunk,
            soft_cap=checked.soft_cap,
            alibi_slopes=checked.alibi_slopes,
            sinks=checked.sinks,
        )
    chosen = choice.for_attention(implementation, batch, checked, interpret=interpret)
    group_size = q.shape[2] // pool.sizes.num_kv_heads
    is_prompt = tile_len > 1 and not decode_kernel.serves(tile_len, group_size, q.shape[3])
    if batch.table_rows is not None and (
        chosen == "xla" or is_prompt or not decode_kernel.finds_tables(num_tiles, block_tables.shape[0])
    ):
        batch = batch._replace(block_tables=block_tables[batch.table_rows], table_rows=None)
    if chosen == "xla":
        return xla_tiles.tiled_paged_attention(q, pool, batch.block_tables, query_starts, seq_lens, checked)
    seen, checked = _as_kernels_read(batch, checked)
    if is_prompt:
        return prompt_kernel.prompt_attention(seen._replace(q=q), query_starts, checked, interpret=interpret)
    rows = seen._replace(q=q.reshape(-1, *q.shape[2:]))
    out = decode_kernel.paged_attention(
        rows, checked, query_starts=query_starts, shared=plan, interpret=interpret
    )
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
    attention_chunk: int | None = None,
    table_rows: jax.Array | None = None,
    implementation: TiledImplementation,
) -> SharedPlan | None:
    """Make the list of work that calls of `tiled_paged_attention` with these arguments share.

    A model's layers share it: in a loop over layers XLA would make it anew in each turn.

    Args: as those of `tiled_paged_attention`; tile_len and num_q_heads as its q has them.
    Returns: None where no such list is needed: only the GPU kernel for decode steps has one.
    """
    cache = pool.sizes
    group_size = num_q_heads // cache.num_kv_heads
    if implementation != "mosaic_gpu" or not decode_kernel.serves(tile_len, group_size, cache.head_dim):
        return None
    num_tables, width = block_tables.shape
    if table_rows is not None:
        finds_tables = decode_kernel.finds_tables(seq_lens.shape[0], num_tables)
        table_rows = jnp.clip(table_rows, 0, num_tables - 1) if finds_tables else None
    sizes = decode_kernel.PlanSizes(
        num_rows=seq_lens.shape[0],
        query_len=tile_len,
        num_kv_heads=cache.num_kv_heads,
        group_size=group_size,
        capacity=width * cache.block_size,
        sliding_window=sliding_window,
        attention_chunk=attention_chunk,
        has_table_rows=table_rows is not None,
    )
    return decode_kernel.shared_plan(sizes, seq_lens, query_starts, table_rows)


def ragged_paged_attention(
    q: jax.Array,
    k_cache: jax.Array | Pool,
    v_cache: jax.Array | None,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    cu_query_lens: jax.Array,
    *,
    scale: float,
    max_query_len: int | None = None,
    implementation: TiledImplementation | None = None,
    interpret: bool = False,
    **options: Unpack[TiledOptions],
) -> jax.Array:
    """Compute causal attention of a flat batch: prompts, chunks of them, decode steps and drafts together.

    A sequence's queries are its last tokens; each sees its sequence up to itself. `tiled_paged_attention` is
    called twice: with a tile of one token for each sequence of one query, and tiles of up to 32 for others.

    Args:
        q: [num_tokens, num_q_heads, head_dim] float16, bfloat16 or float32.
        k_cache, v_cache: a `Pool` and None; or two arrays, of q's type or quantised. They hold the queries'
            own K and V already.
        block_tables: [num_seqs, max_blocks_per_seq] int32, as for `tiled_paged_attention`.
        seq_lens: [num_seqs] int32, tokens in the cache, the queries' own included.
        cu_query_lens: [num_seqs + 1] int32, beginning with 0. Sequence s has the queries from
            cu_query_lens[s] to before cu_query_lens[s + 1]. Tokens from its last entry on are padding.
        max_query_len: a promise that no sequence has more queries: the fewer, the less is computed. With
            "mosaic_gpu", the kernel for decode steps takes tiles that are short enough.
        scale, implementation, options: as in `tiled_paged_attention`.

    Returns: [num_tokens, num_q_heads, head_dim] of q's type, zeros for padding.
    Raises: as `tiled_paged_attention`.
    """
    if q.ndim != 3:
        raise ValueError(f"{q.shape=} must be [num_tokens, num_q_heads, head_dim]")
    if seq_lens.ndim != 1 or seq_lens.shape[0] == 0:
        raise ValueError(f"{seq_lens.shape=} must be [num_seqs], with at least one sequence")
    checks.check_int32("cu_query_lens", cu_query_lens, (seq_lens.shape[0] + 1,))
    checks.check_names("ragged_paged_attention", options, TiledOptions)
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"{max_query_len=} must be at least 1")
    num_tokens, num_seqs = q.shape[0], seq_lens.shape[0]
    max_len = min(max_query_len or num_tokens, num_tokens)
    tile_len = max(1, min(max_len, ragged.TILE_LEN))
    count = ragged.num_tiles(num_tokens, num_seqs, max_len, tile_len)
    several, results = ragged.tiles(seq_lens, cu_query_lens, num_tokens, count, tile_len)

    def attend(tiles: ragged.Tiles, tile_len: int) -> jax.Array:
        return tiled_paged_attention(
            ragged.queries_of(q, tiles, tile_len),
            *(k_cache, v_cache, block_tables, tiles.position, tiles.seq_len),
            scale=scale,
            table_rows=tiles.seq,
            implementation=implementation,
            interpret=interpret,
            **options,
        )

    out = attend(ragged.singles(seq_lens, cu_query_lens), 1)[results.seq, 0]
    if tile_len > 1:
        of_tiles = attend(several, tile_len).at[results.tile, results.offset].get(mode="clip")
        out = jnp.where(results.is_single[:, None, None], out, of_tiles)
    return jnp.where(results.is_query[:, None, None], out, 0)


def _decode(
    batch: Batch,
    options: Options,
    implementation: Implementation | None,
    by_xla: Callable[[Batch, Options], jax.Array],
    partitioning: Partitioning | None,
    *,
    interpret: bool,
) -> jax.Array:
    """Compute attention of one query a row: by this function of XLA's, or by the kernel in these
    partitions.
    """
    if choice.for_attention(implementation, batch, options, interpret=interpret) == "xla":
        return by_xla(batch, options)
    seen, options = _as_kernels_read(batch, options)
    return decode_kernel.paged_attention(seen, options, partitioning=partitioning, interpret=interpret)


def _as_kernels_read(batch: Batch, options: Options) -> tuple[Arrays, Options]:
    """Return the arrays of the pool's view, for kernels that read one, and its scales as options."""
    pool, view = batch.pool, view_of(options)
    k_cache, v_cache = (pool.arrays[location.array] for location in (view.k, view.v))
    arrays = Arrays(batch.q, k_cache, v_cache, batch.block_tables, batch.seq_lens, batch.table_rows)
    k_scale, v_scale = pool.scales or (options.k_scale, options.v_scale)
    token_scales = packed = None
    if view.k_scale is not None and view.v_scale is not None:
        token_scales = pool.arrays[view.k_scale.array], pool.arrays[view.v_scale.array]
    if packed_view := pool.layout.packed_view():
        locations = (getattr(packed_view, name) for name in PackedArrays._fields)
        packed = PackedArrays(*(pool.arrays[location.array] for location in locations))
    scaled = dataclasses.replace(options, k_scale=k_scale, v_scale=v_scale, token_scales=token_scales)
    return arrays, dataclasses.replace(scaled, packed=packed, blocks=pool.blocks)
