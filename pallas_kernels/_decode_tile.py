"""A unit of work of decode attention: tiles of K and V are fetched, and the softmax over them is taken.

A program has two Pallas threads (warpgroups). The producer's four warps read the block table and start the
TMA copies of a tile's blocks into a ring of `num_stages` slots, every fourth copy each, so that none waits
for another; the consumer computes. Per slot there are two barriers: `full` (all copies of a tile have landed)
and `empty` (the consumer has done with it). Both threads number the tiles of the whole program from 0; tile i
lives in slot i % num_stages. The queries of a unit of work come the same way, in a ring of two slots.

The products are turned round, so that the tokens fill the 64 rows a wgmma has and the few queries that share
a kv head (the heads of a group, for each new token of the row, padded to a multiple of 8) are its columns:

    S^T [tile_kv, heads] = K [tile_kv, head_dim] @ Q^T          O^T [head_dim, heads] = V^T @ P^T

Columns of a wgmma are independent: what lies in those of the padding never meets a live head. A tile that
is not wholly inside [start, end) has stale tokens: their scores become -inf and their V is zeroed in shared
memory, for zero times NaN is NaN. Maxima start at a large negative number instead of -inf, so that no
difference of two maxima is NaN. Logits are kept times log2(e): exp2 is the GPU's own.

A quantised cache comes into the ring as it is and is widened to float16, a tile at a time: V on its way to
another place in shared memory, K likewise or, where there are registers for it, on its way into its product.
(Pallas' interpreter knows no product of registers: there K goes the way of V.) The scales of a head are
factors of the logits and of the output; those of each token come into the ring beside its numbers, and are
factors of what is widened. Of a cache of 4 bits a number (`_nibbles`) all goes that way; what the row's last
block has of its newest tokens in full comes with the queries.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _gpu, _nibbles, tuning
from pallas_kernels._gpu import FLOAT16_MAX, LOG2E, LOWEST, NUM_WARPS, WGMMA, Extras
from pallas_kernels.layouts import PackedView, View
from pallas_kernels.support import Arrays, BlockSparse, Options, sizes_of, view_of
from pallas_kernels.tuning import TuningConfig

NUM_QUERY_SLOTS = 2  # units of work whose queries are there or under way
PER_HEAD = WGMMA.reduce(0)  # one number per column of a wgmma's result


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static shape of a call, and what follows from it."""

    num_kv_heads: int
    group_size: int
    query_len: int  # new tokens of a row
    head_dim: int
    block_size: int
    block_stride: int  # from one block of a part to the next, among the arrays' blocks
    dtype: Any  # of q and the output
    cache_dtype: Any
    new_dtype: Any  # of the newest tokens in a cache of 4 bits a number
    view: View
    scale: float
    soft_cap: float | None
    sliding_window: int | None
    block_sparse: BlockSparse | None
    tile_kv: int
    num_stages: int
    has_table_rows: bool  # whether items say which row of the block tables a row has
    is_interpreted: bool
    widens_in_registers: bool  # K of a quantised cache
    packed: PackedView | None  # of a cache of 4 bits a number

    @property
    def num_columns(self) -> int:
        """Queries of a row that share a kv head, padded to what a wgmma takes as columns.

        Column i * group_size + g is query head g of the group for the row's new token i.
        """
        return tuning.num_columns(self.group_size * self.query_len)

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(first row, rows) of the wgmmas that make the output's head_dim rows: multiples of 64.

        Those of head_dim 80, 96 and 112 overlap, and compute the rows they share twice, to the same bits.
        """
        if self.head_dim % 64 == 0:
            return ((0, self.head_dim),)
        return ((0, 64), (self.head_dim - 64, 64))

    @property
    def piece_rows(self) -> int:
        return self.pieces[0][1]

    @property
    def is_quantised(self) -> bool:
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @property
    def operand_dtype(self) -> Any:
        """What is multiplied. float16 holds every 8-bit number exactly, and is quickly made of them."""
        return jnp.dtype(jnp.float16) if self.is_quantised else self.dtype

    @property
    def copy_tokens(self) -> int:
        return _gpu.copy_tokens(self.block_size, self.tile_kv)

    @property
    def copies_per_tile(self) -> int:
        """Of K, and of V."""
        return self.tile_kv // self.copy_tokens

    @property
    def scale_copies(self) -> int:
        """Of the scales that each token's K has, and of those of V; 0 if there are none."""
        if self.view.k_scale is None:
            return 0
        return self.tile_kv // _gpu.scale_tokens(self.block_size, self.tile_kv)

    @property
    def packed_copies(self) -> int:
        """Of the scales and zeros of a cache of 4 bits a number."""
        its = len(_nibbles.Scales._fields) * _nibbles.num_copies(self.block_size, self.tile_kv)
        return 0 if self.packed is None else its

    @property
    def line(self) -> int:
        """What the ring has of a token's head: a number each, or half as many bytes."""
        return self.head_dim if self.packed is None else self.head_dim // 2


