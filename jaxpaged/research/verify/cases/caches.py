"""Cases of writing, copying and swapping blocks, and of merging partial results."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from jaxpaged.research.verify.cases import frame
from jaxpaged.research.verify.cases.frame import Compared, ExactCase, KernelCase
from jaxpaged.research.verify.oracles import cache_ops
from jaxpaged.research.verify.oracles.attention import Partials, merge_partials

NUM_PAIRS = 8  # lists of pairs are padded to so many, or a multiple, with (0, 0)
Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class WriteCase(ExactCase):
    """New tokens for these slots; a slot outside the cache is padding."""

    slots: tuple[int, ...] = (9, 23, -1, 4, 10**6, 22, -(2**31))
    num_blocks: int = 6
    block_size: int = 4
    num_kv_heads: int = 3
    head_dim: int = 8
    cache_dtype: str = "float32"
    kv_layout: str = "token_major"
    magnitude: float = 100.0
    with_outlier: bool = True  # the first token is larger than every small type can hold

    SIMPLER: ClassVar = {
        "num_blocks": (2, 3, 4),
        "block_size": (1, 2),
        "num_kv_heads": (1, 2),
        "head_dim": (1, 2),
        "cache_dtype": ("float32",),
        "kv_layout": ("token_major",),
        "magnitude": (1.0,),
        "with_outlier": (False,),
    }
    NUM_SKIPPED: ClassVar = 1  # the null block
    ARRAYS: ClassVar = ("k_cache", "v_cache")

    @property
    def axes(self) -> tuple[str, ...]:
        middle = ("head", "slot") if self.kv_layout == "head_major" else ("slot", "head")
        return ("block", *middle, "element")

    @property
    def is_sound(self) -> bool:
        """Whether each slot occurs at most once, and no slot is of the null block."""
        inside = [slot for slot in self.slots if 0 <= slot < self.num_blocks * self.block_size]
        return (
            len(self.slots) > 0
            and len(set(inside)) == len(inside)
            and min(inside, default=99) >= self.block_size
        )

    def arguments(self, stale: str = "nan", padding: str = "invalid") -> tuple[list[Any], dict[str, Any]]:
        """Return k, v, k_cache, v_cache and slot_mapping; then scales and layout."""
        rng = np.random.default_rng(0)
        k, v = rng.standard_normal((2, len(self.slots), self.num_kv_heads, self.head_dim)).astype(np.float32)
        k, v = k * np.float32(self.magnitude), v * np.float32(self.magnitude)
        if self.with_outlier:
            k[0] = 1e6
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        if self.kv_layout == "head_major":
            shape = (shape[0], shape[2], shape[1], shape[3])
        old = np.full(shape, 3).astype(frame.DTYPES[self.cache_dtype])
        options: dict[str, Any] = {"kv_layout": self.kv_layout}
        if self.is_quantised:
            options["k_scale"] = np.float32(1.5)
            options["v_scale"] = np.float32(0.5) * 2 ** np.arange(self.num_kv_heads, dtype=np.float32)
        return [k, v, old, old.copy(), np.array(self.slots, np.int32)], options

    def wanted(self) -> tuple[np.ndarray, ...]:
        """Return the new caches."""
        arrays, options = self.arguments()
        k, v, k_cache, v_cache, slots = arrays
        return cache_ops.reshape_and_cache(k, v, k_cache, v_cache, slots, **options)


@dataclasses.dataclass(frozen=True)
class CopyCase(ExactCase):
    """Blocks copied in two caches, pair after pair."""

    pairs: Pairs = ()
    num_blocks: int = 6

    SIMPLER: ClassVar = {"num_blocks": (2, 3, 4)}
    ARRAYS: ClassVar = ("cache 0", "cache 1")

    @property
    def axes(self) -> tuple[str, ...]:
        return ("block", "element")

    def arguments(self, stale: str = "nan", padding: str = "invalid") -> tuple[list[Any], dict[str, Any]]:
        """Return the caches and the pairs of blocks."""
        caches = [
            np.arange(2 * self.num_blocks, dtype=np.float32).reshape(-1, 2),
            np.arange(self.num_blocks, dtype=np.int32),
        ]
        return [caches, padded(self.pairs)], {}

    def wanted(self) -> tuple[np.ndarray, ...]:
        (caches, pairs), _ = self.arguments()
        return tuple(cache_ops.copy_blocks(caches, pairs))


@dataclasses.dataclass(frozen=True)
class SwapCase(ExactCase):
    """Blocks copied from one pool to another, pair after pair."""

    pairs: Pairs = ()
    num_source_blocks: int = 10
    num_target_blocks: int = 4

    SIMPLER: ClassVar = {"num_source_blocks": (1, 2, 4), "num_target_blocks": (1, 2, 3)}

    @property
    def axes(self) -> tuple[str, ...]:
        return ("block", "element")

    def arguments(self, stale: str = "nan", padding: str = "invalid") -> tuple[list[Any], dict[str, Any]]:
        """Return source, target and the pairs of blocks."""
        source = np.arange(2 * self.num_source_blocks, dtype=np.float32).reshape(-1, 2)
        target = -1 - np.arange(2 * self.num_target_blocks, dtype=np.float32).reshape(-1, 2)
        return [source, target, padded(self.pairs, nothing=(-1, 0))], {}

    def wanted(self) -> tuple[np.ndarray, ...]:
        arrays, _ = self.arguments()
        return (cache_ops.swap_blocks(*arrays),)


@dataclasses.dataclass(frozen=True)
class MergeCase(KernelCase):
    """Rows cut into so many partitions each; the others of `num_partitions` are empty."""

    num_live: tuple[int, ...] = (2, 0, 1, 3)
    num_partitions: int = 4
    num_heads: int = 3
    head_dim: int = 8
    spread: float = 3.0  # range of the partitions' maxima
    sinks: bool = False

    SIMPLER: ClassVar = {
        "num_partitions": (1, 2, 3),
        "num_heads": (1, 2),
        "head_dim": (1, 2),
        "spread": (0.0, 1.0),
        "sinks": (False,),
    }

    @property
    def is_sound(self) -> bool:
        return len(self.num_live) > 0 and max(self.num_live) <= self.num_partitions

    @property
    def row_sizes(self) -> tuple[int, ...]:
        return self.num_live

    def arguments(self, stale: str = "nan", padding: str = "invalid") -> tuple[list[Any], dict[str, Any]]:
        """Return `Partials` in float32 (out, max, sum), and the sinks."""
        rng = np.random.default_rng(0)
        shape = (len(self.num_live), self.num_heads, self.num_partitions)
        live = np.arange(self.num_partitions) < np.array(self.num_live)[:, None, None]
        live = np.broadcast_to(live, shape)
        sums = np.where(live, rng.uniform(1, 60, shape), 0)
        out = sums[..., None] * rng.standard_normal((*shape, self.head_dim))
        maxima = np.where(live, self.spread * rng.standard_normal(shape), -np.inf)
        options = {}
        if self.sinks:
            options["sinks"] = np.linspace(-1, 2, self.num_heads).astype(np.float32)
        return [x.astype(np.float32) for x in (out, maxima, sums)], options

    def compared(self, got: tuple[np.ndarray, ...], weights_dtype: str | None = None) -> Iterator[Compared]:
        del weights_dtype
        arrays, options = self.arguments()
        want = merge_partials(Partials(*(x.astype(np.float64) for x in arrays)), **options)
        (out,) = frame.shaped(got, want)
        yield Compared(out, want, np.nan_to_num(abs(out - want), nan=np.inf), self.allowed())

    def allowed(self) -> np.ndarray:
        """Return the largest admissible error: an exponential and a product of float32 each, and sums of
        these.

        Each of `num_partitions` terms is off by some roundoffs of float32, and by that of its maximum's
        difference; rows without tokens are zero, exactly.
        """
        arrays, options = self.arguments()
        out, maxima, sums = (x.astype(np.float64) for x in arrays)
        mean_abs = merge_partials(Partials(np.abs(out), maxima, sums), **options)
        largest = np.max(np.abs(maxima), where=np.isfinite(maxima), initial=1.0)
        bound = mean_abs * 2.0**-24 * (8 + 2 * self.num_partitions + 4 * largest) + 1e-30
        bound[np.array(self.num_live) == 0] = frame.TINY
        return bound


def padded(pairs: Pairs, nothing: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Return pairs as [num_pairs, 2] int32, padded to a length that many lists share."""
    missing = -len(pairs) % NUM_PAIRS or (0 if pairs else NUM_PAIRS)
    return np.array([*pairs, *[nothing] * missing], np.int32)


