"""Attention of tiles of query tokens in plain jax.numpy: prompts, and decoding on a CPU.

A tile is a few neighbouring tokens of one sequence; a decode step has tiles of one token. These forms were
chosen by measuring XLA's CPU code, see benchmarks/LOG.md. Products are in q's type, sums in float32.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.layouts import Pool
from pallas_kernels.support import Options, first_seen

# Tokens of K and V in one turn of the loop: enough to keep the loop's own cost small, few enough to stay in a
# CPU's second-level cache and to waste little on short sequences.
CHUNK_TOKENS = 128
# Up to so many query heads of all a tile's tokens, multiplying by zeros is faster than transposing K and V.
MERGE_HEADS_BELOW = 16
# Stands for minus infinity without its NaN: exp(MASKED - anything real) is 0.
MASKED = -1e30

Softmax = tuple[Array, Array, Array]  # running: max, sum of exp(s - max), sum of exp(s - max) * v


def tiled_paged_attention(
    q: Float[Array, "num_tiles tile_len num_q_heads head_dim"],
    pool: Pool,
    block_tables: Int[Array, "num_tiles max_blocks_per_seq"],
    query_starts: Int[Array, " num_tiles"],
    seq_lens: Int[Array, " num_tiles"],
    options: Options,
) -> Float[Array, "num_tiles tile_len num_q_heads head_dim"]:
    """Compute `ops.tiled_paged_attention` by a running softmax over the chunks of blocks that some tile
    sees.
    """
    num_tiles, tile_len, num_q_heads, head_dim = q.shape
    num_kv_heads = pool.sizes.num_kv_heads
    group = num_q_heads // num_kv_heads
    q = (q * jnp.asarray(options.scale, q.dtype)).reshape(num_tiles, tile_len, num_kv_heads, group, head_dim)
    # Few queries: reading K and V is all that counts, and products by kv head would transpose them first. All
    # kv heads become one, as wide as they are together: a query is zero outside its own. (Selects and slices,
    # not einsums: a CPU product of that size costs more than its arithmetic.)
    merges_heads = num_kv_heads > 1 and tile_len * num_q_heads <= MERGE_HEADS_BELOW
    if merges_heads:
        own_head = jnp.eye(num_kv_heads, dtype=bool)[:, None, :, None]
        q = jnp.where(own_head, q[..., None, :], 0).reshape(num_tiles, tile_len, 1, num_q_heads, -1)
    out = _attend_by_kv_head(q, pool, block_tables, query_starts, seq_lens, options)
    if merges_heads:
        out = out.reshape(num_tiles, tile_len, num_kv_heads, group, num_kv_heads, head_dim)
        out = jnp.stack([out[:, :, head, :, head] for head in range(num_kv_heads)], axis=2)
    return out.reshape(num_tiles, tile_len, num_q_heads, head_dim).astype(q.dtype)


def _attend_by_kv_head(
    q: Float[Array, "num_tiles tile_len wide_heads group wide_dim"],
    pool: Pool,
    block_tables: Int[Array, "num_tiles max_blocks_per_seq"],
    query_starts: Int[Array, " num_tiles"],
    seq_lens: Int[Array, " num_tiles"],
    options: Options,
) -> Float[Array, "num_tiles tile_len wide_heads group wide_dim"]:
    """Compute attention of scaled queries in float32. q's shape says how many heads a token's K and V
    have.
    """
    num_tiles, tile_len, num_kv_heads, group, head_dim = q.shape
    block_size = pool.sizes.block_size
    blocks_per_chunk = min(max(CHUNK_TOKENS // block_size, 1), block_tables.shape[1])
    chunk_len = blocks_per_chunk * block_size
    kind = options.layer_kind
    # What each tile's first query sees first, behind the tokens that every query sees.
    if kind is None:
        begin = first_seen(query_starts, options.sliding_window, options.attention_chunk)
    else:
        begin = kind.first_read(query_starts)
    first_tokens = 0 if kind is None else kind.first_tokens
    blocks, first_chunk, num_chunks = _blocks_seen(
        block_tables, begin, first_tokens, seq_lens, block_size, blocks_per_chunk
    )
    first_chunks = -(-first_tokens // chunk_len)

    # A tile's kv head is one entry of the batch of products; its "rows" are the queries of the tile that
    # share it.
    rows = q.transpose(0, 2, 1, 3, 4).reshape(num_tiles * num_kv_heads, tile_len * group, head_dim)
    # One bound for both: a query sees tokens up to itself, and only those that exist.
    q_position = query_starts[:, None] + jnp.arange(tile_len)
    bound = jnp.minimum(q_position + 1, seq_lens[:, None])
    q_position, bound = (
        jnp.repeat(jnp.repeat(x, group, axis=1), num_kv_heads, axis=0)[:, :, None]
        for x in (q_position, bound)
    )
    q_begin = first_seen(q_position, options.sliding_window, options.attention_chunk)

    def of_rows(per_head: Float[Array, " num_q_heads"]) -> Float[Array, "batch rows"]:
        by_head = per_head.reshape(1, num_kv_heads, 1, group)
        return jnp.broadcast_to(by_head, (num_tiles, num_kv_heads, tile_len, group)).reshape(rows.shape[:2])

    # Factors of the scores of the stored K, and of the sums of the stored V at the end.
    k_scale, v_scale = (
        None
        if scale is None
        else of_rows(jnp.repeat(scale, num_kv_heads * group // scale.shape[0]))[..., None]
        for scale in (options.k_scale, options.v_scale)
    )

    def chunk(i: Array, state: Softmax) -> Softmax:
        if first_chunk is None:
            ids = lax.dynamic_slice_in_dim(blocks, i * blocks_per_chunk, blocks_per_chunk, axis=1)
            kv_position = i * chunk_len + jnp.arange(chunk_len)
        else:
            # Columns past the table stand for its last one: their positions are past all tokens, and masked.
            number = first_chunk + i
            if first_chunks:
                number = jnp.where(i < first_chunks, i, number - first_chunks)
            columns = number[:, None] * blocks_per_chunk + jnp.arange(blocks_per_chunk)
            ids = jnp.take_along_axis(blocks, jnp.minimum(columns, blocks.shape[1] - 1), axis=1)
            kv_position = number[:, None] * chunk_len + jnp.arange(chunk_len)
        # All heads of a token side by side.
        k, v = (x.reshape(num_tiles, chunk_len, -1) for x in pool.read(ids, q.dtype))
        # The barrier keeps XLA's CPU compiler from transposing K while it gathers, element by element.
        k = lax.optimization_barrier(k)
        tile_sees = kv_position < seq_lens[:, None]
        if begin is not None:
            is_behind = kv_position >= begin[:, None]
            tile_sees &= is_behind if not first_tokens else is_behind | (kv_position < first_tokens)
            kv_position = jnp.repeat(kv_position, num_kv_heads, axis=0)[:, None]
        seen = kv_position < bound
        if kind is not None:
            seen &= kind.sees(q_position, kv_position)
        elif q_begin is not None:
            seen &= kv_position >= q_begin
        # Stale slots may hold anything, NaN included, and 0 * NaN is NaN: V is zeroed where no query sees it.
        v = jnp.where(tile_sees[:, :, None], v, 0)
        bias = None
        if options.alibi_slopes is not None:
            bias = of_rows(options.alibi_slopes)[:, :, None] * (kv_position - q_position)
        k, v = _by_head(k, num_kv_heads), _by_head(v, num_kv_heads)
        return _join(state, rows, k, v, seen, k_scale, options.soft_cap, bias)

    # The maximum starts above MASKED, so that what is masked weighs 0 in a row that sees nothing, too.
    nothing = (jnp.full(rows.shape[:2], MASKED / 2), jnp.zeros(rows.shape[:2]), jnp.zeros(rows.shape))
    row_max, row_sum, acc = lax.fori_loop(0, num_chunks, chunk, nothing)
    sees_nothing = row_sum == 0
    if options.sinks is not None:
        sinks = of_rows(options.sinks)
        with_sink = jnp.maximum(row_max, sinks)
        rescale = jnp.exp(row_max - with_sink)
        acc = acc * rescale[..., None]
        row_sum = row_sum * rescale + jnp.exp(sinks - with_sink)
    out = acc / jnp.where(sees_nothing, 1, row_sum)[..., None]
    if v_scale is not None:
        out = out * v_scale
    return out.reshape(num_tiles, num_kv_heads, tile_len, group, head_dim).transpose(0, 2, 1, 3, 4)


def _blocks_seen(
    block_tables: Int[Array, "num_tiles max_blocks_per_seq"],
    begin: Int[Array, " num_tiles"] | None,
    first_tokens: int,
    seq_lens: Int[Array, " num_tiles"],
    block_size: int,
    blocks_per_chunk: int,
) -> tuple[Int[Array, "num_tiles padded"], Int[Array, " num_tiles"] | None, Int[Array, ""]]:
    """Return the blocks that each tile sees, its first chunk, and how many chunks some tile needs from there.

    With `first_tokens`, which every tile sees, their chunks come before: they are counted, and the first
    chunk is behind them.

    The null block replaces blocks that a tile does not see, and pads to whole chunks. Chunks are counted from
    position 0 whatever the bound: which ones a tile is computed in, and so its bits, must not depend on
    where other tiles begin. None stands for first chunks that are all 0: nothing bounds what is seen.
    """
    chunk_len = blocks_per_chunk * block_size
    block_start = jnp.arange(block_tables.shape[1]) * block_size
    seen = block_start < seq_lens[:, None]
    first_chunk = None
    num_chunks = -(-jnp.max(seq_lens) // chunk_len)
    if begin is not None:
        is_behind = block_start + block_size > begin[:, None]
        seen &= is_behind if not first_tokens else is_behind | (block_start < first_tokens)
        first_chunk, first_chunks = jnp.maximum(begin, 0) // chunk_len, -(-first_tokens // chunk_len)
        if first_chunks:
            first_chunk = jnp.maximum(first_chunk, first_chunks)
        num_chunks = jnp.maximum(jnp.max(-(-seq_lens // chunk_len) - first_chunk), 0)
        num_chunks = num_chunks + first_chunks if first_chunks else num_chunks
    padding = -block_tables.shape[1] % blocks_per_chunk
    blocks = jnp.pad(jnp.where(seen, block_tables, 0), ((0, 0), (0, padding)))
    return blocks, first_chunk, num_chunks


def _by_head(
    x: Num[Array, "num_tiles chunk_len width"], num_kv_heads: int
) -> Num[Array, "batch chunk_len head_dim"]:
    num_tiles, chunk_len, width = x.shape
    x = x.reshape(num_tiles, chunk_len, num_kv_heads, width // num_kv_heads).swapaxes(1, 2)
    return x.reshape(num_tiles * num_kv_heads, chunk_len, -1)


def _join(
    state: Softmax,
    q: Float[Array, "batch rows head_dim"],
    k: Float[Array, "batch chunk_len head_dim"],
    v: Float[Array, "batch chunk_len head_dim"],
    seen: Bool[Array, "batch rows chunk_len"],
    k_scale: Float[Array, "batch rows 1"] | None,
    soft_cap: float | None,
    bias: Float[Array, "batch rows chunk_len"] | None,
) -> Softmax:
    """Add a chunk to the running softmax."""
    row_max, row_sum, acc = state
    scores = jnp.einsum("brd,bcd->brc", q, k, preferred_element_type=jnp.float32)
    if k_scale is not None:
        scores = scores * k_scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    scores = jnp.where(seen, scores, MASKED)
    new_max = jnp.maximum(row_max, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_max[..., None])
    rescale = jnp.exp(row_max - new_max)
    pv = jnp.einsum("brc,bcd->brd", weights.astype(q.dtype), v, preferred_element_type=jnp.float32)
    return new_max, row_sum * rescale + jnp.sum(weights, -1), acc * rescale[..., None] + pv
