"""Tiles of several query tokens: cases, their arrays, and the oracle's answer."""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxpaged.verify import cases as shapes
from jaxpaged.verify.oracles import attention

TINY = float(np.finfo(np.float64).tiny)


class Arrays(NamedTuple):
    """Arrays that `pallas_kernels` takes, without the starts of tiles."""

    q: np.ndarray  # [num_tiles, tile_len, num_q_heads, head_dim]
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray


@dataclasses.dataclass(frozen=True)
class Case(shapes.Named):
    """Tiles of `tile_len` tokens, from these positions on of sequences so long; a length of 0 is no tile."""

    starts: tuple[int, ...]
    seq_lens: tuple[int, ...]
    tile_len: int = 32
    num_q_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: as dtype
    sliding_window: int | None = None
    attention_chunk: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False

    SIMPLER: ClassVar = shapes.SIMPLER | {"tile_len": (1, 2, 4, 8)}

    @property
    def is_sound(self) -> bool:
        spans = zip(self.starts, self.seq_lens, strict=False)
        return (
            len(self.starts) == len(self.seq_lens) > 0
            and self.num_q_heads % self.num_kv_heads == 0
            and all(n == start == 0 or 0 < n - start <= self.tile_len for start, n in spans)
            and (
                self.tile_len > 1 or all(n - 1 == s for s, n in zip(self.starts, self.seq_lens, strict=True))
            )
        )

    @property
    def features(self) -> set[str]:
        return shapes.features_of(self, self.seq_lens)

    @property
    def options(self) -> dict[str, Any]:
        """Options as `ops` takes them."""
        options: dict[str, Any] = {"scale": self.head_dim**-0.5, "sliding_window": self.sliding_window}
        options["soft_cap"] = self.soft_cap
        if self.attention_chunk is not None:
            options["attention_chunk"] = self.attention_chunk
        if self.alibi:
            options["alibi_slopes"] = (2.0 ** -np.arange(1, self.num_q_heads + 1)).astype(np.float32)
        if self.sinks:
            options["sinks"] = np.linspace(-1, 2, self.num_q_heads).astype(np.float32)
        return options | self.scales

    @property
    def scales(self) -> dict[str, Any]:
        """Scales of a quantised cache: values up to about 4 use the type's range."""
        if self.cache_dtype is None:
            return {}
        unit = np.float32(4 / 127 if self.cache_dtype == "int8" else 4 / 100)
        return {"k_scale": unit * np.linspace(0.8, 1.2, self.num_kv_heads, dtype=np.float32), "v_scale": unit}


CASES = [
    Case("first tiles, padding", (0, 32, 0), (32, 50, 0), num_q_heads=8, num_kv_heads=2, head_dim=128),
    Case("full and edge tiles", (256, 300), (288, 301)),
    Case("window", (256, 300, 20), (288, 331, 40), sliding_window=180),
    Case("window within a tile", (130, 5), (150, 30), sliding_window=9, head_dim=80, block_size=8),
    Case("chunks, and tiles over their ends", (340, 300, 20), (372, 331, 40), attention_chunk=180),
    Case("chunks within a tile", (130, 5), (150, 30), attention_chunk=9, head_dim=80, block_size=8),
    Case("three heads, float16", (140,), (172,), num_q_heads=3, dtype="float16", head_dim=96),
    Case("chunks of a group", (10,), (40,), num_q_heads=10, num_kv_heads=2, block_size=64),
    Case("a head each", (120,), (152,), num_q_heads=2, num_kv_heads=2, block_size=256),
    Case("longest tiles, sinks", (100,), (164,), tile_len=64, num_q_heads=2, sinks=True),
    Case(
        "odd tiles, all at once", (100, 0), (119, 7),
        tile_len=19, num_q_heads=6, num_kv_heads=2, alibi=True, soft_cap=3.0, sinks=True, sliding_window=90,
    ),
    Case("head_dim 256", (100,), (132,), head_dim=256, sliding_window=80),
    Case("two tokens", (127, 0, 62), (129, 0, 64), tile_len=2, num_q_heads=8, num_kv_heads=2),
    Case(
        "seven tokens, all at once", (300, 3), (307, 8),
        tile_len=7, num_q_heads=3, alibi=True, soft_cap=3.0, sinks=True, sliding_window=150,
    ),
    Case("sixteen tokens", (250,), (263,), tile_len=16, num_q_heads=4, head_dim=128),
    Case(
        "float8 cache", (300, 0, 0), (332, 9, 0),
        num_q_heads=8, num_kv_heads=2, cache_dtype="float8_e4m3fn",
    ),
    Case(
        "int8 cache, all at once", (140,), (169,), num_q_heads=2, alibi=True, soft_cap=3.0, sinks=True,
        sliding_window=90, cache_dtype="int8", block_size=8,
    ),
    Case(
        "float8_e5m2 cache, head_dim 256", (100,), (132,),
        head_dim=256, dtype="float16", cache_dtype="float8_e5m2",
    ),
    Case("four tokens, int8 cache", (127,), (130,), tile_len=4, num_q_heads=8, cache_dtype="int8"),
]  # fmt: skip