def make_problem(
    arrays: Arrays, options: Options, config: TuningConfig, query_len: int, *, is_interpreted: bool
) -> Problem:
    """The problem of arguments that `ops` has checked, with `query_len` lines of q a row."""
    q, cache = arrays.q, sizes_of(arrays, options)
    return Problem(
        num_kv_heads=cache.num_kv_heads,
        group_size=q.shape[1] // cache.num_kv_heads,
        query_len=query_len,
        head_dim=cache.head_dim,
        block_size=cache.block_size,
        block_stride=_gpu.block_stride(options),
        dtype=q.dtype,
        cache_dtype=arrays.k_cache.dtype,
        new_dtype=q.dtype if options.packed is None else options.packed.k_new.dtype,
        view=view_of(options),
        scale=options.scale,
        soft_cap=options.soft_cap,
        sliding_window=options.sliding_window,
        block_sparse=options.block_sparse,
        tile_kv=config.tile_kv,
        num_stages=config.num_stages,
        has_table_rows=arrays.table_rows is not None,
        is_interpreted=is_interpreted,
        widens_in_registers=not is_interpreted
        and tuning.widens_in_registers(
            cache.head_dim, arrays.k_cache.dtype, is_scaled=options.token_scales is not None
        ),
        packed=options.kv_layout.packed_view(),
    )


class Scratch(NamedTuple):
    """Shared memory and barriers of one program; all live as long as it."""

    q_rows: Any  # [NUM_QUERY_SLOTS, pieces, num_columns, piece_rows] as they come from memory
    q: Any  # [num_columns, head_dim] as a wgmma wants it
    k: Any  # [num_stages, tile_kv, line] the ring
    v: Any  # [num_stages, tile_kv, line]
    k_scales: Any  # [num_stages, tile_kv] of each token, else None
    v_scales: Any  # [num_stages, tile_kv] likewise
    packed: Any  # `_nibbles.Scales`, else None
    k_new: Any  # [NUM_QUERY_SLOTS, 16, head_dim] the newest tokens of K, else None
    k16: Any  # [tile_kv, head_dim] the widened tile, else None
    v16: Any  # [tile_kv, head_dim] likewise
    p: Any  # [num_columns, tile_kv] the weights of one tile
    q_full: Any  # [NUM_QUERY_SLOTS], an arrival per copy
    q_empty: Any  # [NUM_QUERY_SLOTS]
    full: Any  # [num_stages], an arrival per copy
    empty: Any  # [num_stages]


