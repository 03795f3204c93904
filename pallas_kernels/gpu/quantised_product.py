"""Products of few rows with weights of 8, 6 or 4 bits on GPUs since Ampere; of a weight only codes and scales
are read.

    y[row, o] = sum over groups g of  scale[g, o] * (sum over i in g of x[row, i] * code[o, i])
                                    + minimum[g, o] * (sum over i in g of x[row, i])

A program has 64 outputs and a range of the inputs, and two Pallas threads (warpgroups), as in decode
attention. The producer's warps fetch codes, rows, scales and minima, a warp each, into a ring of slots of 128
inputs; the consumer multiplies. The product is transposed, so that outputs fill the 64 rows of a wgmma, or of
four warps' mma.sync where there is none. Its columns, independent of each other, are the rows of x, padded to
a multiple of 8:

    y^T [64, rows] = codes [64, inputs] @ x^T [inputs, rows]

A halfword has 2 or 4 codes, of as many runs of 32 inputs, or of 16 if groups have no more. Codes of 6 bits
have 4 bits in one halfword and 2 in another (`quantised.Halfwords`). Registers hold halfwords as a wgmma's
operand lies. Shifts and masks turn them into the codes of one run, as bfloat16, which holds each exactly.
(Pallas' interpreter cannot multiply from registers: there they go through shared memory.) The tensor cores
sum over a run, in float32; scales are factors of that sum. The sums of rows that minima need are products
with ones.

The ranges of inputs (split-K) follow from the weight's shape, so a row's bits depend neither on other rows
nor on their number. Each program writes its sums in float32; XLA adds them up.

Not for: rows in another type than bfloat16, more than 256 rows, other groups than `GROUP_SIZES` (`why_not`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, cp_async, targets, tuning
from pallas_kernels.gpu.common import WGMMA
from pallas_kernels.gpu.primitives import Primitives
from pallas_kernels.quantised import NUM_INPUTS, NUM_OUTPUTS, PLANES, Halfwords, offset

MAX_COLUMNS = 64
MAX_ROWS = (
    256  # in blocks of MAX_COLUMNS; codes are fetched for each block, still a quarter of what XLA moves
)
GROUP_SIZES = (16, 32, 64, 128)
MIN_STEPS = 4  # steps of a program, at least, if inputs are split
PROGRAMS = 2 * tuning.H200_CORES  # to split inputs for, on any GPU: so bits are the same on all
MAX_STAGES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(Primitives):
    """Static shape of a product, and the sizes derived from it."""

    num_rows: int  # rows of x, in whole blocks
    num_columns: int  # rows of a block, a multiple of 8: the columns of a wgmma
    num_outputs: int
    num_inputs: int
    bits: int
    is_float: bool  # codes are of the type e4m3
    run: int  # neighbouring inputs that are multiplied at a time
    group_size: int
    scale_dtype: Any
    has_minima: bool
    program_bytes: int  # of shared memory, at most

    @property
    def by_memory(self) -> bool:
        """Whether codes go to their product through shared memory."""
        return self.is_interpreted and self.has_wgmma

    @property
    def halfwords(self) -> int:
        """The halfwords of an output in a slot."""
        return NUM_INPUTS * self.bits // 16

    @property
    def groups(self) -> int:
        """The groups of an output in a slot."""
        return NUM_INPUTS // self.group_size

    @property
    def at_a_time(self) -> int:
        """The runs whose products are under way together: as many as a thread has registers for, and at least
        32 inputs, else ptxas unrolls the loop over a slot.
        """
        return max(32 // self.run, min(4, 64 // (self.num_columns * (1 + self.has_minima))))

    @property
    def num_tiles(self) -> int:
        return self.num_outputs // NUM_OUTPUTS

    @property
    def num_steps(self) -> int:
        """The steps over the inputs, of all programs with the same outputs together."""
        return self.num_inputs // NUM_INPUTS

    @property
    def num_splits(self) -> int:
        """The programs with the same outputs, which split the inputs."""
        return max(1, min(PROGRAMS // self.num_tiles, self.num_steps // MIN_STEPS))

    @property
    def num_stages(self) -> int:
        """The slots: so many that two programs share a multiprocessor's memory, if each then has two."""
        scales = (1 + self.has_minima) * self.groups * NUM_OUTPUTS * jnp.dtype(self.scale_dtype).itemsize
        slot = NUM_OUTPUTS * NUM_INPUTS * self.bits // 8 + self.num_columns * NUM_INPUTS * 2 + scales
        rounding = 4096 if self.has_tma else 5120  # arrays begin at multiples of 1,024; barriers are one
        shared, alone = ((self.program_bytes // n - rounding) // slot for n in (2, 1))
        return min(MAX_STAGES, shared if shared >= 2 else alone)

    @property
    def in_runs(self) -> tuple[Any, ...]:
        """The transforms of codes and of rows in shared memory."""
        transforms: tuple[Any, ...] = common.tiled(self.run)
        return transforms


class Operands(NamedTuple):
    """The arrays to multiply: in the GPU's memory, or in the ring in shared memory."""

    codes: Any  # [num_layers, num_outputs, halfwords]; in the ring [num_stages, NUM_OUTPUTS, halfwords]
    x: Any  # [num_rows, num_inputs]; [num_stages, num_columns, NUM_INPUTS]
    scales: Any  # [num_layers, num_groups, num_outputs]; [num_stages, groups, NUM_OUTPUTS]
    minima: Any  # as scales, or None


NUM_TILED = 2  # of `Operands`, codes and x, lie in tiles


class Scratch(NamedTuple):
    """Shared memory and barriers of one program."""

    ring: Operands
    wide: Any  # [terms, NUM_OUTPUTS, run] what is multiplied together, else None
    full: Any  # [num_stages], an arrival per copy
    free: Any  # [num_stages]


def scratch_types(p: Problem) -> Scratch:
    """Return the types of `Scratch`, for plgpu.kernel."""
    in_runs, slots = p.in_runs, p.num_stages
    scales = plgpu.SMEM((slots, p.groups, NUM_OUTPUTS), p.scale_dtype)
    terms = p.at_a_time * (1 + p.has_minima)
    wide = plgpu.SMEM((terms, NUM_OUTPUTS, p.run), jnp.bfloat16, transforms=in_runs)
    return Scratch(
        ring=Operands(
            codes=plgpu.SMEM((slots, NUM_OUTPUTS, p.halfwords), jnp.uint16, transforms=in_runs),
            x=plgpu.SMEM((slots, p.num_columns, NUM_INPUTS), jnp.bfloat16, transforms=in_runs),
            scales=scales,
            minima=scales if p.has_minima else None,
        ),
        wide=wide if p.by_memory else None,
        full=p.barrier(3 + p.has_minima, slots, of_copies=True),
        free=p.barrier(1, slots),
    )


def _kernel(layer: Any, gmem: Operands, out: Any, scratch: Scratch, *, problem: Problem) -> None:
    """Compute 64 outputs for a block of rows, over a range of the inputs."""
    p = problem
    scratch = p.ready(scratch_types(p), scratch)
    tile, split = lax.axis_index("tile"), lax.axis_index("split")
    outputs = pl.ds(tile * NUM_OUTPUTS, NUM_OUTPUTS)
    rows = pl.ds(lax.axis_index("block") * p.num_columns, p.num_columns)
    first, end = (lax.div(i * p.num_steps, jnp.int32(p.num_splits)) for i in (split, split + 1))
    thread = lax.axis_index("thread")

    @pl.when(thread == 1)
    def _producer() -> None:
        @plgpu.warp_map
        def _fetch(warp: jax.Array) -> None:
            _produce(p, layer[0], outputs, rows, first, end - first, gmem, scratch, warp)

    @pl.when(thread == 0)
    def _consumer() -> None:
        total = plgpu.layout_cast(jnp.full((NUM_OUTPUTS, p.num_columns), 0.0, jnp.float32), WGMMA)
        total = lax.fori_loop(0, end - first, functools.partial(_consume, p, scratch), total)
        common.store(out.at[split, outputs, rows], total)


def _produce(
    p: Problem,
    layer: jax.Array,
    outputs: Any,
    rows: Any,
    first: jax.Array,
    num_steps: jax.Array,
    gmem: Operands,
    scratch: Scratch,
    warp: jax.Array,
) -> None:
    """Fetch this warp's copies of each step."""

    def fetch(i: jax.Array, slot: jax.Array) -> None:
        step = first + i
        groups = pl.ds(step * p.groups, p.groups)
        sources = Operands(
            codes=gmem.codes.at[layer, outputs, pl.ds(step * p.halfwords, p.halfwords)],
            x=gmem.x.at[rows, pl.ds(step * NUM_INPUTS, NUM_INPUTS)],
            scales=gmem.scales.at[layer, groups, outputs],
            minima=gmem.minima.at[layer, groups, outputs] if p.has_minima else None,
        )
        for number, (source, target) in enumerate(zip(sources, scratch.ring, strict=True)):
            if source is not None:
                copy = p.copier(p.in_runs if number < NUM_TILED else ())

                @pl.when(warp == number)
                def _copy(source: Any = source, target: Any = target, copy: Any = copy) -> None:
                    copy(source, target.at[slot], scratch.full.at[slot])

    p.fill_ring(scratch.free, p.num_stages, num_steps, fetch)


def _consume(p: Problem, scratch: Scratch, i: jax.Array, total: jax.Array) -> jax.Array:
    """Add the products of a slot to the sums."""
    slot = lax.rem(i, jnp.int32(p.num_stages))
    p.waiter(p.num_stages, i)(scratch.full.at[slot])
    codes, x, scales, minima = (None if ring is None else ring.at[slot] for ring in scratch.ring)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        runs = [i * p.at_a_time + k for k in range(p.at_a_time)]
        terms = [_Term(_numbers(p, codes, run), run, scales) for run in runs]
        if minima is not None:
            ones = plgpu.layout_cast(jnp.full((NUM_OUTPUTS, p.run), 1.0, jnp.bfloat16), WGMMA)
            terms = [each for term in terms for each in (term, _Term(ones, term.run, minima))]
        return _add(p, total, terms, x, scratch.wide)

    # A loop, because ptxas would keep the products of an unrolled one in registers.
    total = lax.fori_loop(0, NUM_INPUTS // (p.run * p.at_a_time), add, total)
    if not p.has_wgmma:  # warps read x by themselves: all must have, before others come
        p.commit_smem()
    p.barrier_arrive(scratch.free.at[slot])
    return total


class _Term(NamedTuple):
    """The numbers to multiply with a run of x, and the factors of the product."""

    numbers: jax.Array  # [NUM_OUTPUTS, run]
    run: jax.Array
    factors: Any  # [groups, NUM_OUTPUTS]


def _numbers(p: Problem, halfwords: Any, run: jax.Array) -> jax.Array:
    """Return the codes of a slot's run as bfloat16 [NUM_OUTPUTS, run].

    No conversion is needed: the lower seven bits of a bfloat16 between 128 and 255 count ones, and the eighth
    adds 128. In a bfloat16 that is 16 times as large they count sixteens.
    """

    def number(bits: jax.Array, mask: int, unit: int = 0) -> jax.Array:
        size = (bits & jnp.uint16(mask)) | jnp.uint16(0x4300 + (unit << 7))
        return lax.bitcast_convert_type(size, jnp.bfloat16)

    if p.is_float:
        bits, place = _halfwords(p, halfwords, run, 8)
        return _float(lax.shift_left(bits, jnp.full_like(bits, (8 - place * 8).astype(bits.dtype))))

    def plane(bits: int, start: int = 0) -> jax.Array:
        bits_of_run, place = _halfwords(p, halfwords, run, bits, start)
        return lax.shift_right_logical(
            bits_of_run, jnp.full_like(bits_of_run, (place * bits).astype(bits_of_run.dtype))
        )

    if p.bits == 8:  # signed: less 128 or 256, which is what the eighth bit makes of 128
        bits = plane(8)
        return number(bits, 127) - number(bits, 128)
    less = 128 if p.has_minima else 128 + offset(p.bits)
    if p.bits == 4:
        return number(plane(4), 15) - jnp.bfloat16(less)
    upper = number(plane(2, start=NUM_INPUTS * 4 // 16), 3, unit=4)
    return number(plane(4), 15) + (upper - jnp.bfloat16(less + (128 << 4)))


def _halfwords(
    p: Problem, halfwords: Any, run: jax.Array, bits: int, start: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Return the halfwords that hold these bits of a run's codes, and the run's index in them.

    start: the first halfword of the plane of these bits.
    """
    runs = jnp.int32(16 // bits)
    part, place = lax.div(run, runs), lax.rem(run, runs)
    columns = pl.ds(start + part * p.run if start else part * p.run, p.run)
    return plgpu.load(halfwords.at[:, columns], layout=WGMMA, optimized=False), place


def _float(bits: jax.Array) -> jax.Array:
    """Return the e4m3 numbers in the upper bytes as bfloat16.

    Shifted, exponent and mantissa lie as bfloat16's; its exponent is greater by 120. Below the least normal
    number, 2^-6, e4m3 has no leading one and the exponent is not less by one. There, twice what was read less
    2^-6 is right; elsewhere that is not below what was read, so the minimum of both is right everywhere.
    """
    size = lax.shift_right_logical(bits & jnp.uint16(0x7F00), jnp.full_like(bits, 4)) + jnp.uint16(120 << 7)
    number = lax.bitcast_convert_type(size, jnp.bfloat16)
    number = jnp.minimum(number, number + number - jnp.bfloat16(2**-6))
    signed = lax.bitcast_convert_type(number, jnp.uint16) | (bits & jnp.uint16(0x8000))
    return lax.bitcast_convert_type(signed, jnp.bfloat16)


def _add(p: Problem, total: jax.Array, terms: list[_Term], x: Any, wide: Any) -> jax.Array:
    """Add terms to the sums one after the other, in that order, whatever is under way together."""
    if p.by_memory:
        for k, term in enumerate(terms):
            wide[k] = term.numbers
        plgpu.commit_smem()

    def run_of_x(term: _Term) -> Any:
        return x.at[:, pl.ds(term.run * p.run, p.run)].T

    def multiply(*accumulators: Any) -> tuple[jax.Array, ...]:
        for k, (acc, term) in enumerate(zip(accumulators, terms, strict=True)):
            plgpu.wgmma(acc, wide.at[k] if p.by_memory else term.numbers, run_of_x(term))
        return tuple(acc[...] for acc in accumulators)

    shape = NUM_OUTPUTS, p.num_columns
    if p.has_wgmma:
        products = pl.run_scoped(multiply, *[plgpu.ACC(shape, jnp.float32)] * len(terms))
    else:
        products = [common.product(term.numbers, run_of_x(term), shape, p.multiply) for term in terms]
    for product, term in zip(products, terms, strict=True):
        group = lax.div(term.run * p.run, jnp.int32(p.group_size))
        factor = plgpu.load(term.factors.at[group], layout=WGMMA.reduce(1), optimized=False)
        total = total + product * lax.broadcast_in_dim(factor.astype(jnp.float32), shape, [0])
    return total


def why_not(dtype: jnp.dtype, bits: int, group_size: int, *, is_float: bool) -> str | None:
    """Return the rule that such a weight, or rows of that dtype, break; None if they break none."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return "rows must be bfloat16"
    if bits not in PLANES or (is_float and bits != 8):
        return "codes must be integers of 8, 6 or 4 bits, or floats of 8"
    sizes = GROUP_SIZES[:1] if bits == 6 else GROUP_SIZES
    if group_size not in sizes:
        return f"a group must have {', '.join(map(str, sizes))} inputs"
    return None


def product(
    x: jax.Array, weight: Halfwords, layer: int | jax.Array | None = None, *, interpret: Any = False
) -> jax.Array:
    """Compute `x @ weight.T` in float32, for at most MAX_ROWS rows in bfloat16.

    layer: which weight of a stack; None if there is no stack.
    interpret: bool or plgpu.InterpretGPUParams.
    """
    num_rows, target = x.shape[0], targets.compiled_for()
    stack = weight if layer is not None else jax.tree.map(lambda a: a[None], weight)
    columns = min(tuning.num_columns(num_rows), MAX_COLUMNS)
    p = Problem(
        num_rows=-(-num_rows // columns) * columns,
        num_columns=columns,
        num_outputs=stack.codes.shape[-2],
        num_inputs=stack.in_features,
        bits=stack.bits,
        is_float=stack.is_float,
        run=stack.run,
        group_size=stack.group_size,
        scale_dtype=stack.scales.dtype,
        has_minima=stack.minima is not None,
        program_bytes=target.program_bytes,
        is_interpreted=bool(interpret),
        **Problem.fields_of(target),
    )
    x = jnp.pad(x, ((0, p.num_rows - num_rows), (0, p.num_inputs - x.shape[1])))
    run = common.kernel_of(_kernel_of, p, interpret=interpret)
    number = jnp.full((1,), 0 if layer is None else layer, jnp.int32)
    sums = run(number, Operands(stack.codes, x, stack.scales, stack.minima))
    return jnp.sum(sums, axis=0).T[:num_rows, : stack.out_features]


def _kernel_of(p: Problem, interpret: Any) -> Callable[..., jax.Array]:
    """Return a function (layer, operands) -> sums [num_splits, num_outputs, num_rows]."""

    def quantised_product_kernel(*refs: Any) -> None:
        _kernel(*refs, problem=p)

    kernel: Callable[..., jax.Array] = plgpu.kernel(
        quantised_product_kernel,
        out_type=jax.ShapeDtypeStruct((p.num_splits, p.num_outputs, p.num_rows), jnp.float32),
        grid=(p.num_rows // p.num_columns, p.num_tiles, p.num_splits),
        grid_names=("block", "tile", "split"),
        num_threads=2,
        thread_name="thread",
        scratch_types=[cp_async.memory_of(scratch_types(p))],
        interpret=common.interpret_params(interpret),
    )
    return kernel
