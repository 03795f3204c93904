"""Layouts of anybody's against the contract: what is written is what is read, and nothing else changes.

verify_layout(MyLayout())
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.research.verify import hints, quick
from jaxpaged.research.verify.oracles import attention as oracle
from pallas_kernels import layouts, ops
from pallas_kernels.layouts import BlockSlice, Layout, Pool, Sizes

BLOCK_SIZES = (4, 16, 1, 32, 64, 128)
HONEST = 16  # a stated tolerance is at most so many times the error
NUM_BLOCKS = 9
TOKENS_A_CALL = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """A pool of blocks for a layout."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # of the computation

    def __str__(self) -> str:
        return (
            f"block_size={self.block_size}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"{self.dtype}"
        )

    @property
    def sizes(self) -> Sizes:
        """Sizes of the pool."""
        return Sizes(NUM_BLOCKS, self.block_size, self.num_kv_heads, self.head_dim)


class Broken(Exception):
    """A rule of the contract is broken: one sentence."""


@dataclasses.dataclass(frozen=True)
class LayoutReport:
    """Results of a layout over its cases."""

    name: str
    passed: tuple[str, ...]  # cases
    broken: tuple[str, ...]  # a sentence a case
    error: float  # the largest, as a share of the largest number written
    tolerance: float | None
    bits: float  # a number, in the first case

    @property
    def ok(self) -> bool:
        """Whether something was verified, and no rule is broken."""
        return bool(self.passed) and not self.broken

    def __str__(self) -> str:
        stated = (
            "none stated: numbers must stay as they are"
            if self.tolerance is None
            else f"{self.tolerance:.3g}"
        )
        lines = [
            f"{self.name}: {len(self.passed)} cases passed, {len(self.broken)} failed",
            f"{self.bits:.4g} bits a number; largest error {self.error:.3g} of the largest number "
            f"(tolerance {stated})",
        ]
        if not self.passed and not self.broken:
            lines.append(f"nothing was verified: the layout has no blocks of {BLOCK_SIZES} tokens")
        return "\n".join([*lines, *(f"FAILED {each}" for each in self.broken)])


def cases_of(layout: Layout) -> list[Case]:
    """Return the cases that a layout has blocks for: two block sizes for each dtype."""
    cases = []
    for head_dim, dtype in ((16, "float32"), (64, "bfloat16")):
        fit = (size for size in BLOCK_SIZES if layout.why_not(size, head_dim, jnp.dtype(dtype)) is None)
        heads = (2, 1) if layout.why_not_heads(2) is None else (1, 1)
        for block_size, num_heads in zip(itertools.islice(fit, 2), heads, strict=False):
            cases.append(Case(block_size, num_heads, head_dim, dtype))
    return cases


def verify_layout(layout: Layout, *, name: str | None = None) -> LayoutReport:
    """Check a layout over its cases; each broken rule is one sentence."""
    passed, broken, errors = [], [], [0.0]
    cases = cases_of(layout)
    for case in cases:
        try:
            errors.append(check(layout, case))
        except Broken as error:
            broken.append(f"{case}: {error}")
        except Exception as error:  # an outsider's layout may raise anything
            broken.append(f"{case}: {hints.raised(error, 200)}")
        else:
            passed.append(str(case))
    bits = float("nan")
    if cases:
        block = cases[0].sizes[1:]
        try:
            bits = 8 * layout.block_bytes(*block, jnp.dtype(cases[0].dtype)) / (2 * np.prod(block))
        except Exception as error:  # as above; `check` has told it
            broken = broken or [str(error)]
    return LayoutReport(
        name or str(layout), tuple(passed), tuple(broken), max(errors), layout.tolerance, float(bits)
    )