def scratch_types(p: Problem) -> Scratch:
    """The types of `Scratch`, for plgpu.kernel."""
    as_operand = _gpu.tiled(p.line)
    in_ring = () if p.is_quantised else as_operand
    tile = (p.tile_kv, p.head_dim)
    widened = plgpu.SMEM(tile, p.operand_dtype, transforms=as_operand) if p.is_quantised else None
    scales = plgpu.SMEM((p.num_stages, p.tile_kv), jnp.float32) if p.scale_copies else None
    packed = k_new = None
    if p.packed is not None:
        packed = _nibbles.scratch_types(p.num_stages, p.tile_kv, p.head_dim)
        k_new = plgpu.SMEM((NUM_QUERY_SLOTS, _nibbles.GROUP, p.head_dim), p.new_dtype)
    num_query_copies = len(p.pieces) * p.query_len + (p.packed is not None)
    num_copies = 2 * (p.copies_per_tile + p.scale_copies) + p.packed_copies
    return Scratch(
        q_rows=plgpu.SMEM((NUM_QUERY_SLOTS, len(p.pieces), p.num_columns, p.piece_rows), p.dtype),
        q=plgpu.SMEM((p.num_columns, p.head_dim), p.operand_dtype, transforms=as_operand),
        k=plgpu.SMEM((p.num_stages, p.tile_kv, p.line), p.cache_dtype, transforms=in_ring),
        v=plgpu.SMEM((p.num_stages, p.tile_kv, p.line), p.cache_dtype, transforms=in_ring),
        k_scales=scales,
        v_scales=scales,
        packed=packed,
        k_new=k_new,
        k16=None if p.widens_in_registers else widened,
        v16=widened,
        p=plgpu.SMEM((p.num_columns, p.tile_kv), p.operand_dtype, transforms=as_operand),
        q_full=plgpu.Barrier(num_arrivals=num_query_copies, num_barriers=NUM_QUERY_SLOTS),
        q_empty=plgpu.Barrier(num_barriers=NUM_QUERY_SLOTS),
        full=plgpu.Barrier(num_arrivals=num_copies, num_barriers=p.num_stages),
        empty=plgpu.Barrier(num_barriers=p.num_stages),
    )


class Span(NamedTuple):
    """A unit of work: the tokens [start, end) of a row that one softmax runs over, for one kv head."""

    row: jax.Array
    table: jax.Array  # the row's row of the block tables
    kv_head: jax.Array
    position: jax.Array  # of the row's first new token
    start: jax.Array
    end: jax.Array

    def tiles(self, p: Problem) -> tuple[jax.Array, jax.Array]:
        """First tile and number of tiles; tiles lie on multiples of tile_kv."""
        first = lax.div(self.start, jnp.int32(p.tile_kv))
        return first, jnp.maximum(pl.cdiv(self.end, jnp.int32(p.tile_kv)) - first, 0)


