"""Decode attention over a paged cache in float64, one token at a time.

One query token per sequence looks at the tokens of its own sequence. The cache is cut into blocks, and a
table names the blocks of each sequence in order. Everything here is a plain loop: this is what every other
implementation is compared with.

For query head h of a sequence of n tokens, with t running over the tokens it may see:

    s[t]   = scale * dot(q[h], k[t])
    s[t]   = soft_cap * tanh(s[t] / soft_cap)          if a soft cap is given
    s[t]  += alibi_slopes[h] * (t - (n - 1))           if slopes are given
    out[h] = sum_t exp(s[t]) * v[t] / (sum_t exp(s[t]) + exp(sinks[h]))      the last term if sinks are given

A token t is seen if t < n, if it is among the last `sliding_window` tokens, if it is in the same chunk of
`attention_chunk` tokens as the query's own, and if the block-sparse pattern keeps it. Chunks begin at
multiples of their length. A sequence without tokens gives zeros.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from .cache_ops import token_of


class BlockSparse(NamedTuple):
    """Sparse attention: the blocks of `block_size` tokens that a query head sees, the last and every n-th
    one.

    With b = t // block_size and the query's own b_q = (n - 1) // block_size, token t is seen if
    b > b_q - local_blocks, or if (b + offset) is a multiple of vertical_stride. The offset is
    1 + head_sliding_step * query head for a step of 0 or more, and 1 - head_sliding_step * kv head for a
    negative step; heads are counted over all ranks of a tensor-parallel group.
    """

    block_size: int
    local_blocks: int
    vertical_stride: int
    head_sliding_step: int = 0
    tp_rank: int = 0


class Partials(NamedTuple):
    """Results of the partitions of all sequences, for the reduction. Those of an empty partition are 0, -inf
    and 0.
    """

    out: np.ndarray  # [num_seqs, num_q_heads, num_partitions, head_dim] sum of exp(s - max) * v
    max: np.ndarray  # [num_seqs, num_q_heads, num_partitions] largest s
    sum: np.ndarray  # [num_seqs, num_q_heads, num_partitions] sum of exp(s - max)


def paged_attention(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    *,
    scale: float | None = None,
    alibi_slopes: np.ndarray | None = None,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | float | None = None,
    v_scale: np.ndarray | float | None = None,
    block_sparse: BlockSparse | None = None,
    kv_layout: str = "token_major",
) -> np.ndarray:
    """Compute attention of one query token per sequence over its cached tokens.

    Args:
        q: [num_seqs, num_q_heads, head_dim], any floating type.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], or with kv_layout "head_major"
            [num_blocks, num_kv_heads, block_size, head_dim].
        block_tables: [num_seqs, max_blocks_per_seq] block ids; entries past a row's tokens are not looked at.
        seq_lens: [num_seqs] tokens in the cache, the query's own included.
        scale: factor on the dot products; 1 / sqrt(head_dim) if None.
        alibi_slopes, sinks: [num_q_heads].
        k_scale, v_scale: what a stored number stands for is stored * scale; scalar or [num_kv_heads].

    Returns: float64 [num_seqs, num_q_heads, head_dim].
    """
    num_seqs, num_q_heads, head_dim = q.shape
    out = np.zeros((num_seqs, num_q_heads, head_dim))
    for row in range(num_seqs):
        for head in range(num_q_heads):
            tokens = _visible_tokens(
                int(seq_lens[row]), q, k_cache, head, sliding_window, attention_chunk, block_sparse, kv_layout
            )
            if not tokens:
                continue
            logits, values = _logits_and_values(
                q, k_cache, v_cache, block_tables, seq_lens, row, head, tokens,
                scale, alibi_slopes, soft_cap, k_scale, v_scale, kv_layout,
            )  # fmt: skip
            largest = max(logits)
            if sinks is not None:
                largest = max(largest, float(sinks[head]))
            weights = [math.exp(s - largest) for s in logits]
            denominator = sum(weights)
            if sinks is not None:
                denominator += math.exp(float(sinks[head]) - largest)
            for weight, value in zip(weights, values, strict=True):
                out[row, head] += weight / denominator * value
    return out


def ragged_paged_attention(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    cu_query_lens: np.ndarray,
    **options: Any,
) -> np.ndarray:
    """Compute attention of a flat batch, in which a sequence has any number of queries: its last tokens, in
    order.

    Args:
        q: [num_tokens, num_q_heads, head_dim]. Row r has q[cu_query_lens[r] : cu_query_lens[r + 1]].
        cu_query_lens: [num_seqs + 1], from 0 on. Tokens from the last on are padding.
        seq_lens: [num_seqs] tokens in the cache, the queries' own included.
        options: as in `paged_attention`; each query sees what a decode step at its place would.

    Returns: float64 [num_tokens, num_q_heads, head_dim], zeros for padding.
    """
    out = np.zeros(q.shape)
    for row in range(len(seq_lens)):
        first, end = int(cu_query_lens[row]), int(cu_query_lens[row + 1])
        for token in range(first, end):
            seq_len = seq_lens[row : row + 1] - (end - 1 - token)
            query, table = q[token : token + 1], block_tables[row : row + 1]
            out[token] = paged_attention(query, k_cache, v_cache, table, seq_len, **options)[0]
    return out


def partition_partials(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    *,
    partition_size: int,
    scale: float | None = None,
    alibi_slopes: np.ndarray | None = None,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    k_scale: np.ndarray | float | None = None,
    v_scale: np.ndarray | float | None = None,
    block_sparse: BlockSparse | None = None,
    kv_layout: str = "token_major",
) -> Partials:
    """Compute the first half of v2: partition p holds tokens [p * partition_size, (p + 1) * partition_size).

    Arguments as in `paged_attention`. The number of partitions follows the longest row.
    """
    num_seqs, num_q_heads, head_dim = q.shape
    num_partitions = max(1, -(-int(max(seq_lens, default=0)) // partition_size))
    out = np.zeros((num_seqs, num_q_heads, num_partitions, head_dim))
    maxima = np.full((num_seqs, num_q_heads, num_partitions), -np.inf)
    sums = np.zeros((num_seqs, num_q_heads, num_partitions))
    for row in range(num_seqs):
        for head in range(num_q_heads):
            visible = _visible_tokens(
                int(seq_lens[row]), q, k_cache, head, sliding_window, attention_chunk, block_sparse, kv_layout
            )
            for p in range(num_partitions):
                tokens = [t for t in visible if t // partition_size == p]
                if not tokens:
                    continue
                logits, values = _logits_and_values(
                    q, k_cache, v_cache, block_tables, seq_lens, row, head, tokens,
                    scale, alibi_slopes, soft_cap, k_scale, v_scale, kv_layout,
                )  # fmt: skip
                largest = max(logits)
                maxima[row, head, p] = largest
                for s, value in zip(logits, values, strict=True):
                    sums[row, head, p] += math.exp(s - largest)
                    out[row, head, p] += math.exp(s - largest) * value
    return Partials(out, maxima, sums)


def merge_partials(partials: Partials, sinks: np.ndarray | None = None) -> np.ndarray:
    """Merge the partitions of each row: bring them to one maximum, add up, divide once. The second half of
    v2.

    A sink is one more entry of the denominator, without a value. Returns: [num_seqs, num_q_heads, head_dim].
    """
    num_seqs, num_q_heads, num_partitions, head_dim = partials.out.shape
    out = np.zeros((num_seqs, num_q_heads, head_dim))
    for row in range(num_seqs):
        for head in range(num_q_heads):
            live = [p for p in range(num_partitions) if partials.sum[row, head, p] > 0]
            if not live:
                continue
            largest = max(partials.max[row, head, p] for p in live)
            denominator = 0.0
            if sinks is not None:
                largest = max(largest, float(sinks[head]))
                denominator = math.exp(float(sinks[head]) - largest)
            numerator = np.zeros(head_dim)
            for p in live:
                weight = math.exp(partials.max[row, head, p] - largest)
                numerator += weight * partials.out[row, head, p]
                denominator += weight * partials.sum[row, head, p]
            out[row, head] = numerator / denominator
    return out


def paged_attention_v2(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    *,
    partition_size: int = 512,
    scale: float | None = None,
    alibi_slopes: np.ndarray | None = None,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | float | None = None,
    v_scale: np.ndarray | float | None = None,
    block_sparse: BlockSparse | None = None,
    kv_layout: str = "token_major",
) -> np.ndarray:
    """Compute `paged_attention` in partitions of `partition_size` tokens that are merged afterwards."""
    partials = partition_partials(
        q, k_cache, v_cache, block_tables, seq_lens, partition_size=partition_size, scale=scale,
        alibi_slopes=alibi_slopes, sliding_window=sliding_window, attention_chunk=attention_chunk,
        soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale, block_sparse=block_sparse, kv_layout=kv_layout,
    )  # fmt: skip
    return merge_partials(partials, sinks)


def _visible_tokens(
    seq_len: int,
    q: np.ndarray,
    k_cache: np.ndarray,
    head: int,
    sliding_window: int | None,
    attention_chunk: int | None,
    block_sparse: BlockSparse | None,
    kv_layout: str,
) -> list[int]:
    num_q_heads = q.shape[1]
    num_kv_heads = k_cache.shape[2 if kv_layout == "token_major" else 1]
    kv_head = head // (num_q_heads // num_kv_heads)
    tokens = []
    for t in range(seq_len):
        if sliding_window is not None and t <= seq_len - 1 - sliding_window:
            continue
        if attention_chunk is not None and t // attention_chunk < (seq_len - 1) // attention_chunk:
            continue
        if block_sparse is not None:
            step = block_sparse.head_sliding_step
            if step >= 0:
                offset = 1 + step * (block_sparse.tp_rank * num_q_heads + head)
            else:
                offset = 1 - step * (block_sparse.tp_rank * num_kv_heads + kv_head)
            block = t // block_sparse.block_size
            own_block = (seq_len - 1) // block_sparse.block_size
            is_local = block > own_block - block_sparse.local_blocks
            is_vertical = (block + offset) % block_sparse.vertical_stride == 0
            if not is_local and not is_vertical:
                continue
        tokens.append(t)
    return tokens


def _logits_and_values(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    row: int,
    head: int,
    tokens: list[int],
    scale: float | None,
    alibi_slopes: np.ndarray | None,
    soft_cap: float | None,
    k_scale: np.ndarray | float | None,
    v_scale: np.ndarray | float | None,
    kv_layout: str,
) -> tuple[list[float], list[np.ndarray]]:
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = k_cache.shape[2 if kv_layout == "token_major" else 1]
    kv_head = head // (num_q_heads // num_kv_heads)
    query = q[row, head].astype(np.float64)
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    logits, values = [], []
    for t in tokens:
        key = token_of(k_cache, block_tables[row], t, kv_layout)[kv_head].astype(np.float64)
        value = token_of(v_cache, block_tables[row], t, kv_layout)[kv_head].astype(np.float64)
        s = factor * float(query @ key) * _scale_of(k_scale, kv_head)
        if soft_cap is not None:
            s = soft_cap * math.tanh(s / soft_cap)
        if alibi_slopes is not None:
            s += float(alibi_slopes[head]) * (t - (int(seq_lens[row]) - 1))
        logits.append(s)
        values.append(value * _scale_of(v_scale, kv_head))
    return logits, values


def _scale_of(scale: np.ndarray | float | None, kv_head: int) -> float:
    if scale is None:
        return 1.0
    scale = np.asarray(scale)
    return float(scale) if scale.ndim == 0 else float(scale[kv_head])
