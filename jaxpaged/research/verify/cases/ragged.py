"""Cases of flat batches: prompts, chunks and decode steps together."""

import dataclasses
import functools
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import numpy as np

from jaxpaged.research.verify.cases import frame
from jaxpaged.research.verify.oracles import attention


@dataclasses.dataclass(frozen=True)
class RaggedCase(frame.AttentionCase):
    """Sequences of so many tokens, whose last ones are queries; behind all queries `num_padding` tokens."""

    # A decode step, a prompt, nobody, a chunk, another decode step, a second chunk.
    query_lens: tuple[int, ...] = (1, 40, 0, 3, 1, 33)
    seq_lens: tuple[int, ...] = (25, 40, 17, 50, 1, 90)
    _: KW_ONLY
    num_padding: int = 5
    head_dim: int = 16
    block_size: int = 8
    dtype: str = "float32"

    SIMPLER: ClassVar = frame.AttentionCase.SIMPLER | {"num_padding": (0, 1)}

    @property
    def is_sound(self) -> bool:
        spans = zip(self.query_lens, self.seq_lens, strict=False)
        return (
            super().is_sound
            and len(self.query_lens) == len(self.seq_lens)
            and sum(self.query_lens) + self.num_padding > 0
            and all(num <= length for num, length in spans)
        )

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return self.query_lens

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5} | super().options

    def arguments(self, stale: str = "nan", padding: str = "invalid") -> tuple[list[Any], dict[str, Any]]:
        """Return the arrays of `inputs`, and the options."""
        return [*inputs(self, stale, padding)], self.options

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        q, k, v, *rest = inputs(self)
        return frame.with_magnitudes(
            lambda v: attention.ragged_paged_attention(q, k, v, *rest, **self.options), v
        )

    @property
    def axes(self) -> tuple[str, ...]:
        return ("token", "head", "element")

    def expected_rows(self) -> tuple[np.ndarray, np.ndarray]:
        is_padding = np.arange(sum(self.query_lens) + self.num_padding) >= sum(self.query_lens)
        return is_padding, np.zeros_like(is_padding)


ALL: dict[str, Any] = {"scale": 0.3, "sliding_window": 30, "alibi": True, "soft_cap": 3.0, "sinks": True}
CASES = [
    RaggedCase("plain"),
    RaggedCase("window", sliding_window=20),
    RaggedCase("chunks", attention_chunk=24),
    RaggedCase("all", **ALL),
    RaggedCase("only decode steps", (1, 1, 0, 1, 1, 1), num_padding=0),
    RaggedCase("a head each", (7, 1), (7, 64), num_q_heads=3, num_kv_heads=3, block_size=16),
    RaggedCase("bfloat16", head_dim=64, block_size=16, dtype="bfloat16"),
    RaggedCase("bfloat16, all", head_dim=64, block_size=16, dtype="bfloat16", **ALL),
]


@functools.cache
def inputs(case: RaggedCase, stale: str = "nan", padding: str = "invalid") -> tuple[np.ndarray, ...]:
    """Return q, k_cache, v_cache, block_tables, seq_lens and cu_query_lens, as `ops.ragged_paged_attention`
    takes them; see `frame.hostile_pool`.
    """
    rng = np.random.default_rng(0)
    seen = [(0, length) for length in case.seq_lens]
    (k, v), tables, _ = frame.hostile_pool(case, rng, seen, stale, padding)
    q = rng.normal(size=(sum(case.query_lens) + case.num_padding, case.num_q_heads, case.head_dim))
    cu_query_lens = np.cumsum([0, *case.query_lens], dtype=np.int32)
    seq_lens = np.array(case.seq_lens, np.int32)
    return q.astype(frame.DTYPES[case.dtype]), k, v, tables, seq_lens, cu_query_lens
