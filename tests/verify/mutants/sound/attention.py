"""Decode attention in vectorised NumPy, a row at a time, in one piece or in partitions."""

import numpy as np

f32 = np.float32


def paged_attention(q, k_cache, v_cache, block_tables, seq_lens, **options):
    """Compute attention with one softmax over each row's tokens."""
    return attend(q, k_cache, v_cache, block_tables, seq_lens, None, **options)


def paged_attention_in_parts(q, k_cache, v_cache, block_tables, seq_lens, partition_size=512, **options):
    """Compute attention with a softmax for each partition of a row's tokens, and merge them."""
    return attend(q, k_cache, v_cache, block_tables, seq_lens, partition_size, **options)


def attend(
    q, k_cache, v_cache, block_tables, seq_lens, partition_size,
    scale=None, alibi_slopes=None, sliding_window=None, attention_chunk=None, soft_cap=None, sinks=None,
    k_scale=None, v_scale=None, block_sparse=None, kv_layout="token_major",
):  # fmt: skip
    _, num_q_heads, head_dim = q.shape
    if kv_layout == "head_major":
        k_cache, v_cache = k_cache.swapaxes(1, 2), v_cache.swapaxes(1, 2)
    _, block_size, num_kv_heads, _ = k_cache.shape
    group_size = num_q_heads // num_kv_heads
    head = np.arange(num_q_heads)
    kv_head = head // group_size
    out = np.zeros(q.shape, q.dtype)
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        blocks = block_tables[row, : -(-length // block_size)]
        k, v = (x[blocks].reshape(-1, num_kv_heads, head_dim).astype(f32) for x in (k_cache, v_cache))
        t = np.arange(len(k))  # the last block's slots past the row's tokens too
        live = t < length
        v = np.where(live[:, None, None], v, 0)
        if k_scale is not None:
            k = k * np.reshape(k_scale, (-1, 1)).astype(f32)
        if v_scale is not None:
            v = v * np.reshape(v_scale, (-1, 1)).astype(f32)
        queries = q[row].astype(f32) * f32(head_dim**-0.5 if scale is None else scale)
        s = np.einsum("hd,thd->ht", queries, k[:, kv_head])
        if soft_cap is not None:
            s = f32(soft_cap) * np.tanh(s / f32(soft_cap))
        if alibi_slopes is not None:
            s = s + alibi_slopes[:, None] * (t - (length - 1)).astype(f32)
        seen = np.broadcast_to(live, s.shape).copy()
        if sliding_window is not None:
            seen &= t > length - 1 - sliding_window
        if attention_chunk is not None:
            seen &= t >= length - 1 - (length - 1) % attention_chunk
        if block_sparse is not None:
            step = block_sparse.head_sliding_step
            place = block_sparse.tp_rank * (num_q_heads if step >= 0 else num_kv_heads)
            place = place + (head if step >= 0 else kv_head)
            sparse, own = t // block_sparse.block_size, (length - 1) // block_sparse.block_size
            vertical = (sparse + 1 + abs(step) * place[:, None]) % block_sparse.vertical_stride == 0
            seen &= vertical | (sparse > own - block_sparse.local_blocks)
        s = np.where(seen, s, f32(-np.inf))
        out[row] = softmax(s, v[:, kv_head], sinks, partition_size or len(k)).astype(q.dtype)
    return out


def softmax(s, v, sinks, size):
    """Partition after partition, joined to those before."""
    largest = np.full(s.shape[0], -np.inf, f32)
    total = np.zeros(s.shape[0], f32)
    out = np.zeros((s.shape[0], v.shape[2]), f32)
    for first in range(0, s.shape[1], size):
        part = s[:, first : first + size]
        top = np.maximum(largest, part.max(axis=1))
        finite = np.where(np.isfinite(top), top, 0)
        rescale = np.exp(largest - finite)
        weights = np.exp(part - finite[:, None])
        total = total * rescale + weights.sum(axis=1)
        out = out * rescale[:, None] + np.einsum("ht,thd->hd", weights, v[first : first + size])
        largest = top
    if sinks is not None:
        top = np.maximum(largest, sinks)
        rescale = np.exp(largest - top)
        total, out = total * rescale + np.exp(sinks - top), out * rescale[:, None]
    return out / np.where(total == 0, 1, total)[:, None]
