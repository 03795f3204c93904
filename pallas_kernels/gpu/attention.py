"""Code shared by the two attention kernels: the problem, the ring of tiles of K and V, and how it is filled.

A producer warpgroup fetches K and V by TMA into a ring of slots, a tile of `tile_kv` tokens each: tile i lies
in slot i % num_stages. Two barriers guard a slot: `full` (all copies of a tile have landed) and `free` (its
readers are done with it). The producer's four warps read the block table and start every fourth copy each, so
that none waits for another.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, int4_cache
from pallas_kernels.gpu.common import NUM_WARPS, Extras
from pallas_kernels.gpu.primitives import Primitives
from pallas_kernels.layouts import PackedView, View
from pallas_kernels.support import Arrays, Options, first_seen, sizes_of, view_of

# (first token, number of tokens) -> (their block among the arrays' blocks, their slice of it).
type FindTokens = Callable[[Any, int], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionProblem(Primitives):
    """Static shape of an attention call, and the sizes derived from it."""

    num_kv_heads: int
    group_size: int  # query heads that share a kv head
    query_len: int  # new tokens of a row, or query tokens of a tile
    head_dim: int
    block_size: int
    block_stride: int  # from one block of the call to the next, among the arrays' blocks
    dtype: Any  # of the output, and of q as the kernel reads it
    cache_dtype: Any
    new_dtype: Any  # of the newest tokens in a cache of 4 bits a number
    view: View
    scale: float
    soft_cap: float | None
    sliding_window: int | None
    attention_chunk: int | None
    tile_kv: int  # tokens of a tile of K and V
    num_stages: int  # slots of the ring that the products read
    packed: PackedView | None  # of a cache of 4 bits a number

    @property
    def in_ring(self) -> tuple[Any, ...]:
        """The transforms of tiles as copies bring them: those of operands, unless they are to be widened."""
        return () if self.is_quantised else self.tiled(self.line)

    def tiled(self, width: int) -> tuple[Any, ...]:
        """Return the transforms of operands in shared memory, of rows of this width."""
        transforms: tuple[Any, ...] = common.tiled(width)
        return transforms

    @property
    def is_bounded(self) -> bool:
        """Whether there are tokens before a query that it does not see."""
        return self.most_seen is not None

    @property
    def most_seen(self) -> int | None:
        """The most tokens that a query sees; None: all up to itself."""
        return self.sliding_window if self.attention_chunk is None else self.attention_chunk

    def first_seen(self, position: jax.Array) -> jax.Array | None:
        """Return the first token that a query at `position` sees, as `support.first_seen`."""
        return first_seen(position, self.sliding_window, self.attention_chunk)

    @property
    def is_quantised(self) -> bool:
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def line(self) -> int:
        """Elements of a token's head in memory: head_dim numbers, or half as many bytes of 4-bit codes."""
        return self.head_dim if self.packed is None else self.head_dim // 2

    @property
    def copy_tokens(self) -> int:
        """Tokens of one copy of K or V."""
        return common.copy_tokens(self.block_size, self.tile_kv)

    @property
    def copies_per_tile(self) -> int:
        """Copies that fetch a tile of K, or of V."""
        return self.tile_kv // self.copy_tokens

    @property
    def scale_copies(self) -> int:
        """Copies that fetch a scale per token for a tile of K, or of V; 0 if tokens have none."""
        if self.view.k_scale is None:
            return 0
        return self.tile_kv // common.scale_tokens(self.block_size, self.tile_kv)

    @property
    def packed_copies(self) -> int:
        """Copies that fetch the 4-bit scales and zeros for a tile of K, or of V; 0 for another cache."""
        return 0 if self.packed is None else 2 * int4_cache.num_copies(self.block_size, self.tile_kv)


def problem_fields(arrays: Arrays, options: Options) -> dict[str, Any]:
    """Return the fields of `AttentionProblem` that follow from arguments alone, checked by `ops`."""
    cache = sizes_of(arrays, options)
    return {
        "num_kv_heads": cache.num_kv_heads,
        "group_size": arrays.q.shape[-2] // cache.num_kv_heads,
        "head_dim": cache.head_dim,
        "block_size": cache.block_size,
        "block_stride": common.block_stride(options),
        "cache_dtype": arrays.k_cache.dtype,
        "new_dtype": arrays.q.dtype if options.packed is None else options.packed.k_new.dtype,
        "view": view_of(options),
        "scale": options.scale,
        "soft_cap": options.soft_cap,
        "sliding_window": options.sliding_window,
        "attention_chunk": options.attention_chunk,
        "packed": options.kv_layout.packed_view(),
    }


