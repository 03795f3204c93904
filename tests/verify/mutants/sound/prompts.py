"""Attention of flat batches of prompts, chunks and decode steps, a token at a time."""

import numpy as np

from .attention import attend


def ragged_paged_attention(q, k_cache, v_cache, block_tables, seq_lens, cu_query_lens, **options):
    """Let each token attend up to its own place; a sequence's queries are its last tokens."""
    out = np.zeros(q.shape, q.dtype)
    for seq, length in enumerate(seq_lens):
        first, end = cu_query_lens[seq : seq + 2]
        for token in range(first, end):
            upto = np.array([length - (end - 1 - token)])
            table = block_tables[seq : seq + 1]
            out[token] = attend(q[token : token + 1], k_cache, v_cache, table, upto, None, **options)[0]
    return out
