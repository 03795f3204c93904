"""A program of the prompt kernel: tiles of K and V are fetched, and the softmax over them is taken.

Up to two consumer warpgroups have 64 rows of queries each: row = head * tile_len + token, for example 2 query
heads of 32 tokens. A producer warpgroup fetches tiles of K and V by TMA into a ring, every fourth copy to
each of its warps. Per slot and array there is a barrier `full` (it may be read) and one `free` (every
consumer has done with it).

    S [64, tile_kv] = Q @ K^T          O [64, head_dim] += P @ V

Two consumers take turns: while one multiplies, the other takes its softmax. P goes to the second product from
registers, where O is added up in place; Pallas' interpreter can do neither, so there (`in_registers` False) P
goes through shared memory and the product is added afterwards. Nothing else differs.

Only tiles at the edge of what the queries see are masked: the last ones, those where a window begins, and
none between. There, V outside the tile's tokens is zeroed, for zero times NaN is NaN; of two consumers the
first does it, before it gives the second its turn.

A quantised cache comes into a ring of its own as it is. One more warpgroup widens it from there into the ring
that the consumers read, in float16, which holds every 8-bit number exactly: both are the second operand of a
product, which must lie in shared memory. The scale of K is a factor of the logits; that of V, and of the
output, is the caller's. Scales of each token come into the former ring, too: factors of what is widened. A
cache of 4 bits a number (`_nibbles`) goes the same way; its newest tokens come once, before the tiles.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _gpu, _nibbles
from pallas_kernels._gpu import LOG2E, LOWEST, NUM_WARPS, WGMMA, Extras
from pallas_kernels.layouts import PackedView, Place, View

PER_ROW = WGMMA.reduce(1)  # one number per row of a wgmma's result
WARPGROUP_ROWS = 64
MAX_WARPGROUPS = 2  # consumers of a program
PRODUCER_REGISTERS = 32  # of a thread, where two consumers share 65,536 with all others
WIDENER_REGISTERS = 64
TILE_LENS = (8, 16, 32, 64)  # other lengths are padded to the next of these


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
    def consumer_registers(self) -> int:
        """Of a thread; all warpgroups together have 512 for one thread of each."""
        if self.num_warpgroups < MAX_WARPGROUPS:
            return 256
        return 208 if self.is_quantised else 240

    @property
    def copy_tokens(self) -> int:
        return _gpu.copy_tokens(self.block_size, self.tile_kv)

    @property
    def copies_per_tile(self) -> int:
        return self.tile_kv // self.copy_tokens

    @property
    def scale_copies(self) -> int:
        """Of the scales that each token has; 0 if there are none."""
        if self.view.k_scale is None:
            return 0
        return self.tile_kv // _gpu.scale_tokens(self.block_size, self.tile_kv)

    @property
    def packed_copies(self) -> int:
        """Of the scales and zeros that K has in a cache of 4 bits a number, and of those of V."""
        return 0 if self.packed is None else 2 * _nibbles.num_copies(self.block_size, self.tile_kv)

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
    packed: Any = None  # `_nibbles.Scales`

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
        return plgpu.SMEM((count, size, width), p.dtype, transforms=_gpu.tiled(tiled))

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
            raw = raw._replace(packed=_nibbles.scratch_types(p.num_raw_stages, p.tile_kv, p.head_dim))
            k_new = plgpu.SMEM((_nibbles.GROUP, p.head_dim), p.new_dtype)
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


class Span(NamedTuple):
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
) -> Span:
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
    return Span(position, begin, end, first, num_tiles, full_from, full_to)


def _last_block(p: Problem, span: Span, gmem: Any, extras: Extras, row: jax.Array) -> jax.Array:
    """The place of the span's last token's block; that of the null block, if it has none."""
    column = lax.div(jnp.maximum(span.end - 1, 0), jnp.int32(p.block_size))
    block_id = jnp.where(span.end > span.begin, gmem.block_tables[row, column], 0)
    return _gpu.places(extras, p.block_stride)(block_id)


def produce(
    p: Problem,
    span: Span,
    gmem: Any,
    extras: Extras,
    row: jax.Array,
    kv_head: jax.Array,
    scratch: Scratch,
    warp: jax.Array,
) -> None:
    """Fetch what this warp has of the tiles of K and V."""
    place_of = _gpu.places(extras, p.block_stride)
    # Only blocks that hold tokens of the span are looked up. Copies beyond them fetch the nearest again.
    first_block = lax.div(span.begin, jnp.int32(p.block_size))
    last_block = jnp.maximum(pl.cdiv(span.end, jnp.int32(p.block_size)) - 1, first_block)

    ring, num_stages = (
        (scratch.ring, p.num_stages) if scratch.raw is None else (scratch.raw, p.num_raw_stages)
    )

    if (packed := p.packed) is not None:

        @pl.when(warp == 0)
        def _fetch_newest() -> None:
            its = packed.k_new.at(_last_block(p, span, gmem, extras, row), pl.ds(0, _nibbles.GROUP), kv_head)
            plgpu.copy_gmem_to_smem(extras.packed.k_new.at[its], scratch.k_new, scratch.new_full)

    def fetch(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, jnp.int32(num_stages))

        def tokens_of(place: Any, num_tokens: int) -> tuple[jax.Array, Any]:
            """The block of the tile's tokens from a place on, and where in it they are."""
            token = (span.first + i) * p.tile_kv + place
            column = jnp.clip(lax.div(token, jnp.int32(p.block_size)), first_block, last_block)
            offset = lax.rem(token, jnp.int32(p.block_size)) if p.block_size > num_tokens else 0
            return place_of(gmem.block_tables[row, column]), pl.ds(offset, num_tokens)

        def source(its: Place, place: jax.Array, num_tokens: int) -> Any:
            return its.at(*tokens_of(place, num_tokens), kv_head)

        caches = (gmem.k_cache, p.view.k, p.view.k_scale), (gmem.v_cache, p.view.v, p.view.v_scale)
        for which, ((cache, its, scale), (tiles, full, free)) in enumerate(
            zip(caches, ring.arrays, strict=True)
        ):

            @pl.when(i >= num_stages)
            def _wait(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            for copy in range(p.copies_per_tile // NUM_WARPS):
                place = (copy * NUM_WARPS + warp) * p.copy_tokens  # in the tile
                target = tiles.at[slot, pl.ds(place, p.copy_tokens)]
                plgpu.copy_gmem_to_smem(cache.at[source(its, place, p.copy_tokens)], target, full.at[slot])
            if p.packed is not None:
                for number, name in enumerate(_nibbles.Scales._fields[2 * which : 2 * which + 2]):

                    @pl.when(warp == number)
                    def _fetch_packed(name: str = name, full: Any = full) -> None:
                        at = tokens_of, kv_head, p.block_size
                        _nibbles.fetch(name, p.packed, extras.packed, ring.packed, slot, full.at[slot], *at)

            if scale is not None:

                @pl.when(warp < p.scale_copies)
                def _fetch_scales(which: int = which, scale: Place = scale, full: Any = full) -> None:
                    num_tokens = _gpu.scale_tokens(p.block_size, p.tile_kv)
                    place = warp * num_tokens
                    found = extras.token_scales[which].at[source(scale, place, num_tokens)]
                    target = ring.scales[which].at[slot, pl.ds(place, num_tokens)]
                    plgpu.copy_gmem_to_smem(found, target, full.at[slot])

    lax.fori_loop(0, span.num_tiles, fetch, None)
    for _, _, free in ring.arrays:
        _gpu.drain(free, num_stages, span.num_tiles)


def widen(p: Problem, span: Span, gmem: Any, extras: Extras, row: jax.Array, scratch: Scratch) -> None:
    """Widen the tiles of a quantised cache, from one ring into the other."""
    raw, ring = scratch.raw, scratch.ring
    assert raw is not None
    newest = jnp.int32(-1)
    if p.packed is not None:  # the group of tokens, of all of the row's, that is not yet codes
        group = extras.packed.new_group[_last_block(p, span, gmem, extras, row)]
        column = lax.div(jnp.maximum(span.end - 1, 0), jnp.int32(p.block_size))
        newest = jnp.where(group < 0, -1, column * (p.block_size // _nibbles.GROUP) + group)
        plgpu.barrier_wait(scratch.new_full)

    def widen_tile(i: jax.Array, _: None) -> None:
        slot, raw_slot = lax.rem(i, jnp.int32(p.num_stages)), lax.rem(i, jnp.int32(p.num_raw_stages))
        for which, ((source, source_full, source_free), scales, (target, full, free)) in enumerate(
            zip(raw.arrays, raw.scales, ring.arrays, strict=True)
        ):

            @pl.when(i >= p.num_stages)
            def _wait_for_readers(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            plgpu.barrier_wait(source_full.at[raw_slot])
            if raw.packed is None:
                its = None if scales is None else scales.at[raw_slot]
                _gpu.widen(source.at[raw_slot], target.at[slot], its, is_interpreted=p.is_interpreted)
            else:
                scale, zero = (each.at[raw_slot] for each in raw.packed[2 * which : 2 * which + 2])
                place = newest - (span.first + i) * (p.tile_kv // _nibbles.GROUP)
                news = () if which else (scratch.k_new, place)
                _nibbles.widen(source.at[raw_slot], scale, zero, target.at[slot], *news)
            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[slot])
            plgpu.barrier_arrive(source_free.at[raw_slot])

    lax.fori_loop(0, span.num_tiles, widen_tile, None)
    for _, _, free in ring.arrays:
        _gpu.drain(free, p.num_stages, span.num_tiles)


def load_queries(
    p: Problem, q_gmem: Any, kv_head: jax.Array, first_head: jax.Array, scratch: Scratch, warpgroup: jax.Array
) -> None:
    """The queries of the warpgroup's heads; a head that the group does not have has the last one's."""
    for h in range(p.warpgroup_heads):
        head = kv_head * p.group_size + jnp.minimum(first_head + h, p.group_size - 1)
        target = scratch.q.at[warpgroup, pl.ds(h * p.tile_len, p.tile_len)]
        plgpu.copy_gmem_to_smem(q_gmem.at[:, head], target, scratch.q_full.at[warpgroup])
    plgpu.barrier_wait(scratch.q_full.at[warpgroup])


class Softmax(NamedTuple):
    """A softmax under way; maxima times log2(e)."""

    out: jax.Array  # [64, head_dim] float32, sum of exp2(s - max) * v
    max: jax.Array  # [64]
    sum: jax.Array  # [64]


def consume(
    p: Problem,
    span: Span,
    extras: Extras,
    kv_head: jax.Array,
    first_head: jax.Array,
    scratch: Scratch,
    warpgroup: jax.Array,
) -> Softmax:
    """The softmax of the warpgroup's rows over the span's tiles; first_head among all query heads."""
    k_scale = None if extras.k_scale is None else extras.k_scale[kv_head]
    takes_turns, ring = p.num_warpgroups == MAX_WARPGROUPS, scratch.ring
    slopes = None
    if extras.alibi_slopes is not None:
        slopes = _per_row(p, extras.alibi_slopes, first_head) * LOG2E

    def give_and_take_turn() -> None:
        plgpu.barrier_arrive(scratch.turn)
        plgpu.barrier_wait(scratch.turn)

    def take(i: jax.Array, state: Softmax, *, is_edge: bool) -> Softmax:
        slot = lax.rem(i, jnp.int32(p.num_stages))
        first_token = (span.first + i) * p.tile_kv
        plgpu.barrier_wait(ring.k_full.at[slot])

        def scores(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, scratch.q.at[warpgroup], ring.k.at[slot].T)
            if takes_turns:
                give_and_take_turn()
            return acc[...]

        s = pl.run_scoped(scores, plgpu.ACC((WARPGROUP_ROWS, p.tile_kv), jnp.float32))
        plgpu.barrier_arrive(ring.k_free.at[slot])
        s, factor = _logits(p, span, s, k_scale, first_token, slopes, is_edge=is_edge)
        largest = jnp.maximum(state.max, s.max(axis=1) * factor)
        rescale = jnp.exp2(state.max - largest)
        weights = jnp.exp2(s * factor - lax.broadcast_in_dim(largest, s.shape, [0]))
        total = state.sum * rescale + weights.sum(axis=1)
        out = state.out * lax.broadcast_in_dim(rescale, state.out.shape, [0])
        weights = weights.astype(p.dtype)
        if takes_turns:
            # What comes before stays before the turn is given away.
            out, total, largest, weights = lax.optimization_barrier((out, total, largest, weights))
        if is_edge or not takes_turns:
            plgpu.barrier_wait(ring.v_full.at[slot])
        if is_edge:
            is_first = (warpgroup == 0) & ((first_token < span.begin) | (first_token + p.tile_kv > span.end))
            pl.when(is_first)(lambda: _zero_stale_tokens(p, span, ring.v.at[slot], first_token))
        if takes_turns:
            plgpu.barrier_arrive(scratch.turn)
            if not is_edge:
                plgpu.barrier_wait(ring.v_full.at[slot])
            plgpu.barrier_wait(scratch.turn)
        out = _add_weighted(p, out, weights, scratch, slot, warpgroup)
        plgpu.barrier_arrive(ring.v_free.at[slot])
        return Softmax(out, largest, total)

    if takes_turns:  # the second begins half a turn later
        pl.when(warpgroup == 1)(give_and_take_turn)
    state = nothing(p.head_dim)
    bounds = (jnp.int32(0), span.full_from, span.full_to, span.num_tiles)
    for k, is_edge in enumerate((True, False, True)):
        if k or p.sliding_window is not None:
            state = lax.fori_loop(bounds[k], bounds[k + 1], _with(take, is_edge), state)
    if takes_turns:
        pl.when(warpgroup == 0)(give_and_take_turn)
    return state


def _with(take: Callable[..., Softmax], is_edge: bool) -> Callable[[jax.Array, Softmax], Softmax]:
    return lambda i, state: take(i, state, is_edge=is_edge)


def nothing(width: int) -> Softmax:
    """A softmax over no tokens, of so many columns of the output."""
    return Softmax(
        _filled((WARPGROUP_ROWS, width), 0.0, WGMMA),
        _filled((WARPGROUP_ROWS,), LOWEST, PER_ROW),
        _filled((WARPGROUP_ROWS,), 0.0, PER_ROW),
    )


def _filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _logits(
    p: Problem,
    span: Span,
    s: jax.Array,
    k_scale: jax.Array | None,
    first_token: jax.Array,
    slopes: jax.Array | None,
    *,
    is_edge: bool,
) -> tuple[jax.Array, float]:
    """What times the factor returned is the logits times log2(e), [64, tile_kv]; -inf where unseen."""
    factor = p.scale * LOG2E
    if k_scale is not None:
        s = s * k_scale
    if p.soft_cap is not None:  # tanh(x) = 1 - 2 / (1 + exp(2 x)): good to 1e-7, the GPU's own to 5e-4
        s = (1 - 2 / (1 + jnp.exp2(s * (2 * p.scale / p.soft_cap * LOG2E)))) * (p.soft_cap * LOG2E)
        factor = 1.0
    elif slopes is not None or factor <= 0:  # else it is multiplied where the maximum is subtracted
        s, factor = s * factor, 1.0
    if slopes is None and not is_edge:
        return s, factor
    row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=WGMMA)
    position = span.position + (row & (p.tile_len - 1))
    token = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=WGMMA) + first_token
    if slopes is not None:
        s = s + lax.broadcast_in_dim(slopes, s.shape, [0]) * (token - position).astype(jnp.float32)
    if is_edge:
        seen = (token <= position) & (token < span.end)
        if p.sliding_window is not None:
            seen = seen & (token > position - p.sliding_window)
        s = jnp.where(seen, s, -jnp.inf)
    return s, factor


def _zero_stale_tokens(p: Problem, span: Span, v: Any, first_token: jax.Array) -> None:
    """Zero a tile's V outside the span."""
    for row in range(0, p.tile_kv, WARPGROUP_ROWS):
        place = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS, 64), 0, layout=WGMMA) + (first_token + row)
        for column in _gpu.columns_of(p.head_dim):
            piece = v.at[pl.ds(row, WARPGROUP_ROWS), pl.ds(column, 64)]
            old = piece[...]
            piece[...] = jnp.where((place >= span.begin) & (place < span.end), old, jnp.zeros_like(old))
    plgpu.commit_smem()


def _add_weighted(
    p: Problem, out: jax.Array, weights: jax.Array, scratch: Scratch, slot: jax.Array, warpgroup: jax.Array
) -> jax.Array:
    """out + weights @ V, for the V of a slot."""
    if p.in_registers:

        def add(acc: Any) -> None:
            plgpu.wgmma(acc, weights, scratch.ring.v.at[slot])

        return pl.run_state(add)(plgpu.ACC.init(out))
    scratch.p.at[warpgroup][...] = weights
    plgpu.commit_smem()

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, scratch.p.at[warpgroup], scratch.ring.v.at[slot])
        return acc[...]

    return out + pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, p.head_dim), jnp.float32))


