"""Frame of the kernel cases: shared fields, hostile pools, tolerances, and the comparison of an answer."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")
# Content of stale slots and of blocks without an owner, and of table entries past a row's tokens.
STALE = ("nan", "zero")
PADDING = ("invalid", "null")
# Fields that are features of a case where they are set, and features that follow from other fields.
FLAGS = (
    "alibi", "attention_chunk", "block_sparse", "scale", "scale_per_head", "shared_blocks", "sinks",
    "sliding_window", "soft_cap",
)  # fmt: skip
FEATURES = {*FLAGS, "empty_rows", "head_major", "quantised"}
# The only error that is allowed where a value must be exact.
TINY = float(np.finfo(np.float64).tiny)


class WrongResult(AssertionError):
    """Error for a wrong answer: the message names the case, the position, the value and the right value."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """One array of an answer: what it is, must be, and may be off by, by element."""

    got: np.ndarray
    want: np.ndarray
    error: np.ndarray  # NaN counts as infinite
    allowed: np.ndarray  # positive

    @property
    def worst(self) -> tuple[float, tuple[int, ...]]:
        """Largest error in units of the allowed error, and its index."""
        if not self.error.size:
            return 0.0, ()
        ratio = self.error / self.allowed
        at = np.unravel_index(np.argmax(ratio), ratio.shape)
        return float(ratio[at]), tuple(map(int, at))


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """Base of cases: a name, arguments of an operation, and the comparison of its answer."""

    name: str

    SIMPLER: ClassVar[dict[str, tuple[Any, ...]]] = {}
    ARRAYS: ClassVar[tuple[str, ...]] = ()  # names of an answer's arrays, if there are several

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes of an answer's array."""
        return ("row", "head", "element")

    def place(self, number: int, at: tuple[int, ...]) -> str:
        """Return words for an element of an answer's array."""
        words = [f"{axis} {index}" for axis, index in zip(self.axes, at, strict=False)]
        return ", ".join([*self.ARRAYS[number : number + 1], *words])

    @property
    def is_sound(self) -> bool:
        """Whether the case is a valid problem; shrinking also makes invalid ones."""
        return True

    @property
    def is_quantised(self) -> bool:
        return getattr(self, "cache_dtype", None) in QUANTISED

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Tokens or partitions of each row; a row of 0 is empty."""
        return ()

    @property
    def features(self) -> set[str]:
        """Names of the `FEATURES` of a function that the case needs, besides sizes and types."""
        names = {name for name in FLAGS if getattr(self, name, None)}
        derived = {
            "quantised": self.is_quantised,
            "head_major": getattr(self, "kv_layout", "token_major") == "head_major",
            "empty_rows": 0 in self.row_sizes,
        }
        return names | {name for name, is_so in derived.items() if is_so}

    def arguments(self, stale: str = "nan", padding: str = "invalid") -> tuple[list[Any], dict[str, Any]]:
        """Return the operation's arrays in order, and its options by keyword.

        stale: "zero" is for functions that multiply what they do not see by zero. padding: "null" is for
        functions that look up more of a table than a row's tokens.
        """
        raise NotImplementedError

    def compared(self, got: tuple[np.ndarray, ...], weights_dtype: str | None = None) -> Iterator[Compared]:
        """Yield the comparison of each array of an answer.

        weights_dtype: type in which softmax weights are held; None: q's.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class ExactCase(KernelCase):
    """Base of cases whose answers are right to the bit; NaN equals itself."""

    NUM_SKIPPED: ClassVar = 0  # leading blocks whose content means nothing

    def wanted(self) -> tuple[np.ndarray, ...]:
        """Return the right answer's arrays."""
        raise NotImplementedError

    def compared(self, got: tuple[np.ndarray, ...], weights_dtype: str | None = None) -> Iterator[Compared]:
        del weights_dtype
        want = self.wanted()
        for array, right in zip(shaped(got, *want), want, strict=True):
            right = right.astype(np.float64)
            same = (array == right) | (np.isnan(array) & np.isnan(right))
            same[: self.NUM_SKIPPED] = True
            yield Compared(array, right, np.where(same, 0.0, np.inf), np.ones(array.shape))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCase(KernelCase):
    """Base of the cases of attention: sizes, types and options that all of them have."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None  # None: as dtype
    scale: float | None = None  # None: head_dim ** -0.5
    sliding_window: int | None = None
    attention_chunk: int | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False

    # Simple values of each field, the simplest first: `shrinking` tries them.
    SIMPLER: ClassVar = {
        "num_q_heads": (1, 2),
        "num_kv_heads": (1, 2),
        "head_dim": (8, 16, 64),
        "block_size": (1, 2, 4, 8, 16),
        "dtype": ("float32", "bfloat16"),
        "cache_dtype": (None,),
        "scale": (None,),
        "alibi": (False,),
        "sliding_window": (None, 1, 2, 4, 8, 16),
        "attention_chunk": (None, 1, 2, 4, 8, 16),
        "soft_cap": (None,),
        "sinks": (False,),
    }

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def is_sound(self) -> bool:
        return len(self.row_sizes) > 0 and self.num_q_heads % self.num_kv_heads == 0

    @property
    def scales(self) -> dict[str, Any]:
        """Scales of a quantised cache: values up to about 4 use the type's range."""
        if not self.is_quantised:
            return {}
        unit = np.float32(4 / 127 if self.cache_dtype == "int8" else 4 / 100)
        return {"k_scale": unit * np.linspace(0.8, 1.2, self.num_kv_heads, dtype=np.float32), "v_scale": unit}

    @property
    def options(self) -> dict[str, Any]:
        """Options as `pallas_kernels.ops` takes them, without those that are not set."""
        names = ("scale", "sliding_window", "attention_chunk", "soft_cap")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.alibi:
            options["alibi_slopes"] = (2.0 ** -np.arange(1, self.num_q_heads + 1)).astype(np.float32)
        if self.sinks:
            options["sinks"] = np.linspace(-1, 2, self.num_q_heads).astype(np.float32)
        return options | self.scales

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute the output in float64, and the mean of the values' magnitudes with the same weights."""
        raise NotImplementedError

    def expected_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return which leading entries of the output are exact zeros, and which may hold anything."""
        raise NotImplementedError

    def rounding(self, want: np.ndarray) -> Any:
        """Return the error of roundings that `tolerance` does not know."""
        del want
        return 0.0

    def compared(self, got: tuple[np.ndarray, ...], weights_dtype: str | None = None) -> Iterator[Compared]:
        want, _ = oracle(self)
        (out,) = shaped(got, want)
        yield Compared(out, want, *self.errors(out, weights_dtype or self.dtype))

    def errors(self, got: np.ndarray, weights_dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """Return each element's error, infinite for NaN, and the largest that is allowed.

        That is `tolerance`. Empty rows must be exactly zero, and padding may hold anything.
        """
        want, mean_abs = oracle(self)
        allowed = tolerance(self, want, mean_abs, weights_dtype) + self.rounding(want)
        error = np.nan_to_num(abs(got - want), nan=np.inf)
        is_zero, is_free = self.expected_rows()
        allowed[is_zero] = TINY
        error[is_free], allowed[is_free] = 0, np.inf
        return error, allowed


@functools.cache
def oracle(case: AttentionCase) -> tuple[np.ndarray, np.ndarray]:
    """Return `case.answer()`, computed once."""
    return case.answer()


def with_magnitudes(
    attend: Callable[[np.ndarray], np.ndarray], v_cache: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return attention's output for these values, and for their magnitudes."""
    return attend(v_cache), attend(np.abs(v_cache.astype(np.float32)))


