"""A program of the prompt kernel: the problem that it computes a part of, its memory and its tokens.

Up to two consumer warpgroups have 64 rows of queries each: row = head * tile_len + token, for example 2 query
heads of 32 tokens. A producer warpgroup brings them tiles of K and V through a ring (`fetch`), of
which they take the softmax (`softmax`). Per slot and array there is a barrier `full` (it may be read)
and one `free` (every consumer has done with it).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, int4_cache
from pallas_kernels.layouts import PackedView, View

WARPGROUP_ROWS = 64
MAX_WARPGROUPS = 2  # consumers of a program
TILE_LENS = (8, 16, 32, 64)  # other lengths are padded to the next of these


class Registers(NamedTuple):
    """Of a thread of each warpgroup, where they share unequally."""

    consumer: int
    producer: int
    widener: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static shape of a call, and what follows from it."""

    num_kv_heads: int
    group_size: int
    tile_len: int  # query tokens of a tile, one of TILE_LENS
    query_len: int  # of these, without padding
    head_dim: int
    block_size: int
    block_stride: int  # from one block of a part to the next, among the arrays' blocks
    dtype: Any  # of what is multiplied, and of the output
    cache_dtype: Any
    new_dtype: Any  # of the newest tokens in a cache of 4 bits a number
    view: View
    scale: float
    has_slopes: bool
    soft_cap: float | None
    sliding_window: int | None
    in_registers: bool
    is_interpreted: bool
    packed: PackedView | None = None  # of a cache of 4 bits a number
    num_stages: int = 2

    @property
    def tile_kv(self) -> int:
        """Tokens of K and V at a time: as many as memory has room for, in two stages, and registers."""
        is_short = self.packed is not None or (self.is_quantised and self.has_slopes)
        return 64 if self.head_dim > 128 or is_short else 128

    @property
    def warpgroup_heads(self) -> int:
        return WARPGROUP_ROWS // self.tile_len

    @property
    def num_warpgroups(self) -> int:
        """Consumers of a program: one if that is enough, or needs more registers than each of two has."""
        needs_more = self.has_slopes or self.soft_cap is not None
        needs_more |= self.head_dim == 256 and (self.sliding_window is not None or self.is_quantised)
        needs_more |= self.is_quantised and self.sliding_window is not None
        return min(1 if needs_more else MAX_WARPGROUPS, -(-self.group_size // self.warpgroup_heads))

    @property
    def num_chunks(self) -> int:
        """Programs that share a group's heads."""
        return -(-self.group_size // (self.num_warpgroups * self.warpgroup_heads))

    @property
    def is_quantised(self) -> bool:
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def num_raw_stages(self) -> int:
        """Of the ring that a quantised cache comes into: as many as fit."""
        return 1 if self.head_dim == 256 or (self.scale_copies and self.head_dim == 128) else 2

    @property
    def num_threads(self) -> int:
        """Warpgroups: the consumers, the producer, and the one that widens."""
        return self.num_warpgroups + 1 + self.is_quantised

    @property
    def shares_registers(self) -> bool:
        """Whether consumers take registers from the others, for an equal share is not enough."""
        return self.in_registers and (self.num_warpgroups == MAX_WARPGROUPS or self.is_quantised)

    @property
    def registers(self) -> Registers:
        """Of a thread; all warpgroups together have 512 for one thread of each."""
        if self.num_warpgroups < MAX_WARPGROUPS:
            return Registers(consumer=256, producer=64, widener=128)
        return Registers(208, 32, 64) if self.is_quantised else Registers(240, 32, 0)

    @property
    def copy_tokens(self) -> int:
        return common.copy_tokens(self.block_size, self.tile_kv)

    @property
    def copies_per_tile(self) -> int:
        return self.tile_kv // self.copy_tokens

    @property
    def scale_copies(self) -> int:
        """Of the scales that each token has; 0 if there are none."""
        if self.view.k_scale is None:
            return 0
        return self.tile_kv // common.scale_tokens(self.block_size, self.tile_kv)

    @property
    def packed_copies(self) -> int:
        """Of the scales and zeros that K has in a cache of 4 bits a number, and of those of V."""
        return 0 if self.packed is None else 2 * int4_cache.num_copies(self.block_size, self.tile_kv)

    @property
    def line(self) -> int:
        """What memory has of a token's head: a number each, or half as many bytes."""
        return self.head_dim if self.packed is None else self.head_dim // 2


class Ring(NamedTuple):
    """Tiles of K and V, each array with slots of its own."""

    k: Any  # [num_stages, tile_kv, head_dim]
    v: Any  # [num_stages, tile_kv, head_dim]
    k_full: Any  # [num_stages], an arrival per copy, or one of who widens
    v_full: Any
    k_free: Any  # [num_stages], an arrival per reader
    v_free: Any
    scales: Any = (None, None)  # of each token's K and V, [num_stages, tile_kv] each
    packed: Any = None  # `int4_cache.Scales`

    @property
    def arrays(self) -> tuple[tuple[Any, Any, Any], ...]:
        """(tiles, full, free) of K, and of V."""
        return (self.k, self.k_full, self.k_free), (self.v, self.v_full, self.v_free)


class Scratch(NamedTuple):
    """Shared memory and barriers of one program."""

    q: Any  # [num_warpgroups, 64, head_dim]; in the end, the output
    ring: Ring
    raw: Ring | None  # as a quantised cache has them
    p: Any  # [num_warpgroups, 64, tile_kv] the weights of one tile; None where they stay in registers
    q_full: Any  # [num_warpgroups], an arrival per head
    turn: Any  # of both consumers
    k_new: Any  # [16, head_dim] the newest tokens of K, in a cache of 4 bits a number; else None
    new_full: Any  # likewise


def scratch_types(p: Problem) -> Scratch:
    """The types of `Scratch`, for plgpu.kernel."""

    def rows(count: int, size: int, width: int, tiled: int) -> Any:
        return plgpu.SMEM((count, size, width), p.dtype, transforms=common.tiled(tiled))

    def ring(tiles: Any, num_stages: int, num_writers: int, num_readers: int, scales: Any = None) -> Ring:
        full = plgpu.Barrier(num_arrivals=num_writers, num_barriers=num_stages)
        free = plgpu.Barrier(num_arrivals=num_readers, num_barriers=num_stages)
        return Ring(tiles, tiles, full, full, free, free, (scales, scales))

    num_writers, raw, k_new = p.copies_per_tile, None, None
    if p.is_quantised:
        tiles = plgpu.SMEM((p.num_raw_stages, p.tile_kv, p.line), p.cache_dtype)
        scales = plgpu.SMEM((p.num_raw_stages, p.tile_kv), jnp.float32) if p.scale_copies else None
        num_copies = p.copies_per_tile + p.scale_copies + p.packed_copies
        num_writers, raw = 1, ring(tiles, p.num_raw_stages, num_copies, 1, scales)
        if p.packed is not None:
            raw = raw._replace(packed=int4_cache.scratch_types(p.num_raw_stages, p.tile_kv, p.head_dim))
            k_new = plgpu.SMEM((int4_cache.GROUP, p.head_dim), p.new_dtype)
    tiles = rows(p.num_stages, p.tile_kv, p.head_dim, p.line)
    return Scratch(
        q=rows(p.num_warpgroups, WARPGROUP_ROWS, p.head_dim, p.line),
        ring=ring(tiles, p.num_stages, num_writers, p.num_warpgroups),
        raw=raw,
        p=None if p.in_registers else rows(p.num_warpgroups, WARPGROUP_ROWS, p.tile_kv, p.tile_kv),
        q_full=plgpu.Barrier(num_arrivals=p.warpgroup_heads, num_barriers=p.num_warpgroups),
        turn=plgpu.Barrier(num_arrivals=MAX_WARPGROUPS),
        k_new=k_new,
        new_full=None if k_new is None else plgpu.Barrier(),
    )


class KeyRange(NamedTuple):
    """What a tile of queries sees, tokens [begin, end), and which tiles of K and V a program reads for it."""

    position: jax.Array  # of the first query
    begin: jax.Array
    end: jax.Array
    first: jax.Array  # of the program's tiles
    num_tiles: jax.Array
    full_from: jax.Array  # among these tiles, those of which every query sees all
    full_to: jax.Array


def seen_by(p: Problem, position: jax.Array, seq_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the tile of queries at a position sees: the first token, and the one behind the last."""
    end = jnp.where(seq_len == 0, 0, jnp.minimum(seq_len, position + p.query_len))
    if p.sliding_window is None:
        return jnp.int32(0), end
    return jnp.clip(position + 1 - p.sliding_window, 0, end), end


def span_of(
    p: Problem, position: jax.Array, seq_len: jax.Array, mine: tuple[jax.Array, jax.Array] | None = None
) -> KeyRange:
    """What a program computes of the tile of queries at a position: of all that it sees, or of `mine`.

    mine: the first token, and the one behind the last.
    """
    tile_kv = jnp.int32(p.tile_kv)
    begin, end = seen_by(p, position, seq_len)
    full_from = jnp.int32(0)
    if p.sliding_window is not None:
        full_from = jnp.maximum(position + p.tile_len - p.sliding_window, 0)
    from_, to = (begin, end) if mine is None else mine
    first = lax.div(from_, tile_kv)
    num_tiles = pl.cdiv(to, tile_kv) - first
    full_to = jnp.clip(lax.div(jnp.minimum(position + 1, end), tile_kv) - first, 0, num_tiles)
    full_from = jnp.clip(pl.cdiv(full_from, tile_kv) - first, 0, full_to)
    return KeyRange(position, begin, end, first, num_tiles, full_from, full_to)
