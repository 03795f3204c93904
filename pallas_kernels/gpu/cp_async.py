"""Primitives of GPUs before Hopper, which have no TMA: copies by cp.async, and barriers in shared memory.

They stand for Pallas' own, one for one, so that the kernels are the same:

* `barrier`, `initialise`: a barrier is two words of shared memory, an mbarrier. Pallas follows the phases of
its own barriers. Here `wait` is told the phase, which follows from the number of a ring's tile.
* `copy` for `plgpu.copy_gmem_to_smem`: the threads of a warp or warpgroup copy 16 bytes each at a time. All
of them arrive at the barrier once their bytes are there, so a copy is `threads` arrivals.
* `arrive` and `wait` for `plgpu.barrier_arrive` and `plgpu.barrier_wait`; `commit` for `plgpu.commit_smem`:
without TMA and wgmma, threads alone read shared memory, and a barrier of the warpgroup is enough.
* `store_rows` for `plgpu.copy_smem_to_gmem`.

Pallas' interpreter runs a kernel with Pallas' own primitives instead.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils

SCALAR = plgpu.Layout.WG_SPLAT  # a number that all threads have
VECTOR_BYTES = 16  # of one cp.async
WARP, WARPGROUP = 32, 128  # threads


class BarrierType(NamedTuple):
    """The type of a ring's barriers, before a kernel."""

    num_arrivals: int  # of threads, in a phase of each
    num_barriers: int


@dataclasses.dataclass(frozen=True)
class Barriers:
    """The barriers of a ring in a kernel: `barriers.at[slot]` has the words of one."""

    words: Any  # [barriers of all rings, 2] int32 in shared memory
    first: int

    @property
    def at(self) -> Self:
        return self

    def __getitem__(self, slot: Any) -> Any:
        return self.words.at[self.first + slot]


def barrier(num_arrivals: int, num_barriers: int = 1, *, threads: int = WARPGROUP) -> BarrierType:
    """Return the type of barriers that each wait for so many arrivals of `threads` threads."""
    return BarrierType(num_arrivals * threads, num_barriers)


def _is_barrier(type_: Any) -> bool:
    return isinstance(type_, BarrierType)


def _barrier_types(types: Any) -> list[BarrierType]:
    return [type_ for type_ in jax.tree.leaves(types, is_leaf=_is_barrier) if _is_barrier(type_)]


def memory_of(types: Any) -> Any:
    """Return scratch types for plgpu.kernel, and the words of all barriers among them in one array."""
    total = sum(type_.num_barriers for type_ in _barrier_types(types))
    if not total:
        return types
    rest = jax.tree.map(lambda type_: None if _is_barrier(type_) else type_, types, is_leaf=_is_barrier)
    return rest, plgpu.SMEM((total, 2), jnp.int32)


