"""Flat batches of prompts, chunks and decode steps: cases, their arrays, and the oracle's answer."""

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from jaxpaged.verify import cases as shapes
from jaxpaged.verify.oracles import attention


@dataclasses.dataclass(frozen=True)
class Case(shapes.Named):
    """Sequences of so many tokens, whose last ones are queries; behind all queries `num_padding` tokens."""

    # A decode step, a prompt, nobody, a chunk, another decode step, a second chunk.
    query_lens: tuple[int, ...] = (1, 40, 0, 3, 1, 33)
    seq_lens: tuple[int, ...] = (25, 40, 17, 50, 1, 90)
    num_padding: int = 5
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: as dtype
    sliding_window: int | None = None
    attention_chunk: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False

    SIMPLER: ClassVar = shapes.SIMPLER | {"num_padding": (0, 1)}

    @property
    def is_sound(self) -> bool:
        spans = zip(self.query_lens, self.seq_lens, strict=False)
        return (
            len(self.query_lens) == len(self.seq_lens) > 0
            and self.num_q_heads % self.num_kv_heads == 0
            and sum(self.query_lens) + self.num_padding > 0
            and all(num <= length for num, length in spans)
        )

    @property
    def features(self) -> set[str]:
        return shapes.features_of(self, self.query_lens)

    @property
    def options(self) -> dict[str, Any]:
        """Options as `ops` takes them."""
        options: dict[str, Any] = {"scale": 0.3}
        if self.sliding_window is not None:
            options["sliding_window"] = self.sliding_window
        if self.attention_chunk is not None:
            options["attention_chunk"] = self.attention_chunk
        if self.soft_cap is not None:
            options["soft_cap"] = self.soft_cap
        if self.alibi:
            options["alibi_slopes"] = (0.5 * 0.7 ** np.arange(self.num_q_heads)).astype(np.float32)
        if self.sinks:
            options["sinks"] = np.linspace(-1, 2, self.num_q_heads).astype(np.float32)
        return options


ALL: dict[str, Any] = {"sliding_window": 30, "alibi": True, "soft_cap": 3.0, "sinks": True}
CASES = [
    Case("plain"),
    Case("window", sliding_window=20),
    Case("chunks", attention_chunk=24),
    Case("all", **ALL),
    Case("only decode steps", (1, 1, 0, 1, 1, 1), num_padding=0),
    Case("a head each", (7, 1), (7, 64), num_q_heads=3, num_kv_heads=3, block_size=16),
    Case("bfloat16", head_dim=64, block_size=16, dtype="bfloat16"),
    Case("bfloat16, all", head_dim=64, block_size=16, dtype="bfloat16", **ALL),
]


@functools.cache
def inputs(c: Case, stale: str = "nan", padding: str = "invalid") -> tuple[np.ndarray, ...]:
    """Return q, k_cache, v_cache, block_tables, seq_lens and cu_query_lens, as `ops.ragged_paged_attention`
    takes them.

    Blocks are shuffled; places that nobody owns hold NaN, and table entries past a sequence name no block.
    For stale and padding see `cases.make_inputs`.
    """
    rng = np.random.default_rng(0)
    num_seqs, width = len(c.seq_lens), -(-max(c.seq_lens) // c.block_size) + 1
    num_blocks = 1 + num_seqs * width
    caches = rng.normal(size=(2, num_blocks, c.block_size, c.num_kv_heads, c.head_dim))
    tables = 1 + rng.permutation(num_blocks - 1).reshape(num_seqs, width)
    live = np.zeros((num_blocks, c.block_size), bool)
    for seq, seq_len in enumerate(c.seq_lens):
        for position in range(seq_len):
            live[tables[seq, position // c.block_size], position % c.block_size] = True
        tables[seq, -(-seq_len // c.block_size) :] = 0 if padding == "null" else 10**6
    caches[:, ~live] = 0 if stale == "zero" else np.nan
    q = rng.normal(size=(sum(c.query_lens) + c.num_padding, c.num_q_heads, c.head_dim))
    q, k, v = (x.astype(shapes.DTYPES[c.dtype]) for x in (q, *caches))
    cu_query_lens = np.cumsum([0, *c.query_lens], dtype=np.int32)
    return q, k, v, tables.astype(np.int32), np.array(c.seq_lens, np.int32), cu_query_lens


@functools.cache
def oracle(c: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return the output in float64, zeros for padding, and the mean of the values' magnitudes."""
    q, k, v, *rest = inputs(c)
    want = attention.ragged_paged_attention(q, k, v, *rest, **c.options)
    return want, attention.ragged_paged_attention(q, k, np.abs(v.astype(np.float32)), *rest, **c.options)


def compared(c: Case, got: np.ndarray, weights_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return each element's error, infinite for NaN, and the largest that is allowed: none for padding."""
    want, mean_abs = oracle(c)
    like = shapes.Case(c.name, head_dim=c.head_dim, dtype=c.dtype)
    allowed = shapes.tolerance(like, want, mean_abs, weights_dtype)
    allowed[sum(c.query_lens) :] = np.finfo(np.float64).tiny
    return np.nan_to_num(abs(got - want), nan=np.inf), allowed