class Ring(NamedTuple):
    """Tiles of K and V in shared memory, and the barriers of their slots."""

    k: Any  # [num_stages, tile_kv, line]
    v: Any  # [num_stages, tile_kv, line]
    k_full: Any  # [num_stages]: an arrival per copy, or one of the warpgroup that widens
    v_full: Any  # likewise; None where the barriers of K guard both
    k_free: Any  # [num_stages]: an arrival per reader
    v_free: Any  # likewise
    scales: tuple[Any, Any]  # of each token's K and V, [num_stages, tile_kv] float32 each, or None
    packed: Any  # `int4_cache.Scales`, or None

    @property
    def arrays(self) -> tuple[tuple[Any, Any, Any], ...]:
        """(tiles, full, free) of K, and of V, which have barriers of their own."""
        return (self.k, self.k_full, self.k_free), (self.v, self.v_full, self.v_free)


def ring_types(
    p: AttentionProblem,
    tiles: Any,
    num_stages: int,
    *,
    writers: int,
    readers: int,
    by_array: bool,
    of_copies: bool = True,
    by_tensor_core: bool = False,
) -> Ring:
    """Return the types of a `Ring` that copies fill, or a warpgroup (of_copies False), for plgpu.kernel.

    tiles: the type of the slots of K, and of V.
    writers, readers: arrivals at a slot's `full` and `free`.
    by_array: whether K and V have barriers of their own.
    by_tensor_core: whether the readers are products of tcgen05.
    """
    scales = packed = None
    if p.scale_copies:
        scales = plgpu.SMEM((num_stages, p.tile_kv), jnp.float32)
    if p.packed is not None:
        packed = int4_cache.scratch_types(num_stages, p.tile_kv, p.head_dim)
    full = p.barrier(writers, num_stages, of_copies=of_copies)
    free = p.barrier(readers, num_stages, of_tensor_core=by_tensor_core)
    of_v = (full, free) if by_array else (None, None)
    return Ring(tiles, tiles, full, of_v[0], free, of_v[1], (scales, scales), packed)


class Softmax(NamedTuple):
    """A running softmax; maxima are times log2(e)."""

    out: Any  # sum of exp2(s - max) * v, float32: an array, or a tuple of pieces
    max: jax.Array  # [queries]
    sum: jax.Array  # [queries]


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """Return an array of one float32 value in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def factor_of_output(
    state: Softmax, sinks: Callable[[], jax.Array] | None, scale: Callable[[], jax.Array] | None = None
) -> jax.Array:
    """Return the last factor of a softmax's output: scale / (sum with the sinks), and finite without tokens.

    sinks: reads the [queries] logits times log2(e); None if there are none.
    scale: reads the scale of V; None if there is none.
    """
    is_empty, total = state.sum == 0, state.sum
    factor = jnp.full_like(total, 1.0)
    if sinks is not None:
        sink = sinks()
        with_sink = jnp.maximum(state.max, sink)
        factor = jnp.exp2(state.max - with_sink)
        total = total * factor + jnp.exp2(sink - with_sink)
    if scale is not None:
        factor = factor * scale()
    return factor / jnp.where(is_empty, 1.0, total)


def widen_slot(
    p: AttentionProblem, ring: Ring, slot: jax.Array, array: int, target: Any, *newest: Any
) -> None:
    """Widen a slot's tile of a quantised cache into float16, both in shared memory.

    array: 0 for K, 1 for V.
    newest: in a cache of 4 bits a number, the newest tokens of K and their place among the tile's groups.
    """
    source, scales = (ring.k, ring.v)[array].at[slot], ring.scales[array]
    if ring.packed is None:
        factors = None if scales is None else scales.at[slot]
        common.widen(source, target, factors, is_interpreted=p.is_interpreted)
        return
    scale, zero = (each.at[slot] for each in ring.packed[2 * array : 2 * array + 2])
    int4_cache.widen(source, scale, zero, target, *(() if array else newest))


def token_finder(
    p: AttentionProblem, tables: Any, row: jax.Array, start: jax.Array, end: jax.Array, extras: Extras
) -> FindTokens:
    """Return a function from tokens of a sequence to the block that holds them, and their slice of it.

    Only blocks that hold tokens of [start, end) are looked up; tokens beyond them get the nearest such block.

    tables: [num_tables, max_blocks_per_seq] int32 in the GPU's memory; row: the sequence's row of them.
    """
    block_at = common.array_blocks(extras, p.block_stride)
    first_block = lax.div(start, jnp.int32(p.block_size))
    last_block = jnp.maximum(pl.cdiv(end, jnp.int32(p.block_size)) - 1, first_block)

    def find(token: Any, num_tokens: int) -> tuple[jax.Array, Any]:
        column = lax.div(token, jnp.int32(p.block_size))
        block_id = block_at(tables[row, jnp.clip(column, first_block, last_block)])
        offset = lax.rem(token, jnp.int32(p.block_size)) if p.block_size > num_tokens else 0
        return block_id, pl.ds(offset, num_tokens)

    return find


def last_block(
    p: AttentionProblem, tables: Any, row: jax.Array, start: jax.Array, end: jax.Array, extras: Extras
) -> jax.Array:
    """Return which of the arrays' blocks holds the last token of [start, end); if none, the null block."""
    column = lax.div(jnp.maximum(end - 1, 0), jnp.int32(p.block_size))
    block_id = jnp.where(end > start, tables[row, column], 0)
    return common.array_blocks(extras, p.block_stride)(block_id)