def produce(
    p: Problem,
    span: Span,
    unit: jax.Array,
    gmem: Any,
    extras: Extras,
    scratch: Scratch,
    done: jax.Array,
    warp: jax.Array,
) -> jax.Array:
    """Fetch what this warp has of the program's unit of that number; `done` tiles went before.

    Returns the number of tiles fetched so far.
    """
    pl.when(warp == 0)(lambda: _fetch_queries(p, span, unit, gmem, extras, scratch))
    first_tile, num_tiles = span.tiles(p)
    place_of = _gpu.places(extras, p.block_stride)
    # Only blocks that hold tokens of the span are looked up. Copies beyond them fetch the nearest again.
    first_block = lax.div(span.start, jnp.int32(p.block_size))
    last_block = jnp.maximum(pl.cdiv(span.end, jnp.int32(p.block_size)) - 1, first_block)

    def fetch(i: jax.Array, _: None) -> None:
        slot = lax.rem(done + i, jnp.int32(p.num_stages))

        @pl.when(done + i >= p.num_stages)
        def _wait() -> None:
            plgpu.barrier_wait(scratch.empty.at[slot])

        def source(place: Any, num_tokens: int) -> tuple[jax.Array, Any]:
            """The block of the tile's tokens from a place on, and where in it they are."""
            token = (first_tile + i) * p.tile_kv + place
            column = lax.div(token, jnp.int32(p.block_size))
            block_id = place_of(gmem.block_tables[span.table, jnp.clip(column, first_block, last_block)])
            offset = lax.rem(token, jnp.int32(p.block_size)) if p.block_size > num_tokens else 0
            return block_id, pl.ds(offset, num_tokens)

        for copy in range(p.copies_per_tile // NUM_WARPS):
            place = (copy * NUM_WARPS + warp) * p.copy_tokens  # in the tile
            block_id, tokens = source(place, p.copy_tokens)
            k, v = (its.at(block_id, tokens, span.kv_head) for its in (p.view.k, p.view.v))
            target = (slot, pl.ds(place, p.copy_tokens))
            plgpu.copy_gmem_to_smem(gmem.k_cache.at[k], scratch.k.at[target], scratch.full.at[slot])
            plgpu.copy_gmem_to_smem(gmem.v_cache.at[v], scratch.v.at[target], scratch.full.at[slot])
        if p.packed is not None:
            for number, name in enumerate(_nibbles.Scales._fields):

                @pl.when(warp == number)
                def _fetch_packed(name: str = name) -> None:
                    ring, full = scratch.packed, scratch.full.at[slot]
                    at = source, span.kv_head, p.block_size
                    _nibbles.fetch(name, p.packed, extras.packed, ring, slot, full, *at)

        if p.scale_copies:

            @pl.when(warp < p.scale_copies)
            def _fetch_scales() -> None:
                num_tokens = _gpu.scale_tokens(p.block_size, p.tile_kv)
                place = warp * num_tokens
                block_id, tokens = source(place, num_tokens)
                target = (slot, pl.ds(place, num_tokens))
                places = [its for its in (p.view.k_scale, p.view.v_scale) if its is not None]
                rings = scratch.k_scales, scratch.v_scales
                for its, scales, ring in zip(places, extras.token_scales, rings, strict=True):
                    found = scales.at[its.at(block_id, tokens, span.kv_head)]
                    plgpu.copy_gmem_to_smem(found, ring.at[target], scratch.full.at[slot])

    lax.fori_loop(0, num_tiles, fetch, None)
    return done + num_tiles


def _last_block(p: Problem, span: Span, gmem: Any, extras: Extras) -> jax.Array:
    """The place of the span's last token's block; that of the null block, if it has none."""
    column = lax.div(jnp.maximum(span.end - 1, 0), jnp.int32(p.block_size))
    block_id = jnp.where(span.end > span.start, gmem.block_tables[span.table, column], 0)
    return _gpu.places(extras, p.block_stride)(block_id)


def _fetch_queries(
    p: Problem, span: Span, unit: jax.Array, gmem: Any, extras: Extras, scratch: Scratch
) -> None:
    slot = lax.rem(unit, jnp.int32(NUM_QUERY_SLOTS))

    @pl.when(unit >= NUM_QUERY_SLOTS)
    def _wait_for_slot() -> None:
        plgpu.barrier_wait(scratch.q_empty.at[slot])

    for token in range(p.query_len):
        heads, columns = group_heads(p, span.kv_head, token)
        for i, (first, size) in enumerate(p.pieces):
            source = gmem.q.at[span.row * p.query_len + token, heads, pl.ds(first, size)]
            plgpu.copy_gmem_to_smem(source, scratch.q_rows.at[slot, i, columns], scratch.q_full.at[slot])
    if p.packed is not None:
        its = p.packed.k_new.at(_last_block(p, span, gmem, extras), pl.ds(0, _nibbles.GROUP), span.kv_head)
        plgpu.copy_gmem_to_smem(extras.packed.k_new.at[its], scratch.k_new.at[slot], scratch.q_full.at[slot])


class Softmax(NamedTuple):
    """A softmax under way; maxima times log2(e)."""

    out: tuple[jax.Array, ...]  # per piece [rows, num_columns] float32, sum of exp2(s - max) * v
    max: jax.Array  # [num_columns]
    sum: jax.Array  # [num_columns]


def nothing(p: Problem) -> Softmax:
    """A softmax over no tokens."""
    return Softmax(
        tuple(
            plgpu.layout_cast(jnp.full((rows, p.num_columns), 0.0, jnp.float32), WGMMA)
            for _, rows in p.pieces
        ),
        plgpu.layout_cast(jnp.full((p.num_columns,), LOWEST, jnp.float32), PER_HEAD),
        plgpu.layout_cast(jnp.full((p.num_columns,), 0.0, jnp.float32), PER_HEAD),
    )


def consume(
    p: Problem, span: Span, unit: jax.Array, gmem: Any, extras: Extras, scratch: Scratch, done: jax.Array
) -> tuple[Softmax, jax.Array]:
    """The softmax over the span, as its tiles arrive. Returns it and the number of tiles taken so far."""
    _load_queries(p, unit, scratch)
    # Of the logits times log2(e); with a soft cap, of twice the argument of tanh.
    factor = p.scale * LOG2E if p.soft_cap is None else 2 * p.scale / p.soft_cap * LOG2E
    if extras.k_scale is not None:
        factor = extras.k_scale[span.kv_head] * factor
    slopes = None
    if extras.alibi_slopes is not None:
        slopes = _per_head_values(p, extras.alibi_slopes, span.kv_head, p.tile_kv) * LOG2E
    first_tile, num_tiles = span.tiles(p)
    query_slot, newest = lax.rem(unit, jnp.int32(NUM_QUERY_SLOTS)), None
    if p.packed is not None:  # the group of tokens, of all of the row's, that is not yet codes
        group = extras.packed.new_group[_last_block(p, span, gmem, extras)]
        first_group = lax.div(jnp.maximum(span.end - 1, 0), jnp.int32(p.block_size)) * (
            p.block_size // _nibbles.GROUP
        )
        newest = jnp.where(group < 0, -1, first_group + group)

    def take(i: jax.Array, state: Softmax) -> Softmax:
        slot = lax.rem(done + i, jnp.int32(p.num_stages))
        first_token = (first_tile + i) * p.tile_kv
        if newest is None:
            k, v = _await_tile(p, scratch, slot)
        else:
            place = newest - (first_tile + i) * (p.tile_kv // _nibbles.GROUP)
            k, v = _await_packed_tile(scratch, slot, scratch.k_new.at[query_slot], place)
        s = _logits(p, span, scratch.q, k, first_token, factor, slopes)
        largest = jnp.maximum(state.max, s.max(axis=0))
        weights = jnp.exp2(s - lax.broadcast_in_dim(largest, s.shape, [1]))
        rescale = jnp.exp2(state.max - largest)
        total = state.sum * rescale + weights.sum(axis=0)
        scratch.p.T[...] = weights.astype(p.operand_dtype)
        _zero_stale_tokens(p, span, v, first_token)
        plgpu.commit_smem()
        out = _add_weighted(p, v, scratch.p, rescale, state.out)
        if not p.is_quantised:
            plgpu.barrier_arrive(scratch.empty.at[slot])
        return Softmax(out, largest, total)

    state = lax.fori_loop(0, num_tiles, take, nothing(p))
    if p.packed is not None:
        plgpu.barrier_arrive(scratch.q_empty.at[query_slot])
    return state, done + num_tiles


def _load_queries(p: Problem, unit: jax.Array, scratch: Scratch) -> None:
    """The unit's queries into scratch.q, through registers: TMA cannot tile fewer than eight rows."""
    slot = lax.rem(unit, jnp.int32(NUM_QUERY_SLOTS))
    plgpu.barrier_wait(scratch.q_full.at[slot])
    for i, (first, size) in enumerate(p.pieces):
        q = plgpu.load(scratch.q_rows.at[slot, i].T, layout=WGMMA, optimized=False)
        if p.operand_dtype == jnp.float16 and p.dtype == jnp.bfloat16:  # whose numbers go further
            q = jnp.clip(q.astype(jnp.float32), -FLOAT16_MAX, FLOAT16_MAX)
        scratch.q.at[:, pl.ds(first, size)].T[...] = q.astype(p.operand_dtype)
    plgpu.commit_smem()
    if p.packed is None:  # else the slot has the newest tokens, too
        plgpu.barrier_arrive(scratch.q_empty.at[slot])


def _await_tile(p: Problem, scratch: Scratch, slot: jax.Array) -> tuple[Any, Any]:
    """K and V of a slot, [tile_kv, head_dim], when they are there. Widened, they leave the slot at once."""
    plgpu.barrier_wait(scratch.full.at[slot])
    if not p.is_quantised:
        return scratch.k.at[slot], scratch.v.at[slot]
    k, k_scales, v_scales = scratch.k16, None, None
    if p.scale_copies:
        k_scales, v_scales = scratch.k_scales.at[slot], scratch.v_scales.at[slot]
    if p.widens_in_registers:
        k = plgpu.layout_cast(_gpu.widened(scratch.k.at[slot], is_interpreted=p.is_interpreted), WGMMA)
    else:
        _gpu.widen(scratch.k.at[slot], scratch.k16, k_scales, is_interpreted=p.is_interpreted)
    _gpu.widen(scratch.v.at[slot], scratch.v16, v_scales, is_interpreted=p.is_interpreted)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.empty.at[slot])
    return k, scratch.v16


def _await_packed_tile(scratch: Scratch, slot: jax.Array, k_new: Any, place: jax.Array) -> tuple[Any, Any]:
    """The same of a cache of 4 bits a number; place: of the newest tokens, among the tile's groups."""
    plgpu.barrier_wait(scratch.full.at[slot])
    scales = _nibbles.Scales(*(ring.at[slot] for ring in scratch.packed))
    _nibbles.widen(scratch.k.at[slot], scales.k_scale, scales.k_zero, scratch.k16, k_new, place)
    _nibbles.widen(scratch.v.at[slot], scales.v_scale, scales.v_zero, scratch.v16)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.empty.at[slot])
    return scratch.k16, scratch.v16