WRITES = [
    WriteCase(f"{dtype} {layout}", cache_dtype=dtype, kv_layout=layout)
    for dtype in ("bfloat16", "float32", *frame.QUANTISED)
    for layout in ("token_major", "head_major")
] + [WriteCase("one token", slots=(21,)), WriteCase("the last slot", slots=(23, 4, 8))]
COPIES = [
    CopyCase("nothing"),
    CopyCase("one block", ((1, 2),)),
    CopyCase("a chain", ((1, 2), (2, 3), (3, 4))),
    CopyCase("a chain backwards", ((3, 4), (2, 3), (1, 2))),
    CopyCase("two blocks change places", ((1, 5), (2, 1), (5, 2))),
    CopyCase("a target twice", ((1, 3), (2, 3))),
    CopyCase("onto itself, out of range", ((4, 4), (6, 1), (1, 6), (-1, 2), (2, -1))),
]
SWAPS = [
    SwapCase("nothing"),
    SwapCase("two blocks", ((9, 1), (3, 2))),
    SwapCase("a target twice", ((9, 1), (3, 2), (8, 1))),
    SwapCase("out of range", ((9, 1), (7, 4), (-1, 0), (10, 3), (1, -1))),
]
MERGES = [
    MergeCase("one partition", (1,), 1),
    MergeCase("some partitions"),
    MergeCase("sinks", sinks=True),
    MergeCase("far apart", (8, 5), 8, spread=40.0),
    MergeCase("very far apart", (3, 3), 3, spread=400.0, sinks=True),
]