def newest_group(
    p: AttentionProblem, tables: Any, row: jax.Array, start: jax.Array, end: jax.Array, extras: Extras
) -> jax.Array:
    """Return which group of a sequence's tokens a cache of 4 bits has not yet encoded; -1 for none."""
    group = extras.packed.new_group[last_block(p, tables, row, start, end, extras)]
    column = lax.div(jnp.maximum(end - 1, 0), jnp.int32(p.block_size))
    return jnp.where(group < 0, -1, column * (p.block_size // int4_cache.GROUP) + group)


def fetch_tile(
    p: AttentionProblem,
    arrays: Iterable[int],
    first_token: jax.Array,
    find: FindTokens,
    gmem: Any,
    extras: Extras,
    ring: Ring,
    slot: jax.Array,
    full: Any,
    kv_head: jax.Array,
    warp: jax.Array,
) -> None:
    """Start this warp's copies of a tile into a slot: of K, of V, or of both, with their scales.

    arrays: 0 for K, 1 for V.
    first_token: of the tile, in its sequence.
    gmem: `support.Arrays`, as refs.
    full: the barrier of the slot.
    """
    numbers = ((gmem.k_cache, p.view.k, ring.k), (gmem.v_cache, p.view.v, ring.v))
    for copy in range(p.copies_per_tile // NUM_WARPS):
        offset = (copy * NUM_WARPS + warp) * p.copy_tokens  # in the tile
        block, tokens = find(first_token + offset, p.copy_tokens)
        for array in arrays:
            cache, location, tiles = numbers[array]
            target = tiles.at[slot, pl.ds(offset, p.copy_tokens)]
            p.copier(p.in_ring)(cache.at[location.at(block, tokens, kv_head)], target, full)
    if p.packed is not None:
        names = [name for array in arrays for name in int4_cache.Scales._fields[2 * array : 2 * array + 2]]
        for number, name in enumerate(names):

            @pl.when(warp == number)
            def _fetch_packed(name: str = name) -> None:
                int4_cache.fetch(
                    name,
                    p.packed,
                    extras.packed,
                    ring.packed,
                    slot=slot,
                    barrier=full,
                    first_token=first_token,
                    find=find,
                    kv_head=kv_head,
                    block_size=p.block_size,
                    copy=p.copier(),
                )

    if p.scale_copies:

        @pl.when(warp < p.scale_copies)
        def _fetch_scales() -> None:
            num_tokens = common.scale_tokens(p.block_size, p.tile_kv)
            offset = warp * num_tokens
            block, tokens = find(first_token + offset, num_tokens)
            for array in arrays:
                location = (p.view.k_scale, p.view.v_scale)[array]
                assert location is not None
                source = extras.token_scales[array].at[location.at(block, tokens, kv_head)]
                target = ring.scales[array].at[slot, pl.ds(offset, num_tokens)]
                p.copier()(source, target, full)