def shaped(got: tuple[np.ndarray, ...], *want: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the answer's arrays in float64; raise `WrongResult` unless their shapes are right."""
    if [a.shape for a in got] != [a.shape for a in want]:
        got_shapes, want_shapes = (", ".join(str(a.shape) for a in each) for each in (got, want))
        raise WrongResult(f"the answer has shape {got_shapes or 'nothing'} and must have {want_shapes}")
    return tuple(a.astype(np.float64) for a in got)


def hostile_pool(
    case: AttentionCase,
    rng: np.random.Generator,
    seen: list[tuple[int, int]],
    stale: str,
    padding: str,
    shared_blocks: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make a pool of random K and V whose rows see only the positions [start, stop) of `seen`.

    Unseen slots, the null block and blocks without an owner hold NaN (int8: the largest number), or zero if
    stale is "zero". Table entries of unseen blocks are no block ids, or 0 if padding is "null". Blocks are
    shuffled. Rows 0 and 1 have their first `shared_blocks` blocks in common.

    Returns:
        caches: [2, num_blocks, block_size, num_kv_heads, head_dim], K and V in the cache's type.
        block_tables: [num_rows, max_blocks_per_seq] int32.
        live: [num_blocks, block_size], whether a row sees the slot.
    """
    dtype, block_size = DTYPES[case.cache_dtype or case.dtype], case.block_size
    width = -(-max(stop for _, stop in seen) // block_size) + 2
    num_blocks = 1 + len(seen) * width
    values = rng.standard_normal((2, num_blocks, block_size, case.num_kv_heads, case.head_dim))
    caches = np.stack([stored(values[which], which, case.scales, dtype) for which in (0, 1)])
    tables = 1 + rng.permutation(num_blocks - 1).reshape(len(seen), width)
    if shared_blocks:
        tables[1, :shared_blocks] = tables[0, :shared_blocks]
    live, columns = np.zeros((num_blocks, block_size), bool), np.arange(width)
    no_block = np.where(columns % 2, 2**30, -7)
    for row, (start, stop) in enumerate(seen):
        positions = np.arange(start, stop)
        live[tables[row, positions // block_size], positions % block_size] = True
        is_unseen = (columns < start // block_size) | (columns >= -(-stop // block_size))
        tables[row] = np.where(is_unseen, 0 if padding == "null" else no_block, tables[row])
    caches[:, ~live] = 0 if stale == "zero" else 127 if case.cache_dtype == "int8" else np.nan
    return caches, tables.astype(np.int32), live


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


def tolerance(case: AttentionCase, want: np.ndarray, mean_abs: np.ndarray, weights_dtype: str) -> np.ndarray:
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
