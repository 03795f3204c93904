"""The shapes and options every implementation of decode attention is tested with, and inputs made of them.

One list for others' functions, the XLA path, the Mosaic GPU kernels in the interpreter, and the benchmarks'
check on a chip. Each case's pool is hostile: blocks nobody owns, stale slots of live blocks and the null
block hold NaN (int8: the largest number), and table entries past a row's tokens are not block ids at all.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from jaxpaged.verify.oracles import attention
from jaxpaged.verify.oracles.attention import BlockSparse

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")
# What stands in stale slots and in blocks of nobody, and in table entries past a row's tokens.
STALE = ("nan", "zero")
PADDING = ("invalid", "null")
# Simple values of each field, the simplest first: `shrinking` tries them.
SIMPLER: dict[str, tuple[Any, ...]] = {
    "num_q_heads": (1, 2),
    "num_kv_heads": (1, 2),
    "head_dim": (8, 16, 64),
    "block_size": (1, 2, 4, 8, 16),
    "dtype": ("float32", "bfloat16"),
    "cache_dtype": (None,),
    "kv_layout": ("token_major",),
    "scale": (None,),
    "alibi": (False,),
    "sliding_window": (None, 1, 2, 4, 8, 16),
    "attention_chunk": (None, 1, 2, 4, 8, 16),
    "soft_cap": (None,),
    "sinks": (False,),
    "scale_per_head": (False,),
    "block_sparse": (None,),
    "shared_blocks": (0, 1),
    "partition_size": (16, 32, 64),
}


@dataclasses.dataclass(frozen=True)
class Named:
    """Base of cases: a name, and the features that a case asks for."""

    name: str

    SIMPLER: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @property
    def is_sound(self) -> bool:
        """Whether it is a problem at all: of what shrinking puts together, not everything is."""
        return True

    @property
    def features(self) -> set[str]:
        """Names of what the case asks of a function beside sizes and types."""
        return set()

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Case(Named):
    """One decode-attention problem. Lengths are tokens; a row of length 0 is padding."""

    seq_lens: tuple[int, ...] = (37, 0, 64)
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: as dtype
    kv_layout: str = "token_major"
    scale: float | None = None
    alibi: bool = False
    sliding_window: int | None = None
    attention_chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scale_per_head: bool = False
    block_sparse: BlockSparse | None = None
    shared_blocks: int = 0  # leading blocks that rows 0 and 1 have in common
    partition_size: int = 64  # for v2

    SIMPLER: ClassVar = SIMPLER

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def is_quantised(self) -> bool:
        return self.cache_dtype in QUANTISED

    @property
    def is_sound(self) -> bool:
        shared = self.shared_blocks * self.block_size
        return (
            self.num_q_heads % self.num_kv_heads == 0
            and len(self.seq_lens) > (self.shared_blocks > 0)
            and (not self.shared_blocks or min(self.seq_lens[:2]) >= shared)
            and self.partition_size % min(self.block_size, self.partition_size) == 0
            and not (self.scale_per_head and not self.is_quantised)
        )

    @property
    def features(self) -> set[str]:
        return features_of(self, self.seq_lens)


def features_of(case: Any, lens: tuple[int, ...]) -> set[str]:
    """Return the names of the options that a case of attention has, and whether it has rows without
    tokens.
    """
    asked = {
        name: getattr(case, name, None)
        for name in (
            *("scale", "sliding_window", "attention_chunk", "soft_cap", "block_sparse"),
            *("alibi", "sinks", "shared_blocks"),
        )
    }
    found = {name for name, value in asked.items() if value}
    if case.cache_dtype in QUANTISED:
        found.add("quantised")
    if getattr(case, "scale_per_head", False):
        found.add("scale_per_head")
    if getattr(case, "kv_layout", "token_major") != "token_major":
        found.add("head_major")
    if 0 in lens:
        found.add("empty_rows")
    return found


def _cases() -> list[Case]:
    cases = [
        Case("one_token", seq_lens=(1,)),
        Case("around_a_block", seq_lens=(15, 16, 17, 0, 1)),
        Case("around_a_tile", seq_lens=(63, 64, 65, 127, 129)),
        Case("partition_edges", seq_lens=(127, 128, 129, 256), partition_size=128),
        Case("shared_prefix", seq_lens=(70, 90, 33), shared_blocks=3),
        Case("only_padding", seq_lens=(0, 0)),
        Case("mha", num_q_heads=3, num_kv_heads=3),
        Case("mqa", num_q_heads=8, num_kv_heads=1),
        Case("float16", dtype="float16"),
        Case("float32", dtype="float32"),
        Case("head_major", kv_layout="head_major", seq_lens=(40, 19)),
        Case("scale", scale=0.3),
        Case("alibi", alibi=True, seq_lens=(100, 0, 17)),
        Case("window_1", sliding_window=1),
        Case("window_in_a_tile", sliding_window=20, seq_lens=(37, 70, 12)),
        Case("window_over_tiles", sliding_window=100, seq_lens=(300, 37, 101)),
        Case("chunk_in_a_tile", attention_chunk=20, seq_lens=(37, 41, 12, 40)),
        Case("chunk_over_tiles", attention_chunk=100, seq_lens=(290, 37, 101), num_q_heads=10),
        Case("soft_cap", soft_cap=2.5),
        Case("sinks", sinks=True, seq_lens=(37, 0, 1)),
        Case(
            "all_at_once",
            alibi=True, sliding_window=50, soft_cap=3.0, sinks=True, scale=0.2, seq_lens=(61, 130, 9),
            num_q_heads=10, num_kv_heads=2, head_dim=128,
        ),
        Case("thousands", seq_lens=(2049, 3), num_q_heads=2, num_kv_heads=1, partition_size=512),
    ]  # fmt: skip
    cases += [
        Case(f"group_{g}", num_q_heads=2 * g, num_kv_heads=2, seq_lens=(20, 7))
        for g in (1, 3, 5, 6, 7, 8, 12, 16)
    ]
    cases += [
        Case(f"head_dim_{d}", head_dim=d, num_q_heads=3, num_kv_heads=1, seq_lens=(33,))
        for d in (80, 96, 112, 128, 192, 256)
    ]
    cases += [
        Case(f"block_size_{b}", block_size=b, seq_lens=(b + 1, 70, 300)) for b in (1, 8, 32, 64, 128, 256)
    ]
    cases += [
        Case(f"{name}_{'per_head' if per_head else 'per_tensor'}", cache_dtype=name, scale_per_head=per_head)
        for name in QUANTISED
        for per_head in (False, True)
    ]
    cases += [
        Case("float8_with_float16", dtype="float16", cache_dtype="float8_e4m3fn"),
        Case("sparse_local", block_sparse=BlockSparse(16, 2, 1000), seq_lens=(100, 33, 5)),
        Case("sparse_nothing", block_sparse=BlockSparse(16, 0, 1000), seq_lens=(100, 5), sinks=True),
        Case("sparse_vertical", block_sparse=BlockSparse(16, 1, 3), seq_lens=(100, 33, 5)),
        Case(
            "sparse_slide_q",
            block_sparse=BlockSparse(32, 1, 3, head_sliding_step=1),
            seq_lens=(200, 33),
            num_q_heads=6,
        ),
        Case(
            "sparse_slide_kv",
            block_sparse=BlockSparse(16, 1, 4, head_sliding_step=-1, tp_rank=1),
            seq_lens=(200, 33),
            num_q_heads=6,
        ),
    ]
    return cases


CASES = _cases()


def case(name: str) -> Case:
    """Return the case of that name."""
    return next(c for c in CASES if c.name == name)


def make_inputs(
    case: Case, seed: int = 0, *, stale: str = "nan", padding: str = "invalid"
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Make the arrays (q, k_cache, v_cache, block_tables, seq_lens) and keyword arguments, all NumPy.

    stale: "zero" is for functions that multiply what they do not see by zero. padding: "null" is for
    functions that look up more of a table than a row's tokens.
    """
    rng = np.random.default_rng(seed)
    num_seqs, block_size = len(case.seq_lens), case.block_size
    dtype, cache_dtype = DTYPES[case.dtype], DTYPES[case.cache_dtype or case.dtype]
    held = [-(-n // block_size) for n in case.seq_lens]
    num_blocks = sum(held) + 4  # the null block and three that nobody owns
    max_blocks_per_seq = max(held) + 3
    free = list(rng.permutation(np.arange(1, num_blocks)))

    block_tables = np.where(np.arange(max_blocks_per_seq) % 2, 2**30, -7) * np.ones((num_seqs, 1), int)
    for row, count in enumerate(held):
        block_tables[row, :count] = [free.pop() for _ in range(count)]
    if padding == "null":
        beyond = np.arange(max_blocks_per_seq) >= np.array(held, int)[:, None]
        block_tables = np.where(beyond, 0, block_tables)
    if case.shared_blocks:
        block_tables[1, : case.shared_blocks] = block_tables[0, : case.shared_blocks]

    scales: dict[str, Any] = {}
    if case.is_quantised:
        shape = (case.num_kv_heads,) if case.scale_per_head else ()
        unit = 4 / 127 if case.cache_dtype == "int8" else 4 / 100  # values up to 4 or so use the type's range
        scales["k_scale"] = (unit * rng.uniform(0.8, 1.2, shape)).astype(np.float32)
        scales["v_scale"] = (unit * rng.uniform(0.8, 1.2, shape)).astype(np.float32)

    cache_shape = (num_blocks, block_size, case.num_kv_heads, case.head_dim)
    poison = 0 if stale == "zero" else 127 if case.cache_dtype == "int8" else np.nan
    caches: list[np.ndarray] = []
    for _ in range(2):
        cache = np.full(cache_shape, poison).astype(cache_dtype)
        for row, length in enumerate(case.seq_lens):
            for t in range(length):
                if row == 1 and t < case.shared_blocks * block_size:
                    continue  # row 0 wrote these
                value = rng.standard_normal(cache_shape[2:])
                stored_value = stored(value, len(caches), scales, cache_dtype)
                cache[block_tables[row, t // block_size], t % block_size] = stored_value
        if case.kv_layout == "head_major":
            cache = np.ascontiguousarray(cache.swapaxes(1, 2))
        caches.append(cache)

    arrays = {
        "q": rng.standard_normal((num_seqs, case.num_q_heads, case.head_dim)).astype(dtype),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "block_tables": block_tables.astype(np.int32),
        "seq_lens": np.array(case.seq_lens, np.int32),
    }
    options: dict[str, Any] = {"kv_layout": case.kv_layout, **scales}
    options |= {
        name: getattr(case, name)
        for name in ("scale", "sliding_window", "attention_chunk", "soft_cap", "block_sparse")
        if getattr(case, name) is not None
    }
    if case.alibi:
        options["alibi_slopes"] = (2.0 ** -np.arange(1, case.num_q_heads + 1)).astype(np.float32)
    if case.sinks:
        options["sinks"] = rng.standard_normal(case.num_q_heads).astype(np.float32)
    return arrays, options


def stored(value: np.ndarray, which: int, scales: dict[str, Any], dtype: np.dtype) -> np.ndarray:
    """Return values [..., num_kv_heads, head_dim] as a cache of K (`which` 0) or V (1) of that type holds
    them.
    """
    if not scales:
        return value.astype(dtype)
    scale = np.asarray(scales["v_scale" if which else "k_scale"])
    scaled = value / (scale[:, None] if scale.ndim else scale)
    if dtype == np.int8:
        return np.clip(np.rint(scaled), -127, 127).astype(np.int8)
    return scaled.astype(dtype)


def tolerance(case: Case, want: np.ndarray, mean_abs: np.ndarray, weights_dtype: str) -> np.ndarray:
    """Return the largest admissible absolute error of each output element.

    An output is a mean of values with weights of sum one (or less, with a sink), so relative errors of up
    to e in the weights move it by at most e * mean_abs, the same mean of the values' magnitudes. With u
    the unit roundoff of a type:

    * weights are rounded to `weights_dtype` before they meet the values: u of that type;
    * a logit is a float32 sum of head_dim products whose magnitudes add up to less than 32: head_dim * 32
      * 2**-24 at most, and a weight moves by as much; twice, as the sum that is divided by moves too;
    * the output is rounded to q's type: u of that type times the output.
    """
    u = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
    logit_error = 32 * case.head_dim * 2.0**-24
    return mean_abs * (u[weights_dtype] + 2 * logit_error) + abs(want) * u[case.dtype] + 1e-6


@functools.cache
def oracle(c: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return the output in float64, and the mean of the values' magnitudes with the same weights."""
    arrays, options = make_inputs(c)
    arguments: dict[str, Any] = {**arrays, **options}
    want = attention.paged_attention(**arguments)
    arguments["v_cache"] = np.abs(arrays["v_cache"].astype(np.float32))
    return want, attention.paged_attention(**arguments)


def compared(c: Case, got: np.ndarray, weights_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return each element's error, infinite for NaN, and the largest that is allowed.

    That is `tolerance`, and for rows without tokens nothing: they are zero, exactly.
    """
    want, mean_abs = oracle(c)
    allowed = tolerance(c, want, mean_abs, weights_dtype)
    allowed[np.array(c.seq_lens) == 0] = np.finfo(np.float64).tiny
    return np.nan_to_num(abs(got - want), nan=np.inf), allowed


def call_of(value: Any) -> str:
    """Return the constructor's call, without arguments that have their default."""
    given = [
        f"{field.name}={getattr(value, field.name)!r}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != _default_of(field)
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def _default_of(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
