"""Cases of tiles: several neighbouring query tokens of a sequence together."""

import dataclasses
import functools
from dataclasses import KW_ONLY
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxpaged.research.verify.cases import frame
from jaxpaged.research.verify.oracles import attention


class Arrays(NamedTuple):
    """Arrays that `pallas_kernels` takes, without the starts of tiles."""

    q: np.ndarray  # [num_tiles, tile_len, num_q_heads, head_dim]
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray


@dataclasses.dataclass(frozen=True)
class TileCase(frame.AttentionCase):
    """Tiles of `tile_len` tokens, from these positions on of sequences so long; a length of 0 is no tile."""

    starts: tuple[int, ...]
    seq_lens: tuple[int, ...]
    _: KW_ONLY
    tile_len: int = 32
    num_kv_heads: int = 1

    SIMPLER: ClassVar = frame.AttentionCase.SIMPLER | {"tile_len": (1, 2, 4, 8)}

    @property
    def is_sound(self) -> bool:
        if not super().is_sound or len(self.starts) != len(self.seq_lens):
            return False
        spans = [*zip(self.starts, self.seq_lens, strict=True)]
        return all(n == start == 0 or 0 < n - start <= self.tile_len for start, n in spans) and (
            self.tile_len > 1 or all(n - 1 == start for start, n in spans)
        )

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return self.seq_lens

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5} | super().options

    def arguments(self, stale: str = "nan", padding: str = "invalid") -> tuple[list[Any], dict[str, Any]]:
        """Return q, k_cache, v_cache, block_tables, starts and seq_lens; then options."""
        (q, k, v, tables, seq_lens), starts, _ = inputs(self, stale, padding)
        return [q, k, v, tables, starts, seq_lens], self.options

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute each place's queries as a decode step there; zeros where there is no query."""
        arrays, starts, _ = inputs(self)
        lengths = _visible_lengths(starts, arrays.seq_lens, self.tile_len)

        def attend(v_cache: np.ndarray) -> np.ndarray:
            decode = [
                arrays._replace(q=arrays.q[:, i], v_cache=v_cache, seq_lens=lengths[:, i])
                for i in range(self.tile_len)
            ]
            return np.stack([attention.paged_attention(*step, **self.options) for step in decode], axis=1)

        return frame.with_magnitudes(attend, arrays.v_cache)

    @property
    def axes(self) -> tuple[str, ...]:
        return ("tile", "token", "head", "element")

    def expected_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which places are of no tile, and which are a tile's padding."""
        seq_lens = np.array(self.seq_lens)
        is_query = _visible_lengths(np.array(self.starts), seq_lens, self.tile_len) > 0
        is_empty = np.broadcast_to(seq_lens[:, None] == 0, is_query.shape)
        return is_empty, ~is_query & ~is_empty

    def rounding(self, want: np.ndarray) -> Any:
        """Return the error of outputs in float16 that are then rounded to q's type."""
        return abs(want) * (2.0**-11 if self.is_quantised else 0)


def _visible_lengths(starts: np.ndarray, seq_lens: np.ndarray, tile_len: int) -> np.ndarray:
    """Return how many tokens each place of a tile sees [num_tiles, tile_len]; 0 where there is no query."""
    positions = starts[:, None] + np.arange(tile_len)
    return np.where(positions < seq_lens[:, None], positions + 1, 0)


CASES = [
    TileCase("first tiles, padding", (0, 32, 0), (32, 50, 0), num_q_heads=8, num_kv_heads=2, head_dim=128),
    TileCase("full and edge tiles", (256, 300), (288, 301)),
    TileCase("window", (256, 300, 20), (288, 331, 40), sliding_window=180),
    TileCase("window within a tile", (130, 5), (150, 30), sliding_window=9, head_dim=80, block_size=8),
    TileCase("chunks, and tiles over their ends", (340, 300, 20), (372, 331, 40), attention_chunk=180),
    TileCase("chunks within a tile", (130, 5), (150, 30), attention_chunk=9, head_dim=80, block_size=8),
    TileCase("three heads, float16", (140,), (172,), num_q_heads=3, dtype="float16", head_dim=96),
    TileCase("chunks of a group", (10,), (40,), num_q_heads=10, num_kv_heads=2, block_size=64),
    TileCase("a head each", (120,), (152,), num_q_heads=2, num_kv_heads=2, block_size=256),
    TileCase("longest tiles, sinks", (100,), (164,), tile_len=64, num_q_heads=2, sinks=True),
    TileCase(
        "odd tiles, all at once", (100, 0), (119, 7),
        tile_len=19, num_q_heads=6, num_kv_heads=2, alibi=True, soft_cap=3.0, sinks=True, sliding_window=90,
    ),
    TileCase("head_dim 256", (100,), (132,), head_dim=256, sliding_window=80),
    TileCase("two tokens", (127, 0, 62), (129, 0, 64), tile_len=2, num_q_heads=8, num_kv_heads=2),
    TileCase(
        "seven tokens, all at once", (300, 3), (307, 8),
        tile_len=7, num_q_heads=3, alibi=True, soft_cap=3.0, sinks=True, sliding_window=150,
    ),
    TileCase("sixteen tokens", (250,), (263,), tile_len=16, num_q_heads=4, head_dim=128),
    TileCase(
        "float8 cache", (300, 0, 0), (332, 9, 0),
        num_q_heads=8, num_kv_heads=2, cache_dtype="float8_e4m3fn",
    ),
    TileCase(
        "int8 cache, all at once", (140,), (169,), num_q_heads=2, alibi=True, soft_cap=3.0, sinks=True,
        sliding_window=90, cache_dtype="int8", block_size=8,
    ),
    TileCase(
        "float8_e5m2 cache, head_dim 256", (100,), (132,),
        head_dim=256, dtype="float16", cache_dtype="float8_e5m2",
    ),
    TileCase("four tokens, int8 cache", (127,), (130,), tile_len=4, num_q_heads=8, cache_dtype="int8"),
]  # fmt: skip


def _first_seen(case: TileCase, start: int) -> int:
    """Return the first token that a tile's first query sees."""
    if case.attention_chunk is not None:
        return start // case.attention_chunk * case.attention_chunk
    return 0 if case.sliding_window is None else max(start + 1 - case.sliding_window, 0)


@functools.cache
def inputs(
    case: TileCase, stale: str = "nan", padding: str = "invalid"
) -> tuple[Arrays, np.ndarray, set[int]]:
    """Return `Arrays`, the tiles' starts, and the blocks that are seen; see `frame.hostile_pool`."""
    rng = np.random.default_rng(0)
    seen = [
        (min(_first_seen(case, start), seq_len), seq_len)
        for start, seq_len in zip(case.starts, case.seq_lens, strict=True)
    ]
    (k, v), tables, live = frame.hostile_pool(case, rng, seen, stale, padding)
    q = rng.standard_normal((len(case.starts), case.tile_len, case.num_q_heads, case.head_dim))
    seq_lens = np.array(case.seq_lens, np.int32)
    return (
        Arrays(q.astype(frame.DTYPES[case.dtype]), k, v, tables, seq_lens),
        np.array(case.starts, np.int32),
        {int(block) for block in np.flatnonzero(live.any(axis=1))},
    )
