"""A program of the prompt kernel: the problem that it works on, its shared memory, and the keys that it
reads.

Up to two consumer warpgroups have 64 rows of queries each, with tensor memory 128: row = head * tile_len +
token, for example 2 query heads of 32 tokens. A producer warpgroup brings them tiles of K and V through a
ring (`fetch`, `gpu.attention`), over which they take the softmax (`softmax`). With tensor memory one more
starts all products (`products`). K and V of a slot have barriers of their own.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, int4_cache, targets, tuning, votes
from pallas_kernels.gpu.attention import AttentionProblem, Ring, problem_fields, ring_types
from pallas_kernels.gpu.prompt import tensor_memory
from pallas_kernels.gpu.targets import Multiply, Target
from pallas_kernels.support import Arrays, Options

WARPGROUP_ROWS = 64
MAX_WARPGROUPS = 2  # consumers of a program
MMA_COLUMNS = 16  # of an operand of mma.sync: numbers of a query and of K in registers at a time
LONGEST_HEAD = 256  # for mma.sync the registers of a thread then have room for tiles of 32 tokens
TILE_LENS = (8, 16, 32, 64)  # other lengths are padded to the next of these


def multiply_of(target: Target, head_dim: int) -> Multiply:
    """Return the instruction of prompts' products: the target's fastest, if a thread has the registers."""
    return target.kernel_multiply if head_dim > tensor_memory.MAX_HEAD_DIM else target.multiply


def rows_of(multiply: Multiply) -> int:
    """Return the rows of queries of a consumer; with tensor memory, one for each of its lanes."""
    return tensor_memory.ROWS if multiply == "tcgen05" else WARPGROUP_ROWS


class Registers(NamedTuple):
    """The registers of a thread of each warpgroup, where they are shared unequally."""

    consumer: int
    producer: int
    widener: int
    multiplier: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem(AttentionProblem):
    """The static shape of a call, and what follows from it; query_len is tile_len without padding.

    dtype: of what is multiplied, and of the output.
    """

    tile_len: int  # query tokens of a tile, one of TILE_LENS
    has_slopes: bool
    in_registers: bool  # whether the weights of a tile go from registers into their product
    num_stages: int = 2
    num_raw_stages: int = 2  # the slots of the ring that a quantised cache comes into: as many as fit
    one_by_polynomial_in: int = 0  # exponents

    @property
    def warpgroup_rows(self) -> int:
        """Rows of queries of a consumer."""
        return rows_of(self.multiply)

    @property
    def layout(self) -> Any:
        """The layout of rows in a consumer's registers."""
        return votes.ROWS if self.has_tensor_memory else common.WGMMA

    @property
    def warpgroup_heads(self) -> int:
        return self.warpgroup_rows // self.tile_len

    @property
    def num_warpgroups(self) -> int:
        """The number of consumers: one if that is enough, or if it needs more registers than each of two
        has.
        """
        needs_more = self.has_slopes or self.soft_cap is not None
        needs_more |= self.head_dim == 256 and (self.is_bounded or self.is_quantised)
        needs_more |= self.is_quantised and self.is_bounded
        # An mma.sync has its operands in registers.
        needs_more |= self.multiply == "mma.sync" and (self.is_quantised or self.head_dim > 128)
        if self.has_tensor_memory:  # the sums are in no registers
            needs_more = self.is_quantised or self.has_slopes or self.soft_cap is not None
        return min(1 if needs_more else MAX_WARPGROUPS, -(-self.group_size // self.warpgroup_heads))

    @property
    def widens_itself(self) -> bool:
        """Whether the consumer widens a quantised cache: K, and then V, into the same memory.

        With long heads mma.sync takes more registers than each of three warpgroups has, and tiles of both
        take more memory than some GPUs have.
        """
        return self.is_quantised and self.multiply == "mma.sync" and self.head_dim > 128

    @property
    def has_widener(self) -> bool:
        """Whether a warpgroup widens a quantised cache."""
        return self.is_quantised and not self.widens_itself

    @property
    def memory_bytes(self) -> int:
        """A bound of a program's shared memory."""
        tokens = 2 * self.tile_kv  # of K and V, of a slot
        queries = self.num_warpgroups * self.warpgroup_rows * self.head_dim * 2
        if self.widens_itself:
            ring, raw = self.tile_kv * self.head_dim * 2, self.num_stages * tokens * self.line
        else:
            ring = self.num_stages * tokens * self.head_dim * 2
            raw = self.num_raw_stages * tokens * self.line if self.is_quantised else 0
        # Arrays begin at multiples of 1,024 bytes: scales, barriers, and of 4 bits the newest tokens.
        small = 1 + (2 if self.scale_copies else 0) + (0 if self.packed is None else 4 + self.head_dim // 32)
        return queries + ring + raw + small * 1024

    @property
    def takes_turns(self) -> bool:
        """Whether two consumers take turns: while one multiplies, the other takes its softmax."""
        return self.has_wgmma and self.num_warpgroups == MAX_WARPGROUPS

    def tiled(self, width: int) -> tuple[Any, ...]:
        """Return the transforms of operands in shared memory, of rows of this width."""
        transforms: tuple[Any, ...] = common.tiled(width, MMA_COLUMNS if self.multiply == "mma.sync" else 64)
        return transforms

    @property
    def num_chunks(self) -> int:
        """The number of programs that share a group's heads."""
        return -(-self.group_size // (self.num_warpgroups * self.warpgroup_heads))

    @property
    def num_threads(self) -> int:
        """The number of warpgroups: the consumers, the producer, who widens, and who starts products."""
        return self.num_warpgroups + 1 + self.has_widener + self.has_tensor_memory

    @property
    def shares_registers(self) -> bool:
        """Whether consumers take registers from the others, because an equal share is not enough."""
        if not self.has_tma or (not self.has_wgmma and self.is_interpreted):
            return False
        return self.in_registers and self.num_threads > 2

    @property
    def registers(self) -> Registers:
        """The registers of a thread; all warpgroups together have 512 for one thread of each."""
        if self.num_warpgroups < MAX_WARPGROUPS:
            return Registers(consumer=256, producer=64, widener=128, multiplier=64)
        if self.has_tensor_memory:
            return Registers(consumer=224, producer=32, widener=0, multiplier=32)
        return Registers(208, 32, 64) if self.is_quantised else Registers(240, 32, 0)


def make_problem(
    arrays: Arrays, options: Options, *, in_registers: bool | None, is_interpreted: bool
) -> Problem:
    """Return the problem of arguments that `ops` has checked, with q of four axes.

    in_registers: None stands for True, except in the interpreter, which knows no wgmma of registers.
    """
    target = targets.compiled_for()
    query_len, is_quantised = arrays.q.shape[1], arrays.k_cache.dtype.itemsize == 1
    fields = problem_fields(arrays, options)
    has_slopes, is_scaled = options.alibi_slopes is not None, options.token_scales is not None
    multiply = multiply_of(target, fields["head_dim"])
    by_mma = multiply == "mma.sync"
    is_long = fields["head_dim"] == 256 or (by_mma and fields["head_dim"] > 64)
    # Two stages of the ring, and registers, have room for so many tokens.
    is_narrow = fields["packed"] is not None or (is_quantised and has_slopes) or fields["head_dim"] > 128
    tile_kv = 64 if is_narrow or by_mma else 128
    if multiply == "mma.sync" and fields["head_dim"] == LONGEST_HEAD:
        tile_kv = 32
    p = Problem(
        **fields,
        tile_len=next(length for length in TILE_LENS if length >= query_len),
        query_len=query_len,
        dtype=jnp.dtype(jnp.float16) if is_quantised else arrays.q.dtype,
        has_slopes=has_slopes,
        tile_kv=tile_kv,
        in_registers=(multiply != "wgmma" or not is_interpreted) if in_registers is None else in_registers,
        is_interpreted=is_interpreted,
        **Problem.fields_of(target) | {"multiply": multiply},
        num_raw_stages=1 if is_long or (is_scaled and fields["head_dim"] == 128) else 2,
        one_by_polynomial_in=tuning.one_by_polynomial_in(target) if multiply == "tcgen05" else 0,
    )
    # With one slot, K of the next tile comes while V of this one is multiplied, and the other way round.
    return p if p.memory_bytes <= target.program_bytes else dataclasses.replace(p, num_stages=1)


class Scratch(NamedTuple):
    """Shared memory and barriers of one program."""

    q: Any  # [num_warpgroups, warpgroup_rows, head_dim]; in the end, the output
    ring: Ring
    raw: Ring | None  # of a quantised cache's tiles, as memory has them; None if `ring` has them so
    wide: Any  # [tile_kv, head_dim] K or V of a tile, widened by the consumer; None if it does not widen
    p: Any  # [num_warpgroups, warpgroup_rows, tile_kv] a tile's weights; None where they stay in registers
    q_full: Any  # [num_warpgroups], an arrival per head
    turn: Any  # one barrier, by which both consumers take turns, or wait for each other
    k_new: Any  # [16, head_dim] the newest tokens of K, in a cache of 4 bits a number; else None
    new_full: Any  # likewise
    tensors: tensor_memory.Tensors | None


def scratch_types(p: Problem) -> Scratch:
    """Return the types of `Scratch`, for plgpu.kernel."""

    def rows(count: int, size: int, width: int, tiled: int) -> Any:
        return plgpu.SMEM((count, size, width), p.dtype, transforms=p.tiled(tiled))

    tiles = rows(p.num_stages, p.tile_kv, p.head_dim, p.line)
    types = functools.partial(ring_types, p, by_array=True)
    readers = 1 if p.has_tensor_memory else p.num_warpgroups
    tiles_type = functools.partial(
        types, tiles, p.num_stages, readers=readers, by_tensor_core=p.has_tensor_memory
    )
    ring = tiles_type(writers=p.copies_per_tile)
    raw = wide = k_new = tensors = None
    num_copies = p.copies_per_tile + p.scale_copies + p.packed_copies
    if p.widens_itself:
        in_memory = plgpu.SMEM((p.num_stages, p.tile_kv, p.line), p.cache_dtype)
        ring = types(in_memory, p.num_stages, writers=num_copies, readers=1)
        wide = plgpu.SMEM((p.tile_kv, p.head_dim), p.dtype, transforms=p.tiled(p.line))
    elif p.is_quantised:
        in_memory = plgpu.SMEM((p.num_raw_stages, p.tile_kv, p.line), p.cache_dtype)
        raw = types(in_memory, p.num_raw_stages, writers=num_copies, readers=1)
        ring = tiles_type(writers=1, of_copies=False)
        ring = ring._replace(scales=(None, None), packed=None)  # they are factors of what is widened
    if p.packed is not None:
        k_new = plgpu.SMEM((int4_cache.GROUP, p.head_dim), p.new_dtype)
    if p.has_tensor_memory:
        tensors = tensor_memory.types(
            p.num_warpgroups, p.tile_kv, p.head_dim, p.dtype, is_interpreted=p.is_interpreted
        )
    return Scratch(
        q=rows(p.num_warpgroups, p.warpgroup_rows, p.head_dim, p.line),
        ring=ring,
        raw=raw,
        wide=wide,
        p=None if p.in_registers else rows(p.num_warpgroups, p.warpgroup_rows, p.tile_kv, p.tile_kv),
        q_full=p.barrier(p.warpgroup_heads, p.num_warpgroups),
        turn=p.barrier(MAX_WARPGROUPS),
        k_new=k_new,
        new_full=None if k_new is None else p.barrier(1, of_copies=True),
        tensors=tensors,
    )


class KeyRange(NamedTuple):
    """The keys that a tile of queries sees, tokens [start, end), and the tiles of K and V that a program
    reads.
    """

    position: jax.Array  # of the first query
    start: jax.Array
    end: jax.Array
    first: jax.Array  # index of the program's first tile
    num_tiles: jax.Array
    full_from: jax.Array  # tiles [full_from, full_to) of these are seen whole by every query
    full_to: jax.Array


def seen_by(p: Problem, position: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the first token that a tile of queries sees, and the token after the last one."""
    end = jnp.where(seq_len == 0, 0, jnp.minimum(seq_len, position + p.query_len))
    first = p.first_seen(position)
    return jnp.int32(0) if first is None else jnp.clip(first, 0, end), end


def keys_of(
    p: Problem, position: jax.Array, seq_len: jax.Array, partition: tuple[jax.Array, jax.Array] | None = None
) -> KeyRange:
    """Return the keys that a program reads for the tile of queries at a position: all that it sees, or a
    partition.

    partition: its first token, and the token after its last; None for all.
    """
    tile_kv = jnp.int32(p.tile_kv)
    start, end = seen_by(p, position, seq_len)
    last_sees_from = p.first_seen(position + (p.tile_len - 1))
    full_from = jnp.int32(0) if last_sees_from is None else jnp.maximum(last_sees_from, 0)
    from_, to = (start, end) if partition is None else partition
    first = lax.div(from_, tile_kv)
    num_tiles = pl.cdiv(to, tile_kv) - first
    full_to = jnp.clip(lax.div(jnp.minimum(position + 1, end), tile_kv) - first, 0, num_tiles)
    full_from = jnp.clip(pl.cdiv(full_from, tile_kv) - first, 0, full_to)
    return KeyRange(position, start, end, first, num_tiles, full_from, full_to)