def initialise(types: Any, memory: Any) -> Any:
    """Make the barriers of a kernel ready. Return its scratch memory with them; all its threads do so, first.

    types, memory: before and after `memory_of`.
    """
    scratch, words = memory
    counts = [count for count, number in _barrier_types(types) for _ in range(number)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def start(_: Any, words: Any) -> None:
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import nvvm

        int32 = ir.IntegerType.get_signless(32)
        with utils.single_thread(scope=utils.ThreadSubset.BLOCK):
            for number, count in enumerate(counts):
                place = utils.getelementptr(utils.memref_ptr(words), [2 * number], int32)
                utils.inline_ptx(f"mbarrier.init.shared.b64 [$0], {count};", place, has_side_effects=True)
        nvvm.barrier0() if hasattr(nvvm, "barrier0") else nvvm.barrier()

    start(words)
    first = itertools.accumulate((type_.num_barriers for type_ in _barrier_types(types)), initial=0)
    memories = iter(jax.tree.leaves(scratch))
    leaves, structure = jax.tree.flatten(types, is_leaf=_is_barrier)
    filled = [Barriers(words, next(first)) if _is_barrier(type_) else next(memories) for type_ in leaves]
    return jax.tree.unflatten(structure, filled)


def _words_of(barrier: Any) -> Any:
    return barrier.at[0] if isinstance(barrier, Barriers) else barrier


def wait(words: Any, parity: jax.Array) -> None:
    """Wait until a barrier's phase of this parity, 0 for the first, is complete."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def spin(_: Any, words: Any, parity: Any) -> None:
        ptx = (
            "{ .reg .pred done; AGAIN: mbarrier.test_wait.parity.shared.b64 done, [$0], $1; "
            "@!done bra AGAIN; }"
        )
        utils.inline_ptx(ptx, utils.memref_ptr(words), parity.registers.item(), has_side_effects=True)

    spin(_words_of(words), parity)


def arrive(words: Any) -> None:
    """Count an arrival at a barrier for every thread that calls it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def once(_: Any, words: Any) -> None:
        ptx = "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [$0]; }"
        utils.inline_ptx(ptx, utils.memref_ptr(words), has_side_effects=True)

    once(_words_of(words))


def commit() -> None:
    """Make the writes of all the warpgroup's threads to shared memory visible to all of them."""

    @plgpu.inline_mgpu()
    def synchronise(_: Any) -> None:
        utils.warpgroup_barrier()

    synchronise()


def offset_of(row: Any, chunk: Any, tile: "Tile") -> Any:
    """Return where 16 bytes of a row lie, in bytes from the start of shared memory with `common.tiled`.

    row, chunk: numbers, or `Number`s; a chunk is 16 bytes of the row.

    A tile is 8 rows of at most 128 bytes. Its swizzle exchanges bits of an address from 4 up by those from 7
    up: the chunks of 1, 2 or 4 neighbouring rows have an order of their own.
    """
    in_tile, of_tile = chunk % tile.row_chunks, chunk // tile.row_chunks
    order = row % 8 // (128 // (tile.row_chunks * VECTOR_BYTES))
    lines = row // 8 * tile.rows_stride + of_tile * tile.columns_stride + row % 8 * tile.row_stride
    return lines + (in_tile ^ order) * VECTOR_BYTES


def copy(
    source: Any, target: Any, words: Any, *, transforms: tuple[Any, ...] = (), threads: int = WARP
) -> None:
    """Start to copy rows to shared memory, and to arrive at a barrier when they are there.

    source: [rows, width] or [width] in the GPU's memory, each row's numbers side by side.
    target: likewise in shared memory, with these transforms: none, or those of `common.tiled`.
    threads: that call it: a warp's or a warpgroup's.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(transforms), plgpu.RefType()))
    def start(_: Any, source: Any, target: Any, words: Any) -> None:
        for place, row, chunk, predicate in Rows.of(source).vectors(threads):
            to = _address(target, row, chunk, is_tiled=bool(transforms))
            ptx = f"cp.async.cg.shared.global [$0], [$1], {VECTOR_BYTES};"
            utils.inline_ptx(ptx, to, place, predicate=predicate, has_side_effects=True)
        ptx = "cp.async.mbarrier.arrive.noinc.shared.b64 [$0];"
        utils.inline_ptx(ptx, utils.memref_ptr(words), has_side_effects=True)

    start(source, target, _words_of(words))


def store_rows(source: Any, target: Any, *, transforms: tuple[Any, ...] = ()) -> None:
    """Copy rows from shared memory to the GPU's, by a warpgroup's threads; arguments are as `copy`'s."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType()))
    def move(_: Any, source: Any, target: Any) -> None:
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import llvm

        four = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        for place, row, chunk, predicate in Rows.of(target).vectors(WARPGROUP):
            with contextlib.nullcontext() if predicate is None else utils.when(predicate):
                llvm.store(llvm.load(four, _address(source, row, chunk, is_tiled=bool(transforms))), place)

    move(source, target)


class Tile(NamedTuple):
    """Row length and strides, in bytes, of the tiles of 8 rows that an array in shared memory consists of."""

    row_chunks: int  # of 16 bytes, in a tile's row
    rows_stride: int  # from a tile to the one below
    columns_stride: int  # to the one beside it
    row_stride: int  # from row to row in a tile


class Number:
    """An integer of a thread, not negative, in the code of a primitive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _with(self, operation: str, other: Any) -> "Number":
        from jax._src.lib.mlir.dialects import arith

        value = utils.c(other, self.value.type) if isinstance(other, int) else other.value
        return Number(getattr(arith, operation)(self.value, value))

    def __add__(self, other: Any) -> "Number":
        return self._with("addi", other)

    def __mul__(self, other: Any) -> "Number":
        return self._with("muli", other)

    def __floordiv__(self, other: Any) -> "Number":
        return self._with("divui", other)

    def __mod__(self, other: Any) -> "Number":
        return self._with("remui", other)

    def __xor__(self, other: Any) -> "Number":
        return self._with("xori", other)

    def is_below(self, bound: int) -> Any:
        """Return a predicate of the code."""
        from jax._src.lib.mlir.dialects import arith

        return arith.cmpi(arith.CmpIPredicate.ult, self.value, utils.c(bound, self.value.type))


class Rows(NamedTuple):
    """Rows in the GPU's memory, in the code of a primitive."""

    pointer: Any
    num_rows: int
    chunks: int  # of 16 bytes, in a row
    row_bytes: int  # from row to row

    @classmethod
    def of(cls, memref: Any) -> "Rows":
        """Read the rows off a reference; axes of one element may be anywhere before the last."""
        from jax._src.lib.mlir import ir
        from jax._src.lib.mlir.dialects import llvm

        type_ = ir.MemRefType(memref.type)
        num_rows, row_stride = _rows_of(type_)
        itemsize = utils.bitwidth(type_.element_type) // 8
        width = type_.shape[-1] * itemsize
        assert width % VECTOR_BYTES == 0
        pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(memref))
        return cls(pointer, num_rows, width // VECTOR_BYTES, row_stride * itemsize)

    def vectors(self, threads: int) -> Iterator[tuple[Any, Number, Number, Any]]:
        """Return this thread's share of the rows: addresses of 16 bytes, their row and chunk, and a predicate
        or None.
        """
        from jax._src.lib.mlir import ir

        total, int8 = self.num_rows * self.chunks, ir.IntegerType.get_signless(8)
        thread = Number(utils.thread_idx()) % threads
        for first in range(0, total, threads):
            number = thread + first
            predicate = number.is_below(total) if first + threads > total else None
            row, chunk = number // self.chunks, number % self.chunks
            offset = row * self.row_bytes + chunk * VECTOR_BYTES
            yield utils.getelementptr(self.pointer, [offset.value], int8), row, chunk, predicate


def _rows_of(type_: Any) -> tuple[int, int]:
    """Return the number of rows of a reference's type, and the numbers from one to the next."""
    strides, _ = type_.get_strides_and_offset()
    assert strides[-1] == 1, type_
    axes = [(n, stride) for n, stride in zip(type_.shape[:-1], strides[:-1], strict=True) if n > 1]
    assert len(axes) <= 1, type_
    return axes[0] if axes else (1, type_.shape[-1])


def _address(memref: Any, row: Number, chunk: Number, *, is_tiled: bool) -> Any:
    """Return the address in shared memory of 16 bytes of a row."""
    from jax._src.lib.mlir import ir

    type_ = ir.MemRefType(memref.type)
    itemsize, int8 = utils.bitwidth(type_.element_type) // 8, ir.IntegerType.get_signless(8)
    if is_tiled:
        strides, _ = type_.get_strides_and_offset()
        assert type_.shape[-2] == 8, type_
        rows, columns, row_stride = (stride * itemsize for stride in strides[-4:-1])
        tile = Tile(type_.shape[-1] * itemsize // VECTOR_BYTES, rows, columns, row_stride)
        offset = offset_of(row, chunk, tile)
    else:
        offset = row * (_rows_of(type_)[1] * itemsize) + chunk * VECTOR_BYTES
    return utils.getelementptr(utils.memref_ptr(memref), [offset.value], int8)