def check(layout: Layout, case: Case) -> float:
    """Check one case. Return the error, as a share of the largest number written. Raises `Broken`."""
    dtype, sizes = jnp.dtype(case.dtype), case.sizes
    _check_value(layout)
    _check_arrays(layout, sizes, dtype)
    calls = history(sizes, dtype)
    pool = slice_of_three(layout, sizes, dtype)
    expected: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for number, (k, v, slots) in enumerate(calls):
        before = pool
        pool = _write(pool, *padded(k, v, slots))
        _check_untouched(before, pool, slots, f"call {number + 1} of write")
        expected |= {int(slot): (k[i], v[i]) for i, slot in enumerate(slots)}
    error = _check_numbers(layout, pool, expected)
    _check_copies(layout, pool, expected)
    _check_view(pool, expected)
    _check_attention(pool, expected)
    return error


def judged(layout: Layout, error: float) -> str | None:
    """Return why an error breaks what the layout states, or why the statement is not honest; None if neither.

    error: the largest, as a share of the largest number written.
    """
    stated = layout.tolerance
    if stated is None:
        if error == 0:
            return None
        return f"numbers change by up to {error:.3g} of the largest one, and it states no tolerance"
    if not error <= stated:
        return f"numbers change by up to {error:.3g} of the largest one, and tolerance = {stated:.3g}"
    if stated > HONEST * error:
        return (
            f"tolerance = {stated:.3g} is more than {HONEST} times the error of {error:.3g}: state less, or "
            "None where numbers stay as they are"
        )
    return None


def history(sizes: Sizes, dtype: jnp.dtype) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return writes of two sequences over shuffled blocks: pieces of a prompt, then a token of each in turn.

    Numbers are in the computation's dtype. Channels differ in size, as those of models do.
    """
    rng = np.random.default_rng(0)
    blocks = 1 + rng.permutation(sizes.num_blocks - 1)
    slots_of_sequence = [
        (block_ids[:, None] * sizes.block_size + np.arange(sizes.block_size)).reshape(-1)
        for block_ids in np.array_split(blocks, 2)
    ]
    whole = len(slots_of_sequence[0]) * 2 // 3
    places = [slots_of_sequence[0][i : min(i + TOKENS_A_CALL, whole)] for i in range(0, whole, TOKENS_A_CALL)]
    places.append(slots_of_sequence[1][:3])
    for a, b in zip(slots_of_sequence[1][3:20], slots_of_sequence[0][whole : whole + 17], strict=False):
        places.append(np.array([a, b]))
    channel = 1 + np.arange(sizes.head_dim) % 5

    def drawn(count: int) -> np.ndarray:
        return np.asarray(rng.standard_normal((count, *sizes[2:])) * channel + 1, dtype)

    return [(drawn(len(slots)), drawn(len(slots)), slots.astype(np.int32)) for slots in places]


def padded(k: np.ndarray, v: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill a call up with tokens for the null block, so that all calls have one shape."""
    missing = TOKENS_A_CALL - len(slots)
    k, v = (np.pad(x, ((0, missing), (0, 0), (0, 0)), constant_values=7) for x in (k, v))
    return k, v, np.pad(slots, (0, missing))


def slice_of_three(layout: Layout, sizes: Sizes, dtype: jnp.dtype) -> Pool:
    """Return the last of three layers whose blocks lie side by side, in arrays of NaN where they have it."""
    pool = layouts.create(layout, *sizes._replace(num_blocks=3 * sizes.num_blocks), dtype)
    layer_arrays = layout.arrays(*pool.sizes, dtype)
    arrays = {
        name: jnp.full_like(x, jnp.nan)
        if name in layer_arrays and jnp.issubdtype(x.dtype, jnp.floating)
        else x
        for name, x in pool.arrays.items()
    }
    blocks = BlockSlice(jnp.int32(2), stride=3, num_blocks=sizes.num_blocks)
    return dataclasses.replace(pool, arrays=arrays, blocks=blocks)


@functools.partial(quick.jit, static_argnums=())
def _write(pool: Pool, k: Any, v: Any, slots: Any) -> Pool:
    return ops.write(pool, k, v, slots)