def _logits(
    p: Problem, span: Span, q: Any, k: Any, first_token: jax.Array, factor: Any, slopes: jax.Array | None
) -> jax.Array:
    """A tile's logits times log2(e), [tile_kv, num_columns]; -inf for what is not seen."""

    def scores(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, k, q.T)
        return acc[...]

    s = pl.run_scoped(scores, plgpu.ACC((p.tile_kv, p.num_columns), jnp.float32)) * factor
    if p.soft_cap is not None:  # tanh(x) = 1 - 2 / (1 + exp(2 x)): good to 1e-7, the GPU's own to 5e-4
        s = (1 - 2 / (1 + jnp.exp2(s))) * (p.soft_cap * LOG2E)
    token = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=WGMMA) + first_token
    position = span.position if p.query_len == 1 else span.position + _token_of_column(p, s.shape)
    if slopes is not None:
        s = s + slopes * (token - position).astype(jnp.float32)
    seen = (token >= span.start) & (token < span.end)
    if p.query_len > 1:
        seen = seen & (token <= position)
        if p.sliding_window is not None:
            seen = seen & (token > position - p.sliding_window)
    if p.block_sparse is not None:
        seen = seen & _is_kept(p, p.block_sparse, token, span)
    return jnp.where(seen, s, -jnp.inf)


