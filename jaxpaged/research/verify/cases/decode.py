"""Cases of decode attention: one query token a row.

One list for others' functions, the XLA path, the Mosaic GPU kernels in the interpreter, and the benchmarks'
check on a chip.
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from jaxpaged.research.verify.cases import frame
from jaxpaged.research.verify.oracles import attention
from jaxpaged.research.verify.oracles.attention import BlockSparse


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase(frame.AttentionCase):
    """One decode-attention problem. Lengths are tokens; a row of length 0 is padding."""

    seq_lens: tuple[int, ...] = (37, 0, 64)
    kv_layout: str = "token_major"
    scale_per_head: bool = False
    block_sparse: BlockSparse | None = None
    shared_blocks: int = 0  # leading blocks that rows 0 and 1 have in common
    partition_size: int = 64  # for v2
    rising: float = 0.0  # by how much keys and queries are moved, so that scores rise along a row

    SIMPLER: ClassVar = frame.AttentionCase.SIMPLER | {
        "kv_layout": ("token_major",),
        "scale_per_head": (False,),
        "block_sparse": (None,),
        "shared_blocks": (0, 1),
        "partition_size": (16, 32, 64),
        "rising": (0.0,),
    }

    @property
    def is_sound(self) -> bool:
        shared = self.shared_blocks * self.block_size
        return (
            super().is_sound
            and len(self.seq_lens) > (self.shared_blocks > 0)
            and (not self.shared_blocks or min(self.seq_lens[:2]) >= shared)
            and self.partition_size % min(self.block_size, self.partition_size) == 0
            and not (self.scale_per_head and not self.is_quantised)
            and not (self.rising and (self.is_quantised or self.shared_blocks))
        )

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return self.seq_lens

    @property
    def scales(self) -> dict[str, Any]:
        scales = super().scales
        if not scales:
            return {}
        per_head, unit = scales["k_scale"], scales["v_scale"]
        if self.scale_per_head:
            return {"k_scale": per_head, "v_scale": per_head[::-1].copy()}
        return {"k_scale": np.float32(1.2) * unit, "v_scale": unit}

    @property
    def options(self) -> dict[str, Any]:
        sparse = {} if self.block_sparse is None else {"block_sparse": self.block_sparse}
        return {"kv_layout": self.kv_layout, **super().options, **sparse}

    def arguments(self, stale: str = "nan", padding: str = "invalid") -> tuple[list[Any], dict[str, Any]]:
        """Return q, k_cache, v_cache, block_tables and seq_lens; then options."""
        return [*make_inputs(self, stale, padding).values()], self.options

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        given: dict[str, Any] = {**make_inputs(self), **self.options}
        return frame.with_magnitudes(
            lambda v: attention.paged_attention(**given | {"v_cache": v}), given["v_cache"]
        )

    def expected_rows(self) -> tuple[np.ndarray, np.ndarray]:
        is_empty = np.array(self.seq_lens) == 0
        return is_empty, np.zeros_like(is_empty)


def _cases() -> list[DecodeCase]:
    cases = [
        DecodeCase("one_token", seq_lens=(1,)),
        DecodeCase("around_a_block", seq_lens=(15, 16, 17, 0, 1)),
        DecodeCase("around_a_tile", seq_lens=(63, 64, 65, 127, 129)),
        DecodeCase("partition_edges", seq_lens=(127, 128, 129, 256), partition_size=128),
        DecodeCase("shared_prefix", seq_lens=(70, 90, 33), shared_blocks=3),
        DecodeCase("only_padding", seq_lens=(0, 0)),
        DecodeCase("mha", num_q_heads=3, num_kv_heads=3),
        DecodeCase("mqa", num_q_heads=8, num_kv_heads=1),
        DecodeCase("float16", dtype="float16"),
        DecodeCase("float32", dtype="float32"),
        DecodeCase("head_major", kv_layout="head_major", seq_lens=(40, 19)),
        DecodeCase("scale", scale=0.3),
        DecodeCase("alibi", alibi=True, seq_lens=(100, 0, 17)),
        DecodeCase("window_1", sliding_window=1),
        DecodeCase("window_in_a_tile", sliding_window=20, seq_lens=(37, 70, 12)),
        DecodeCase("window_over_tiles", sliding_window=100, seq_lens=(300, 37, 101)),
        DecodeCase("chunk_in_a_tile", attention_chunk=20, seq_lens=(37, 41, 12, 40)),
        DecodeCase("chunk_over_tiles", attention_chunk=100, seq_lens=(290, 37, 101), num_q_heads=10),
        DecodeCase("soft_cap", soft_cap=2.5),
        DecodeCase("sinks", sinks=True, seq_lens=(37, 0, 1)),
        DecodeCase(
            "all_at_once",
            alibi=True, sliding_window=50, soft_cap=3.0, sinks=True, scale=0.2, seq_lens=(61, 130, 9),
            num_q_heads=10, num_kv_heads=2, head_dim=128,
        ),
        DecodeCase("thousands", seq_lens=(2049, 3), num_q_heads=2, num_kv_heads=1, partition_size=512),
    ]  # fmt: skip
    # In each row the largest score is in the last, partly filled partition of 128, 256, 512 or 1,024 tokens.
    lens = {128: (200,), 256: (450,), 512: (200, 450, 900, 1980), 1024: (1980,)}
    cases += [
        DecodeCase(
            f"rising_{size}",
            seq_lens=lens[size],
            num_q_heads=2,
            num_kv_heads=1,
            partition_size=size,
            rising=1.0,
        )
        for size in lens
    ]
    cases += [
        DecodeCase(f"group_{g}", num_q_heads=2 * g, num_kv_heads=2, seq_lens=(20, 7))
        for g in (1, 3, 5, 6, 7, 8, 12, 16)
    ]
    cases += [
        DecodeCase(f"head_dim_{d}", head_dim=d, num_q_heads=3, num_kv_heads=1, seq_lens=(33,))
        for d in (80, 96, 112, 128, 192, 256)
    ]
    cases += [
        DecodeCase(f"block_size_{b}", block_size=b, seq_lens=(b + 1, 70, 300))
        for b in (1, 8, 32, 64, 128, 256)
    ]
    cases += [
        DecodeCase(
            f"{name}_{'per_head' if per_head else 'per_tensor'}", cache_dtype=name, scale_per_head=per_head
        )
        for name in frame.QUANTISED
        for per_head in (False, True)
    ]
    cases += [
        DecodeCase("float8_with_float16", dtype="float16", cache_dtype="float8_e4m3fn"),
        DecodeCase("sparse_local", block_sparse=BlockSparse(16, 2, 1000), seq_lens=(100, 33, 5)),
        DecodeCase("sparse_nothing", block_sparse=BlockSparse(16, 0, 1000), seq_lens=(100, 5), sinks=True),
        DecodeCase("sparse_vertical", block_sparse=BlockSparse(16, 1, 3), seq_lens=(100, 33, 5)),
        DecodeCase(
            "sparse_slide_q",
            block_sparse=BlockSparse(32, 1, 3, head_sliding_step=1),
            seq_lens=(200, 33),
            num_q_heads=6,
        ),
        DecodeCase(
            "sparse_slide_kv",
            block_sparse=BlockSparse(16, 1, 4, head_sliding_step=-1, tp_rank=1),
            seq_lens=(200, 33),
            num_q_heads=6,
        ),
    ]
    return cases


CASES = _cases()


def case(name: str) -> DecodeCase:
    """Return the case of that name."""
    return next(c for c in CASES if c.name == name)


def make_inputs(case: DecodeCase, stale: str = "nan", padding: str = "invalid") -> dict[str, np.ndarray]:
    """Make the arrays q, k_cache, v_cache, block_tables and seq_lens; see `frame.hostile_pool`."""
    rng = np.random.default_rng(0)
    seen = [(0, length) for length in case.seq_lens]
    caches, tables, _ = frame.hostile_pool(case, rng, seen, stale, padding, case.shared_blocks)
    if case.rising:
        _raise_keys(case, caches[0], tables)
    if case.kv_layout == "head_major":
        caches = np.ascontiguousarray(caches.swapaxes(2, 3))
    q = rng.standard_normal((len(case.seq_lens), case.num_q_heads, case.head_dim)) + case.rising
    return {
        "q": q.astype(frame.DTYPES[case.dtype]),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": tables,
        "seq_lens": np.array(case.seq_lens, np.int32),
    }


def _raise_keys(case: DecodeCase, keys: np.ndarray, tables: np.ndarray) -> None:
    """Move keys by up to `rising`, the more the later they are, in place.

    With queries moved alike, a row's scores rise by about rising ** 2 * head_dim ** 0.5.
    """
    for row, length in enumerate(case.seq_lens):
        positions = np.arange(length)
        at = tables[row, positions // case.block_size], positions % case.block_size
        moved = keys[at].astype(np.float32) + case.rising * (positions / max(length, 1))[:, None, None]
        keys[at] = moved.astype(keys.dtype)
