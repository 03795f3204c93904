"""Products with a layer's weights on GPUs since Ampere; the kernel reads its layer from a stack of weights.

    y[row, o] = sum over i of  x[row, i] * weights[layer, i, o]

So a loop over layers, or over experts, copies no weights: XLA's own products take a whole array.

A program has 128 outputs, up to 256 rows (128 by mma.sync) and a range of the inputs, and three Pallas
threads (warpgroups). The producer's warps fetch weights and rows, with 64 inputs, into a ring of slots; two
consumers multiply, 64 outputs each. The product is transposed, so that outputs fill the 64 rows of a wgmma,
or of four warps' mma.sync where there is none. Its columns, independent of each other, are the rows of x,
padded to a multiple of 8:

    y^T [64, rows] = weights^T [64, inputs] @ x^T [inputs, rows]

wgmma reads weights as they lie, and sums stay in registers. They are written transposed back, 8 neighbouring
outputs, 32 bytes, at a time. Blocks of rows are neighbours in the grid, so that weights are fetched from
memory for one of them. TMA's copies fill what lies past an array's end with zeros; where there is none,
weights end with a whole piece of each.

The ranges of inputs (split-K) follow from the weights' shape, so a row's bits depend neither on other rows
nor on their number. Each program writes its sums in float32; XLA adds those of the ranges, one after the
other.

Floor: the weights' bytes over 4.8 TB/s for few rows; for many 2 * rows * inputs * outputs over 790 TFLOP/s. A
    slot of 256 rows is 48 KB, for which tensor cores take 1,024 cycles. The second-level cache would have to
    give 48 bytes a cycle and multiprocessor, more than it has, so some 600 TFLOP/s are the most. Clusters,
    whose programs share what they fetch, would halve that.

Not for: float32; sizes that are not multiples of 8, or of 64 where there is no TMA (`why_not`).
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gpu import common, cp_async, targets, tuning
from pallas_kernels.gpu.common import WGMMA
from pallas_kernels.gpu.primitives import Primitives
from pallas_kernels.gpu.targets import Target

DTYPES = ("bfloat16", "float16")
NUM_CONSUMERS = 2
NUM_OUTPUTS = 64  # outputs of a consumer: the rows of a wgmma
NUM_INPUTS = 64  # inputs of a slot: 128 bytes, the width of a swizzle
MAX_COLUMNS = 256  # of a wgmma
MAX_MMA_COLUMNS, MMA_INPUTS = 128, 16  # of mma.sync, and inputs whose numbers are in registers at a time
UNIT = 8  # numbers: an array's rows must begin where TMA can, every 16 bytes
MIN_STEPS = 4  # steps of a program, at least, if inputs are split
PROGRAMS = tuning.H200_CORES  # to split inputs for, on any GPU: so bits are the same on all
MAX_STAGES = 8
TILED = common.tiled(NUM_OUTPUTS)  # the transforms of weights in shared memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(Primitives):
    """Static shape of a product, and the sizes derived from it."""

    num_blocks: int  # of rows
    num_columns: int  # rows of a block, a multiple of 8: the columns of a wgmma
    num_inputs: int
    num_outputs: int
    dtype: jnp.dtype
    program_bytes: int  # of shared memory, at most

    @property
    def num_rows(self) -> int:
        """The rows of x, in whole blocks."""
        return self.num_blocks * self.num_columns

    @property
    def num_pieces(self) -> int:
        """The pieces of NUM_OUTPUTS outputs, one for a consumer each."""
        return pl.cdiv(self.num_outputs, NUM_OUTPUTS)

    @property
    def num_tiles(self) -> int:
        """The tiles of outputs, one for a program each."""
        return pl.cdiv(self.num_pieces, NUM_CONSUMERS)

    @property
    def num_steps(self) -> int:
        """The steps over the inputs, of all programs with the same outputs together."""
        return pl.cdiv(self.num_inputs, NUM_INPUTS)

    @property
    def num_splits(self) -> int:
        """The programs with the same outputs and rows, which split the inputs."""
        return max(1, min(PROGRAMS // self.num_tiles, self.num_steps // MIN_STEPS))

    @property
    def num_stages(self) -> int:
        """The slots: so many that two programs share a multiprocessor's memory, if each then has four or
        more.
        """
        slot = (NUM_CONSUMERS * NUM_OUTPUTS + self.num_columns) * NUM_INPUTS * self.dtype.itemsize
        rounding = 2048 if self.has_tma else 3072  # without TMA barriers are an array, too
        shared, alone = ((self.program_bytes // n - rounding) // slot for n in (2, 1))
        return min(MAX_STAGES, shared if shared >= 4 else alone)

    @property
    def tiles_of_x(self) -> tuple[Any, ...]:
        """The transforms of rows in shared memory; of a slot mma.sync takes a part at a time."""
        transforms: tuple[Any, ...] = common.tiled(NUM_INPUTS, NUM_INPUTS if self.has_wgmma else MMA_INPUTS)
        return transforms


def problem(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: jnp.dtype, *, is_interpreted: bool = False
) -> Problem:
    """Return the problem of so many rows, in as few equal blocks as are enough."""
    target = targets.compiled_for()
    max_columns = MAX_COLUMNS if target.kernel_multiply == "wgmma" else MAX_MMA_COLUMNS
    num_blocks = pl.cdiv(num_rows, max_columns)
    return Problem(
        num_blocks=num_blocks,
        num_columns=tuning.num_columns(pl.cdiv(num_rows, num_blocks)),
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        dtype=jnp.dtype(dtype),
        program_bytes=target.program_bytes,
        is_interpreted=is_interpreted,
        **Problem.fields_of(target),
    )


class Scratch(NamedTuple):
    """Shared memory and barriers of one program."""

    weights: Any  # [num_stages, NUM_CONSUMERS, NUM_INPUTS, NUM_OUTPUTS]
    x: Any  # [num_stages, num_columns, NUM_INPUTS]
    full: Any  # [num_stages], an arrival per copy
    free: Any  # [num_stages], an arrival per consumer


def scratch_types(p: Problem) -> Scratch:
    """Return the types of `Scratch`, for plgpu.kernel."""
    slots, weights = p.num_stages, (p.num_stages, NUM_CONSUMERS, NUM_INPUTS, NUM_OUTPUTS)
    return Scratch(
        weights=plgpu.SMEM(weights, p.dtype, transforms=TILED),
        x=plgpu.SMEM((slots, p.num_columns, NUM_INPUTS), p.dtype, transforms=p.tiles_of_x),
        full=p.barrier(NUM_CONSUMERS + 1, slots, of_copies=True),
        free=p.barrier(NUM_CONSUMERS, slots),
    )


class Work(NamedTuple):
    """The outputs, rows and inputs that a program multiplies."""

    tile: jax.Array  # of outputs
    rows: Any
    first: jax.Array  # step of the program
    num_steps: jax.Array


def _kernel(
    layer: Any,  # [1]
    weights: Any,  # [num_layers, num_inputs, num_outputs]
    x: Any,  # [num_rows, num_inputs]
    out: Any,  # [num_splits, num_rows, num_pieces * NUM_OUTPUTS]
    scratch: Scratch,
    *,
    problem: Problem,
) -> None:
    """Compute a tile of outputs for a block of rows, over a range of the inputs."""
    p = problem
    scratch = p.ready(scratch_types(p), scratch)
    split, tile = lax.axis_index("split"), lax.axis_index("tile")
    rows = pl.ds(lax.axis_index("block") * p.num_columns, p.num_columns)
    first, end = (lax.div(i * p.num_steps, jnp.int32(p.num_splits)) for i in (split, split + 1))
    work = Work(tile, rows, first, end - first)
    thread = lax.axis_index("thread")

    @pl.when(thread == NUM_CONSUMERS)
    def _producer() -> None:
        @plgpu.warp_map
        def _fetch(warp: jax.Array) -> None:
            _produce(p, work, weights.at[layer[0]], x, scratch, warp)

    @pl.when(thread < NUM_CONSUMERS)
    def _consumer() -> None:
        consume = functools.partial(_consume, p, work.num_steps, scratch, thread)
        if p.has_wgmma:
            sums = pl.run_scoped(consume, plgpu.ACC((NUM_OUTPUTS, p.num_columns), jnp.float32))
        else:
            sums = _consume_by_mma(p, work.num_steps, scratch, thread)
        piece = tile * NUM_CONSUMERS + thread

        @pl.when(piece < p.num_pieces)
        def _store() -> None:
            # In this layout a thread's registers hold two neighbouring outputs, not two neighbouring rows.
            turned = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED)
            common.store(out.at[split, rows, pl.ds(piece * NUM_OUTPUTS, NUM_OUTPUTS)].T, turned)


def _produce(p: Problem, work: Work, weights: Any, x: Any, scratch: Scratch, warp: jax.Array) -> None:
    """Fetch this warp's copies of each step: a consumer's weights, or rows."""

    def fetch(i: jax.Array, slot: jax.Array) -> None:
        full = scratch.full.at[slot]
        inputs = pl.ds((work.first + i) * NUM_INPUTS, NUM_INPUTS)
        for consumer in range(NUM_CONSUMERS):

            @pl.when(warp == consumer)
            def _fetch_weights(consumer: int = consumer) -> None:
                piece = work.tile * NUM_CONSUMERS + consumer
                if not p.has_tma:  # past the end: the last piece again, which is not stored
                    piece = jnp.minimum(piece, p.num_pieces - 1)
                outputs = pl.ds(piece * NUM_OUTPUTS, NUM_OUTPUTS)
                target = scratch.weights.at[slot, consumer]
                p.copier(TILED)(weights.at[inputs, outputs], target, full)

        @pl.when(warp == NUM_CONSUMERS)
        def _fetch_rows() -> None:
            p.copier(p.tiles_of_x)(x.at[work.rows, inputs], scratch.x.at[slot], full)

    p.fill_ring(scratch.free, p.num_stages, work.num_steps, fetch)


def _consume(p: Problem, num_steps: jax.Array, scratch: Scratch, consumer: jax.Array, acc: Any) -> jax.Array:
    """Add up the products of all steps, [NUM_OUTPUTS, num_columns] float32."""

    def add(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, jnp.int32(p.num_stages))
        plgpu.barrier_wait(scratch.full.at[slot])
        plgpu.wgmma(acc, scratch.weights.at[slot, consumer].T, scratch.x.at[slot].T)
        plgpu.wgmma_wait(0)  # before the slot is filled again; the other consumer's products go on
        plgpu.barrier_arrive(scratch.free.at[slot])

    lax.fori_loop(0, num_steps, add, None)
    sums: jax.Array = acc[...]
    return sums


def _consume_by_mma(p: Problem, num_steps: jax.Array, scratch: Scratch, consumer: jax.Array) -> jax.Array:
    """Compute `_consume`, by mma.sync."""
    shape = NUM_OUTPUTS, p.num_columns

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        slot = lax.rem(i, jnp.int32(p.num_stages))
        p.waiter(p.num_stages, i)(scratch.full.at[slot])
        weights, x = scratch.weights.at[slot, consumer].T, scratch.x.at[slot].T
        sums = common.product(weights, x, shape, p.multiply, sums, depth=MMA_INPUTS)
        p.commit_smem()  # warps read the slot by themselves: all must have, before others come
        p.barrier_arrive(scratch.free.at[slot])
        return sums

    sums: jax.Array = lax.fori_loop(
        0, num_steps, add, plgpu.layout_cast(jnp.zeros(shape, jnp.float32), WGMMA)
    )
    return sums


def _unit(target: Target) -> int:
    """Return the number that a target requires inputs and outputs to be multiples of."""
    return UNIT if target.fetch == "tma" else NUM_INPUTS


def why_not(dtype: jnp.dtype, num_inputs: int, num_outputs: int) -> str | None:
    """Return the rule that rows of that dtype, or weights of these sizes, break; None if they break none."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"rows and weights must be {' or '.join(DTYPES)}"
    unit = _unit(targets.compiled_for())
    for name, size, least in (("inputs", num_inputs, NUM_INPUTS), ("outputs", num_outputs, NUM_OUTPUTS)):
        if size % unit or size < least:
            return f"{size} {name} must be a multiple of {unit}, {least} or more"
    return None


def pack[A: jax.Array | np.ndarray](weight: A) -> A:
    """Transpose a weight [num_outputs, num_inputs], and pad it with zeros to sizes that are served."""
    least, unit = (NUM_OUTPUTS, NUM_INPUTS), _unit(targets.compiled_for())
    missing = [
        (0, max(n, pl.cdiv(size, unit) * unit) - size) for size, n in zip(weight.shape, least, strict=True)
    ]
    whole: Any = weight
    if any(after for _, after in missing):
        whole = np.pad(weight, missing) if isinstance(weight, np.ndarray) else jnp.pad(weight, missing)
    turned: A = whole.T
    return turned


def packed_product(
    x: jax.Array, packed: jax.Array, num_outputs: int, layer: int | jax.Array | None = None
) -> jax.Array:
    """Compute `product` with a packed weight of so many outputs, or with a layer of a stack of them."""
    x = jnp.pad(x, ((0, 0), (0, packed.shape[-2] - x.shape[1])))
    return product(x, packed, layer)[:, :num_outputs]


def product(
    x: jax.Array, weights: jax.Array, layer: int | jax.Array | None = None, *, interpret: Any = False
) -> jax.Array:
    """Compute `x @ weights` in float32.

    layer: which weights of a stack; None if there is no stack.
    interpret: bool or plgpu.InterpretGPUParams.
    """
    num_rows, num_inputs = x.shape
    p = problem(num_rows, num_inputs, weights.shape[-1], x.dtype, is_interpreted=bool(interpret))
    x = jnp.pad(x, ((0, p.num_rows - num_rows), (0, 0)))
    number = jnp.full((1,), 0 if layer is None else layer, jnp.int32)
    run = common.kernel_of(_kernel_of, p, interpret=interpret)
    sums = run(number, weights if layer is not None else weights[None], x)
    # Added one by one: so the order of the sum does not depend on the number of rows.
    return functools.reduce(operator.add, sums)[:num_rows, : p.num_outputs]


def _kernel_of(p: Problem, interpret: Any) -> Callable[..., jax.Array]:
    """Return a function (layer, weights, x) -> sums [num_splits, num_rows, num_pieces * NUM_OUTPUTS]."""

    def product_kernel(*refs: Any) -> None:
        _kernel(*refs, problem=p)

    sums = p.num_splits, p.num_rows, p.num_pieces * NUM_OUTPUTS
    kernel: Callable[..., jax.Array] = plgpu.kernel(
        product_kernel,
        out_type=jax.ShapeDtypeStruct(sums, jnp.float32),
        grid=(p.num_splits, p.num_tiles, p.num_blocks),
        grid_names=("split", "tile", "block"),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="thread",
        scratch_types=[cp_async.memory_of(scratch_types(p))],
        interpret=common.interpret_params(interpret),
    )
    return kernel