def _normalised(p: Problem, state: Softmax, extras: Extras, first_head: jax.Array) -> jax.Array:
    """out / sum, with the sinks' shares in the sum; zeros where there was no token."""
    out, largest, total = state
    factor = jnp.full_like(total, 1.0)
    is_empty = total == 0
    if extras.sinks is not None:
        sinks = _per_row(p, extras.sinks, first_head) * LOG2E
        with_sink = jnp.maximum(largest, sinks)
        factor = jnp.exp2(largest - with_sink)
        total = total * factor + jnp.exp2(sinks - with_sink)
    factor = factor / jnp.where(is_empty, 1.0, total)
    return out * lax.broadcast_in_dim(factor, out.shape, [0])


def _per_row(p: Problem, values_gmem: Any, first_head: jax.Array) -> jax.Array:
    """The numbers of the rows' heads, of values_gmem [num_q_heads], as [64]."""
    shape = WARPGROUP_ROWS, 8  # the narrowest result that a wgmma has
    head = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA), p.tile_len)
    values = _filled(shape, 0.0, WGMMA)
    last = values_gmem.shape[0] - 1
    for h in range(p.warpgroup_heads):
        values = jnp.where(head == h, values_gmem[jnp.minimum(first_head + h, last)], values)
    return values.max(axis=1)


def store_output(
    p: Problem,
    pieces: Iterable[tuple[int, Softmax]],
    extras: Extras,
    out_gmem: Any,
    kv_head: jax.Array,
    first_head: jax.Array,
    scratch: Scratch,
    warpgroup: jax.Array,
) -> None:
    """Write the heads that the group has, of a softmax in pieces: each with its first column."""
    for column, piece in pieces:
        out = _normalised(p, piece, extras, kv_head * p.group_size + first_head)
        scratch.q.at[warpgroup, :, pl.ds(column, out.shape[1])][...] = out.astype(p.dtype)
    plgpu.commit_smem()
    for h in range(p.warpgroup_heads):

        @pl.when(first_head + h < p.group_size)
        def _copy(h: int = h) -> None:
            source = scratch.q.at[warpgroup, pl.ds(h * p.tile_len, p.tile_len)]
            plgpu.copy_smem_to_gmem(source, out_gmem.at[:, kv_head * p.group_size + first_head + h])

    plgpu.wait_smem_to_gmem(0)