def _read(pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """Return K and V of all blocks in float64, [num_blocks * block_size, num_kv_heads, head_dim]."""
    both = pool.read(jnp.arange(pool.num_blocks, dtype=jnp.int32), jnp.dtype("float32"))
    want = (pool.num_blocks, *pool.sizes[1:])
    for name, x in zip("KV", both, strict=True):
        if x.shape != want or x.dtype != jnp.float32:
            raise Broken(f"read gives {name} as {x.dtype}{list(x.shape)} and must give float32{list(want)}")
    k, v = (np.asarray(x, np.float64).reshape(-1, *want[2:]) for x in both)
    return k, v


def _check_value(layout: Layout) -> None:
    try:
        hash(layout)
    except TypeError as error:
        raise Broken(f"it must be hashable, for programs are compiled for it: {error}") from None


def _check_arrays(layout: Layout, sizes: Sizes, dtype: jnp.dtype) -> None:
    specs = layout.arrays(*sizes, dtype)
    num_bytes = 0
    for name, spec in specs.items():
        if not spec.shape or spec.shape[0] != sizes.num_blocks:
            raise Broken(
                f"array {name!r} of shape {spec.shape} must begin with num_blocks={sizes.num_blocks}"
            )
        num_bytes += int(np.prod(spec.shape)) * jnp.dtype(spec.dtype).itemsize
    block_bytes = layout.block_bytes(*sizes[1:], dtype)
    if block_bytes * sizes.num_blocks != num_bytes:
        raise Broken(
            f"block_bytes says {block_bytes} and must be {num_bytes / sizes.num_blocks:g}, as arrays has it"
        )


def _check_untouched(before: Pool, after: Pool, slots: np.ndarray, when: str) -> None:
    """Check that a write changes no array's form, and no block but those of its slots and the null block."""
    shared = before.layout.shared(before.sizes.num_kv_heads)
    if before.arrays.keys() != after.arrays.keys():
        raise Broken(f"write returns arrays {sorted(after.arrays)} and must return {sorted(before.arrays)}")
    written = {0, *(int(slot) // before.sizes.block_size for slot in slots)}
    stays = [block for block in range(before.num_blocks) if block not in written]
    others = [i for i in range(before.sizes.num_blocks) if i % 3 != 2]
    for name, old in before.arrays.items():
        new = after.arrays[name]
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise Broken(
                f"write returns {name!r} as {new.dtype}{list(new.shape)} and must return {old.dtype}"
                f"{list(old.shape)}"
            )
        if name in shared:
            continue
        same = _same_lines(np.asarray(old), np.asarray(new))
        if not all(same[others]):
            raise Broken(
                f"{when} changes {name!r} in another layer's block: it must use the slots' blocks alone"
            )
        for block in stays:
            if not same[2 + 3 * block]:
                raise Broken(
                    f"{when}, to slots {slots.tolist()}, changes {name!r} in block {block}, and must not"
                )


def _same_lines(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return whether each line of two arrays has the same numbers, one NaN being like another."""
    if jnp.issubdtype(old.dtype, jnp.floating):
        old, new = (x.astype(np.float32) for x in (old, new))
        same = (old == new) | (np.isnan(old) & np.isnan(new))
    else:
        same = old == new
    return same.reshape(len(old), -1).all(axis=1)


def _check_numbers(layout: Layout, pool: Pool, expected: dict[int, tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the largest error as a share of the largest number. Raise `Broken` for one that is too large."""
    largest = max(float(np.abs(np.asarray(x, np.float64)).max()) for pair in expected.values() for x in pair)
    allowed = (layout.tolerance or 0.0) * largest
    worst = 0.0
    for which, got in enumerate(_read(pool)):
        for slot, pair in expected.items():
            want = np.asarray(pair[which], np.float64)
            error = np.abs(got[slot] - want)
            error = np.where(np.isnan(error), np.inf, error)
            worst = max(worst, float(error.max()))
            if worst > allowed:
                head, channel = np.unravel_index(np.argmax(error), error.shape)
                block, offset = divmod(slot, pool.sizes.block_size)
                raise Broken(
                    f"{'KV'[which]} of slot {slot} (block {block}, offset {offset}), head {head}, channel "
                    f"{channel} reads {got[slot][head, channel]:.6g} and must be {want[head, channel]:.6g}"
                    + (f", to within {allowed:.3g}" if allowed else "")
                )
    if problem := judged(layout, worst / largest):
        raise Broken(problem)
    return worst / largest


def _check_copies(layout: Layout, pool: Pool, expected: dict[int, tuple[np.ndarray, np.ndarray]]) -> None:
    """Check that a copy of all lines of a block reads as the block does."""
    shared = layout.shared(pool.sizes.num_kv_heads)
    source = next(iter(expected)) // pool.sizes.block_size
    target = 1 + source % (pool.num_blocks - 1)
    arrays = {
        name: x if name in shared else x.at[2 + 3 * target].set(x[2 + 3 * source])
        for name, x in pool.arrays.items()
    }
    size = pool.sizes.block_size
    for name, x in zip("KV", _read(dataclasses.replace(pool, arrays=arrays)), strict=True):
        for offset in range(size):
            slots = source * size + offset, target * size + offset
            if slots[0] in expected and not np.array_equal(x[slots[0]], x[slots[1]]):
                raise Broken(
                    f"a copy of block {source} to block {target} reads another {name} at offset {offset}: "
                    "all of a block must be in its line of each array"
                )


def _check_view(pool: Pool, expected: dict[int, tuple[np.ndarray, np.ndarray]]) -> None:
    """Check that the view, by which kernels read, finds the numbers that `read` returns."""
    view = pool.layout.view()
    if view is None:
        return
    by_read = _read(pool)
    scales = pool.scales
    places = ((view.k, view.k_scale), (view.v, view.v_scale))
    for which, (location, of_scale) in enumerate(places):
        for slot in expected:
            block, token = divmod(slot, pool.sizes.block_size)
            at = int(pool.array_blocks(jnp.int32(block)))
            for head in range(pool.sizes.num_kv_heads):
                numbers = pool.arrays[location.array][location.at(at, token, head)]
                if view.numbers is not None:
                    numbers = jax.lax.bitcast_convert_type(numbers, view.numbers)
                got = np.asarray(numbers.astype(jnp.float32))
                if of_scale is not None:
                    got = got * np.float32(pool.arrays[of_scale.array][of_scale.at(at, token, head)])
                elif scales is not None:
                    got = got * np.float32(scales[which][head])
                want = by_read[which][slot, head]
                if got.shape != want.shape or not np.allclose(got, want, rtol=1e-5, atol=1e-6):
                    raise Broken(
                        f"view finds other numbers than read for {'KV'[which]} of slot {slot}, head {head}: "
                        f"{np.ravel(got)[:2]} and {want[:2]}"
                    )


def _check_attention(pool: Pool, expected: dict[int, tuple[np.ndarray, np.ndarray]]) -> None:
    """Check that attention over the blocks is that of the numbers read; NaN in unseen slots must not show."""
    size = pool.sizes.block_size
    first = next(iter(expected)) // size
    count = sum(first * size + offset in expected for offset in range(size))
    q = np.random.default_rng(1).standard_normal((1, pool.sizes.num_kv_heads, pool.sizes.head_dim))
    tables, lens = np.array([[first]], np.int32), np.array([max(count, 1)], np.int32)
    k, v = (x.reshape(pool.num_blocks, *pool.sizes[1:]) for x in _read(pool))
    got = ops.paged_attention(
        jnp.asarray(q, jnp.float32), pool, None, jnp.asarray(tables), jnp.asarray(lens), implementation="xla"
    )
    want = oracle.paged_attention(q, k, v, tables, lens)
    if not np.allclose(np.asarray(got), want, rtol=1e-4, atol=1e-4):
        raise Broken(
            f"attention over the {count} tokens of block {first} differs from that of the numbers read by "
            f"{np.abs(np.asarray(got) - want).max():.3g}"
        )


def problems(layout: Layout, check_one: Callable[[Layout, Case], float] = check) -> Iterator[str]:
    """Yield the broken rules of a layout, a sentence each."""
    for case in cases_of(layout):
        try:
            check_one(layout, case)
        except Broken as error:
            yield f"{case}: {error}"
