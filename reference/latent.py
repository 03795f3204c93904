"""Latent attention (DeepSeek V2) in float64: over paged entries of one vector a token, and of a whole layer.

The two are written in different ways, for each is the test of the other. Over entries it is absorbed: all
heads read a token's one vector, which is the key, and whose first `rank` numbers are the value. A layer
decompresses each latent to a key and a value of every head.
"""

import math
from typing import Any

import numpy as np

from .cache_ops import token_of
from .parts import Weights, linear
from .ropes import rope


def latent_attention(
    q: np.ndarray,
    cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    cu_query_lens: np.ndarray,
    *,
    v_dim: int,
    scale: float,
    sliding_window: int | None = None,
) -> np.ndarray:
    """Compute attention of a flat batch, in which a sequence has any number of queries: its last tokens, in
    order.

    Args:
        q: [num_tokens, num_heads, dim], absorbed. Row r has q[cu_query_lens[r] : cu_query_lens[r + 1]].
        cache: [num_blocks, block_size, 1, dim] entries.
        block_tables: [num_seqs, max_blocks_per_seq] block ids.
        seq_lens: [num_seqs] tokens in the cache, the queries' own included.
        cu_query_lens: [num_seqs + 1], from 0 on. Tokens from the last on are padding.
        v_dim: numbers of an entry that are the value, the first ones.
        sliding_window: tokens that a query sees, its own among them; None: all up to its own.

    Returns: float64 [num_tokens, num_heads, v_dim], zeros for padding.
    """
    out = np.zeros((*q.shape[:2], v_dim))
    for row, seq_len in enumerate(seq_lens):
        first, end = int(cu_query_lens[row]), int(cu_query_lens[row + 1])
        for token in range(first, end):
            last = int(seq_len) - (end - token)
            begin = 0 if sliding_window is None else max(0, last + 1 - sliding_window)
            entries = [
                token_of(cache, block_tables[row], position)[0].astype(np.float64)
                for position in range(begin, last + 1)
            ]
            for head in range(q.shape[1]):
                scores = [scale * float(q[token, head].astype(np.float64) @ entry) for entry in entries]
                weights = [math.exp(score - max(scores)) for score in scores]
                for weight, entry in zip(weights, entries, strict=True):
                    out[token, head] += weight / sum(weights) * entry[:v_dim]
    return out


def attention(config: Any, weights: Weights, name: str, kind: Any, x: np.ndarray) -> np.ndarray:
    """Compute a layer's causal attention of a whole sequence, [num_tokens, hidden_size]: decompressed."""
    d, name = config.latent, f"{name}.latent"
    num_tokens, heads = len(x), config.num_q_heads
    q = x
    if d.q_rank is not None:
        q = _normed(linear(weights, f"{name}.q_a", x), weights[f"{name}.q_norm.weight"], d.norm_eps)
        q = q * q.dtype.type(d.q_scale)
    q = linear(weights, f"{name}.q", q).reshape(num_tokens, heads, d.k_dim + d.rope_dim)
    entry = linear(weights, f"{name}.kv_a", x)
    latent, k_rot = np.split(entry, [d.rank], axis=1)
    latent = _normed(latent, weights[f"{name}.kv_norm.weight"], d.norm_eps) * x.dtype.type(d.kv_scale)
    k_up = weights[f"{name}.k_up.weight"].reshape(heads, d.rank, d.k_dim)
    v_up = weights[f"{name}.v_up.weight"].reshape(heads, d.v_dim, d.rank)
    q_rot, k_rot = q[..., d.k_dim :], k_rot[:, None]
    if kind.rope is not None:
        q_rot, k_rot = (rope(y, kind.rope, config.max_model_len) for y in (q_rot, k_rot))
    if kind.temperature is not None:
        number = (np.arange(num_tokens) + kind.temperature.offset) // kind.temperature.every
        factor = (1 + kind.temperature.scale * np.log1p(number)).astype(q.dtype)[:, None, None]
        q, q_rot = q * factor, q_rot * factor
    seen = np.tri(num_tokens, dtype=bool)
    if kind.sliding_window is not None:
        seen &= ~np.tri(num_tokens, k=-kind.sliding_window, dtype=bool)
    out = np.empty((num_tokens, heads, d.v_dim), x.dtype)
    for head in range(heads):
        k, v = latent @ k_up[head], latent @ v_up[head].T
        scores = q[:, head, : d.k_dim] @ k.T + q_rot[:, head] @ k_rot[:, 0].T
        scores = np.where(seen, scores * x.dtype.type(config.scale), -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = shares / shares.sum(axis=-1, keepdims=True) @ v
    return linear(weights, f"{name.removesuffix('.latent')}.o", out.reshape(num_tokens, -1))


def _normed(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight
