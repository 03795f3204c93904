"""Primitives of the GPU kernels: bring tiles into shared memory, widen, multiply, store, wait.

* A call's optional arrays: `Extras`, `extras_of`; the arrays' blocks that its block ids name: `array_blocks`.
* Bring a tile: `copy_tokens` and `scale_tokens` size the TMA copies, `tiled` gives the layout of shared
memory.
* Multiply: `WGMMA` is the layout of a product in registers; `widen` and `widened` make float16 of 8-bit
numbers.
* Write: `store`. Copies, waits and arrivals are in `primitives.py`.
* Launch: `kernel_of`, `interpret_params`.

Primitives of tiles with 4 bits a number are in `int4_cache.py`, the counter of arrivals in
`arrival_counter.py`.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, utils

from pallas_kernels.gpu import targets
from pallas_kernels.support import Options

LOG2E = math.log2(math.e)
LOWEST = -1e30
FLOAT16_MAX = 65504.0
NUM_WARPS = 4  # in a producer warpgroup
WGMMA = plgpu.Layout.WGMMA
LINES = 16  # tokens of a tile that `lines` lays out


class Extras(NamedTuple):
    """The optional arrays of a call; None where absent."""

    alibi_slopes: Any  # [num_q_heads] float32
    sinks: Any  # [num_q_heads] float32
    k_scale: Any  # [num_kv_heads] float32
    v_scale: Any  # [num_kv_heads] float32
    token_scales: Any  # two arrays in which the layout's view has them, float32
    packed: Any  # `PackedArrays`
    first_block: Any  # [1] int32, of a slice of the arrays' blocks


def extras_of(options: Options) -> Extras:
    """Return the arrays among the options."""
    first_block = None if options.blocks is None else options.blocks.first[None]
    return Extras._make([*(getattr(options, name) for name in Extras._fields[:-1]), first_block])


def block_stride(options: Options) -> int:
    """Return the step from one block of a call to the next, among the arrays' blocks."""
    return 1 if options.blocks is None else options.blocks.stride


def array_blocks(extras: Extras, stride: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function from a block of the call to the arrays' block that it is. It reads memory once,
    now.
    """
    if extras.first_block is None:
        return lambda block_id: block_id
    first = extras.first_block[0]
    return lambda block_id: first + block_id * stride


def product(
    a: Any,
    b: Any,
    shape: tuple[int, int],
    multiply: str,
    acc: jax.Array | None = None,
    depth: int | None = None,
    width: int | None = None,
) -> jax.Array:
    """Compute a @ b in float32, in registers as `WGMMA`, by the instruction that `Target.multiply` names.

    a: [rows, k] in shared memory or registers; b: [k, columns] in shared memory.
    acc, depth, width: of mma.sync alone: what the product is added to, and how much of k, and how many
        columns, are in registers at a time.
    """
    if multiply == "wgmma":

        def wgmma(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(wgmma, plgpu.ACC(shape, jnp.float32))
    is_array = isinstance(a, jax.Array) and not hasattr(a.aval, "inner_aval")
    lhs, rhs = plgpu.Layout.MMA_LHS(a.dtype), plgpu.Layout.MMA_RHS(b.dtype)
    size, (_, num_columns) = a.shape[1], shape
    depth, width = depth or size, width or num_columns

    def left(first: int) -> jax.Array:
        if is_array:
            return as_left_operand(a if depth == size else a[:, first : first + depth])
        source = a if depth == size else a.at[:, pl.ds(first, depth)]
        return plgpu.load(source, layout=lhs, optimized=False)

    pieces, lefts = [], {}
    for column in range(0, num_columns, width):
        is_part = width < num_columns
        total = jnp.zeros((shape[0], width), jnp.float32) if acc is None else acc
        if acc is not None and is_part:
            total = acc[:, column : column + width]
        total = plgpu.layout_cast(total, plgpu.Layout.MMA_ACC(a.dtype))
        for first in range(0, size, depth):
            if not (is_array and first in lefts):
                lefts[first] = left(first)
            right = b
            if is_part:
                right = b.at[pl.ds(first, depth), pl.ds(column, width)]
            elif depth < size:
                right = b.at[pl.ds(first, depth)]
            total = plgpu.mma(total, lefts[first], plgpu.load(right, layout=rhs, optimized=False))
        pieces.append(plgpu.layout_cast(total, WGMMA))
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, 1)


def as_left_operand(x: jax.Array) -> jax.Array:
    """Return 16-bit numbers that lie as `WGMMA` as the left operand of an mma: a thread has the same numbers,
    in the same order.

    Pallas' interpreter knows no layouts, and cannot run this.
    """
    lhs = plgpu.Layout.MMA_LHS(x.dtype)

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=lhs))
    def renamed(_: Any, x: Any) -> Any:
        from jax._src.lib.mlir import ir

        layout, word = lhs.to_mgpu(), ir.IntegerType.get_signless(32)
        registers = np.empty(x.registers.size, object)
        for i, register in enumerate(
            x.registers.flat
        ):  # by way of words, or MLIR takes it for the same value
            registers[i] = utils.bitcast(utils.bitcast(register, word), register.type)
        registers = registers.reshape(layout.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    operand: jax.Array = renamed(x)
    return operand


def copy_tokens(block_size: int, tile_kv: int) -> int:
    """Return the tokens of one copy: a block's, or fewer, so that each warp of the producer copies some of a
    tile.
    """
    return min(block_size, tile_kv // NUM_WARPS)


def scale_tokens(block_size: int, tile_kv: int) -> int:
    """Return the tokens of one copy of scales. Its target in shared memory is aligned to 128 bytes, 32
    scales.
    """
    return min(block_size, tile_kv)


def tiled(width: int, max_columns: int = 64) -> Any:
    """Return the tiling and the swizzle of rows in shared memory as wgmma reads them.

    A tile has 8 rows and the most columns, of 64, 32 and 16, that divide the width, at most `max_columns`.
    With fewer columns, mma.sync takes less of a product into registers at a time.
    """
    transforms: Any = plgpu  # mypy takes the two for abstract
    columns = next(columns for columns in (64, 32, 16) if columns <= max_columns and width % columns == 0)
    return transforms.TilingTransform((8, columns)), transforms.SwizzleTransform(2 * columns)


def columns_of(head_dim: int) -> list[int]:
    """Return the first columns of pieces of 64 that cover head_dim; the last two may overlap."""
    return [*range(0, head_dim - 63, 64), *([head_dim - 64] if head_dim % 64 else [])]


def lines(width: int) -> Any:
    """Return the register layout of 16 lines of 64 or 32 numbers: a warp has a quarter of each line, a thread
    four neighbouring numbers.

    Half a warp has eight numbers of each of eight lines, so that its stores to swizzled memory hit different
    banks.
    """
    tiling: Any = ((LINES, 64), (8, 16), (8,), (4,)) if width == 64 else ((LINES, 32), (16, 8), (4,))
    warps, lanes = (-5, (-3, -4, -2)) if width == 64 else (-4, (-3, -2))
    tiled = fragmented_array.Tiling(tiling)
    return plgpu.Layout.TILED(tiled, warp_dims=(warps,), lane_dims=lanes, vector_dim=-1)


def widen(source: Any, target: Any, scales: Any = None, *, is_interpreted: bool) -> None:
    """Convert a tile of 8-bit numbers in shared memory to float16 in shared memory.

    scales: [rows] float32 in shared memory, a factor for each row; None for none.
    """
    is_short = source.shape[0] % 64 > 0
    layout = lines(64) if is_short else plgpu.Layout.WGMMA_UPCAST_2X
    of_wide = lines(64) if is_short else WGMMA
    height = LINES if is_short else source.shape[0] if scales is None else 64
    for row in range(0, source.shape[0], height):
        rows = slice(None) if height == source.shape[0] and scales is None else pl.ds(row, height)
        factor = None
        if scales is not None:
            factor = plgpu.load(scales.at[rows], layout=of_wide.reduce(1), optimized=False)
        for column in columns_of(source.shape[1]):
            piece = (rows, pl.ds(column, 64))
            x = widened(source.at[piece], layout, is_interpreted=is_interpreted)
            if factor is not None:
                wide = plgpu.layout_cast(x, of_wide).astype(jnp.float32)
                wide = wide * lax.broadcast_in_dim(factor, wide.shape, [0])
                x = jnp.clip(wide, -FLOAT16_MAX, FLOAT16_MAX).astype(target.dtype)
            target[piece] = x


def widened(source: Any, layout: Any = plgpu.Layout.WGMMA_UPCAST_2X, *, is_interpreted: bool) -> jax.Array:
    """Load 8-bit numbers from shared memory as float16, in the registers in which a wgmma reads them, or
    another layout.
    """
    x = plgpu.load(source, layout=layout, optimized=False)
    if x.dtype == jnp.int8 and not is_interpreted:
        return _as_float16(x, layout, _halves_of_int8)
    if not is_interpreted and not targets.compiled_for().converts_float8:
        return _as_float16(x, layout, _halves_of_e5m2 if x.dtype == jnp.float8_e5m2 else _halves_of_e4m3)
    return x.astype(jnp.float16)


# Four int8 with flipped signs are numbers from 0 to 255. Each becomes the lower byte of a float16 whose upper
# byte adds 1024; TOO_MUCH is the excess, 1024 + 128, twice in a word.
SIGNS, UPPER_BYTE, PAIRS, TOO_MUCH = 0x80808080, 0x64, (0x4140, 0x4342), 0x64806480


# On GPUs that convert no float8, a byte becomes the upper one of a half: pairs of a word's bytes, each over a
# zero byte. That makes float16 of e5m2. Of e4m3 all bits but the sign move down by one, and the numbers are
# 256 times too small; its NaN becomes 480.
SPREAD, SIGN_BITS, OTHER_BITS, TIMES_256 = (0x1404, 0x3424), 0x80008000, 0x7F007F00, 0x5C005C00


def _halves_of_int8(word: Any) -> Iterator[Any]:
    """Return the numbers of a word of int8 in two words of float16: five operations for four numbers.

    A GPU would convert one number at a time.
    """
    from jax._src.lib.mlir.dialects import arith, llvm

    word = arith.xori(word, utils.c(SIGNS - 2**32, word.type))
    ptx = "{{ .reg .b32 t; prmt.b32 t, $1, {}, {}; sub.f16x2 $0, t, $2; }}"
    made = (ptx.format(UPPER_BYTE, pair) for pair in PAIRS)
    return (llvm.inline_asm(word.type, [word, utils.c(TOO_MUCH, word.type)], p, "=r,r,r") for p in made)


def _halves_of_e5m2(word: Any) -> Iterator[Any]:
    """Return the numbers of a word of float8_e5m2 in two words of float16."""
    from jax._src.lib.mlir.dialects import llvm

    made = (f"prmt.b32 $0, $1, 0, {pair};" for pair in SPREAD)
    return (llvm.inline_asm(word.type, [word], ptx, "=r,r") for ptx in made)


def _halves_of_e4m3(word: Any) -> Iterator[Any]:
    """Return the numbers of a word of float8_e4m3fn in two words of float16."""
    from jax._src.lib.mlir.dialects import llvm

    ptx = (
        "{{ .reg .b32 t, s, m; prmt.b32 t, $1, 0, {}; and.b32 s, t, {}; and.b32 m, t, {}; "
        "shr.b32 m, m, 1; or.b32 t, s, m; mul.f16x2 $0, t, $2; }}"
    )
    made = (ptx.format(pair, SIGN_BITS, OTHER_BITS) for pair in SPREAD)
    return (llvm.inline_asm(word.type, [word, utils.c(TIMES_256, word.type)], p, "=r,r,r") for p in made)


def _as_float16(x: jax.Array, layout: Any, halves_of: Callable[[Any], Iterator[Any]]) -> jax.Array:
    """Convert 8-bit numbers to float16 exactly, four at a time.

    Pallas' interpreter cannot run such code.
    """

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.dtype(jnp.float16), layout=layout),
    )
    def convert(_: Any, x: Any) -> Any:
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import llvm, vector

        i32 = ir.IntegerType.get_signless(32)

        def words(length: int) -> Any:
            return ir.VectorType.get((length,), i32)

        registers = np.empty_like(x.registers)
        for at, four_and_more in np.ndenumerate(x.registers):
            [length] = ir.VectorType(four_and_more.type).shape
            bytes_of = vector.bitcast(words(length // 4), four_and_more)
            halves = llvm.mlir_undef(words(length // 2))
            for i in range(length // 4):
                for k, half in enumerate(halves_of(vector.extract(bytes_of, [], [i]))):
                    halves = llvm.insertelement(halves, half, utils.c(2 * i + k, i32))
            registers[at] = vector.bitcast(ir.VectorType.get((length,), ir.F16Type.get()), halves)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    converted: jax.Array = convert(x)
    return converted


def store(target: Any, value: jax.Array) -> None:
    """Store registers to memory as they lie, in spite of bank conflicts and partly written cache lines."""
    if hasattr(plgpu, "store"):  # JAX 0.12 needs `optimized=False` to accept them
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value


def kernel_of(
    make: Callable[..., Callable[..., jax.Array]], *sizes: Any, interpret: Any
) -> Callable[..., jax.Array]:
    """Return the kernel make(*sizes, interpret), as one jitted function for all calls of these sizes.

    A model is then lowered once, not layer by layer. An interpreted kernel is made anew for each call.
    """
    return make(*sizes, interpret) if interpret else jitted_kernel(make, *sizes)


@functools.cache
def jitted_kernel(make: Callable[..., Callable[..., jax.Array]], *sizes: Any) -> Callable[..., jax.Array]:
    """Return the kernel make(*sizes, False), jitted and cached."""
    return jax.jit(make(*sizes, False))


def interpret_params(interpret: Any) -> Any:
    """Return the interpreter's parameters; True stands for race detection.

    The interpreter takes copies that share a simulated TMA thread as ordered. With 64 threads no two share
    one.
    """
    if interpret is True:
        return plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
    return interpret