@functools.cache
def inputs(c: Case, stale: str = "nan", padding: str = "invalid") -> tuple[Arrays, np.ndarray, set[int]]:
    """Return `Arrays`, the tiles' starts, and the blocks that are seen. Unseen slots hold NaN, and unseen
    table entries name no block.

    An int8 cache has its largest number in place of NaN. For stale and padding see `cases.make_inputs`.
    """
    rng = np.random.default_rng(0)
    dtype, num_tiles = shapes.DTYPES[c.dtype], len(c.starts)
    cache_dtype = shapes.DTYPES[c.cache_dtype or c.dtype]
    width = -(-max(c.seq_lens) // c.block_size) + 2
    num_blocks = 1 + num_tiles * width
    values = rng.standard_normal((2, num_blocks, c.block_size, c.num_kv_heads, c.head_dim))
    caches = np.stack([shapes.stored(values[which], which, c.scales, cache_dtype) for which in (0, 1)])
    tables = 1 + rng.permutation(num_blocks - 1).reshape(num_tiles, width)
    live = np.zeros((num_blocks, c.block_size), bool)
    for tile, (start, seq_len) in enumerate(zip(c.starts, c.seq_lens, strict=True)):
        begin = 0 if c.sliding_window is None else max(start + 1 - c.sliding_window, 0)
        if c.attention_chunk is not None:
            begin = start // c.attention_chunk * c.attention_chunk
        for position in range(begin, seq_len):
            live[tables[tile, position // c.block_size], position % c.block_size] = True
        tables[tile, : begin // c.block_size] = 0 if padding == "null" else 2**30
        tables[tile, -(-seq_len // c.block_size) :] = 0 if padding == "null" else -7
    caches[:, ~live] = 0 if stale == "zero" else 127 if c.cache_dtype == "int8" else np.nan
    q = rng.standard_normal((num_tiles, c.tile_len, c.num_q_heads, c.head_dim)).astype(dtype)
    arrays: list[Any] = [q, *caches, tables.astype(np.int32), np.array(c.seq_lens, np.int32)]
    return (
        Arrays(*arrays),
        np.array(c.starts, np.int32),
        {int(block) for block in np.flatnonzero(live.any(axis=1))},
    )


@functools.cache
def oracle(c: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the output in float64, the mean of the values' magnitudes, and which places hold a query."""
    arrays, starts, _ = inputs(c)
    shape = arrays.q.shape
    want, mean_abs, used = np.zeros(shape), np.zeros(shape), np.zeros(shape[:2], bool)
    for i in range(c.tile_len):
        upto = np.where(starts + i < arrays.seq_lens, starts + i + 1, 0)
        decode = arrays._replace(q=arrays.q[:, i], seq_lens=upto)
        want[:, i] = attention.paged_attention(*decode, **c.options)
        magnitude = decode._replace(v_cache=np.abs(arrays.v_cache.astype(np.float32)))
        mean_abs[:, i] = attention.paged_attention(*magnitude, **c.options)
        used[:, i] = upto > 0
    return want, mean_abs, used


def compared(c: Case, got: np.ndarray, weights_dtype: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return each element's error, infinite for NaN, and the largest that is allowed.

    A query may be off by `shapes.tolerance` from a decode step at its place, a tile of nobody not at all; a
    place of padding may hold anything. With a quantised cache weights are in float16 by default, and so are
    outputs before they are rounded to q's type.
    """
    want, mean_abs, used = oracle(c)
    weights_dtype = weights_dtype or ("float16" if c.cache_dtype else c.dtype)
    like = shapes.Case(c.name, head_dim=c.head_dim, dtype=c.dtype)
    bound = shapes.tolerance(like, want, mean_abs, weights_dtype)
    bound += abs(want) * (2.0**-11 if c.cache_dtype else 0)
    is_nobody = np.array(c.seq_lens)[:, None] == 0
    allowed = np.where(used[..., None, None], bound, np.where(is_nobody, TINY, np.inf)[..., None, None])
    error = np.nan_to_num(abs(got - want), nan=np.inf)
    return np.where(np.isinf(allowed), 0, error), allowed


def worst(c: Case, got: np.ndarray, weights_dtype: str | None = None) -> tuple[float, float]:
    """Return the error that is largest relative to what is allowed there, and what is allowed."""
    error, allowed = compared(c, got, weights_dtype)
    at = np.unravel_index(np.argmax(error / allowed), got.shape)
    return float(error[at]), float(allowed[at])


def assert_close(c: Case, got: np.ndarray, weights_dtype: str | None = None) -> None:
    """Assert that all errors are within `compared`'s bounds."""
    error, allowed = worst(c, got, weights_dtype)
    assert error <= allowed, f"{error=:.3g} > {allowed=:.3g}"