def _zero_stale_tokens(p: Problem, span: Span, v: Any, first_token: jax.Array) -> None:
    """Zero a tile's V outside the span."""

    @pl.when((first_token < span.start) | (first_token + p.tile_kv > span.end))
    def _zero() -> None:
        place = plgpu.broadcasted_iota(jnp.int32, (p.tile_kv, 64), 0, layout=WGMMA) + first_token
        for column in _gpu.columns_of(p.head_dim):  # in parts, to need no more registers than the rest
            piece = v.at[:, pl.ds(column, 64)]
            old = piece[...]
            piece[...] = jnp.where((place >= span.start) & (place < span.end), old, jnp.zeros_like(old))


def _add_weighted(
    p: Problem, v: Any, weights: Any, rescale: jax.Array, out: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """The output's pieces, rescaled, plus a tile's V^T @ weights^T."""
    new = []
    for (first, rows), old in zip(p.pieces, out, strict=True):

        def weighted(acc: Any, first: int = first, rows: int = rows) -> jax.Array:
            plgpu.wgmma(acc, v.at[:, pl.ds(first, rows)].T, weights.T)
            return acc[...]

        product = pl.run_scoped(weighted, plgpu.ACC((rows, p.num_columns), jnp.float32))
        new.append(old * lax.broadcast_in_dim(rescale, old.shape, [1]) + product)
    return tuple(new)


def _is_kept(p: Problem, sparse: BlockSparse, token: jax.Array, span: Span) -> jax.Array:
    """Whether the block-sparse pattern keeps a token [tile_kv, num_columns] for the head of its column."""
    heads = p.group_size * p.num_kv_heads
    if sparse.head_sliding_step >= 0:
        column = plgpu.broadcasted_iota(jnp.int32, token.shape, 1, layout=WGMMA)
        head = column + (sparse.tp_rank * heads + span.kv_head * p.group_size)
        offset = head * sparse.head_sliding_step + 1
    else:
        offset = 1 - sparse.head_sliding_step * (sparse.tp_rank * p.num_kv_heads + span.kv_head)
    block = lax.div(token, jnp.full_like(token, sparse.block_size))
    own_block = lax.div(span.position, jnp.int32(sparse.block_size))
    is_vertical = lax.rem(block + offset, jnp.full_like(token, sparse.vertical_stride)) == 0
    return is_vertical | (block > own_block - sparse.local_blocks)


def normalised(p: Problem, state: Softmax, extras: Extras, kv_head: jax.Array) -> list[jax.Array]:
    """out / sum times v_scale, with the sinks' shares in the sum; zeros where there was no token."""
    out, largest, total = state
    is_empty = total == 0
    factor = jnp.full_like(total, 1.0)
    if extras.sinks is not None:
        sinks = _per_head_values(p, extras.sinks, kv_head, 64).max(axis=0) * LOG2E
        with_sink = jnp.maximum(largest, sinks)
        rescale = jnp.exp2(largest - with_sink)
        total = total * rescale + jnp.exp2(sinks - with_sink)
        factor = rescale
    if extras.v_scale is not None:
        factor = factor * extras.v_scale[kv_head]
    factor = factor / jnp.where(is_empty, 1.0, total)
    return [piece * lax.broadcast_in_dim(factor, piece.shape, [1]) for piece in out]


def _token_of_column(p: Problem, shape: tuple[int, ...]) -> jax.Array:
    """Which of the row's new tokens a column [rows, num_columns] belongs to."""
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
    return lax.div(column, jnp.full_like(column, p.group_size))


def _per_head_values(p: Problem, values_gmem: Any, kv_head: jax.Array, num_rows: int) -> jax.Array:
    """The group's part of values_gmem [num_q_heads] as [num_rows, num_columns]; anything in the padding."""
    head = plgpu.broadcasted_iota(jnp.int32, (num_rows, p.num_columns), 1, layout=WGMMA)
    if p.query_len > 1:
        head = lax.rem(head, jnp.full_like(head, p.group_size))
    values = plgpu.layout_cast(jnp.full((num_rows, p.num_columns), 0.0, jnp.float32), WGMMA)
    for g in range(p.group_size):
        values = jnp.where(head == g, values_gmem[kv_head * p.group_size + g], values)
    return values


def store_outputs(
    p: Problem,
    out: list[jax.Array],  # the pieces, [rows, num_columns] each
    span: Span,
    out_smem: Any,  # [pieces, num_columns, piece_rows]
    out_gmem: Any,  # [num_rows * query_len, num_q_heads, head_dim]
) -> None:
    """Start to write the outputs of a unit of work to their places."""
    for i, ((first, size), piece) in enumerate(zip(p.pieces, out, strict=True)):
        # The unit before has left the buffer; pieces overlap and are written in turn.
        plgpu.wait_smem_to_gmem(0, wait_read_only=i == 0)
        _gpu.store(out_smem.at[i].T, piece.astype(p.dtype))
        plgpu.commit_smem()
        for token in range(p.query_len):
            heads, columns = group_heads(p, span.kv_head, token)
            target = out_gmem.at[span.row * p.query_len + token, heads, pl.ds(first, size)]
            plgpu.copy_smem_to_gmem(out_smem.at[i, columns], target)


def group_heads(p: Problem, kv_head: jax.Array, token: int) -> tuple[Any, Any]:
    """The places of a group's heads: among all query heads, and among the columns, for that new token."""
    return pl.ds(kv_head * p.group_size, p.group_size), pl.ds(token * p.group_size, p.group_size)
