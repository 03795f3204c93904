"""Attention of prompts on Hopper GPUs: tiles of neighbouring query tokens, causal, over a paged cache.

    out[i, h] = softmax over the tokens t of the tile's sequence up to query i of (scale * q[i, h] . k[t]),
                applied to v[t]

with the options of `ops.tiled_paged_attention`. A program computes one tile for up to 128 rows of a kv head's
group: row = head * tile_len + token, for example 4 query heads of 32 tokens, 64 rows to each of two consumer
warpgroups (fewer heads need one). A producer warpgroup fetches tiles of K and V by TMA into a ring, every
fourth copy to each of its warps. Per slot and array there is a barrier `full` (all copies have landed) and
one `free` (every consumer has done with it).

    S [64, tile_kv] = Q @ K^T          O [64, head_dim] += P @ V

Two consumers take turns: while one multiplies, the other takes its softmax. P goes to the second product from
registers, where O is added up in place; Pallas' interpreter can do neither, so there (`in_registers` False) P
goes through shared memory and the product is added afterwards. Nothing else differs.

Only tiles at the edge of what the queries see are masked: the last ones, those where a window begins, and
none between. There, V outside the tile's tokens is zeroed, for zero times NaN is NaN; of two consumers the
first does it, before it gives the second its turn. The tiles of K and V lie on multiples of tile_kv whatever
else is computed, so a token's bits do not depend on its company.

Not for: float32, 8-bit caches, block sizes under 8, tiles of more than 64 tokens, other head_dims than those
in `support.SUPPORT`. A long sequence is not cut: its last tiles take longest.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _decode_tile as decode
from pallas_kernels import layout, support
from pallas_kernels._decode_tile import LOG2E, LOWEST, NUM_WARPS, WGMMA, Extras
from pallas_kernels.support import Arrays, Options

PER_ROW = WGMMA.reduce(1)  # one number per row of a wgmma's result
WARPGROUP_ROWS = 64
MAX_WARPGROUPS = 2  # consumers of a program
CONSUMER_REGISTERS, PRODUCER_REGISTERS = (
    232,
    40,
)  # of a thread, where two consumers share 65,536 with a producer
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
    dtype: Any
    token_major: bool
    scale: float
    has_slopes: bool
    soft_cap: float | None
    sliding_window: int | None
    in_registers: bool
    num_stages: int = 2

    @property
    def tile_kv(self) -> int:
        """Tokens of K and V at a time: as many as let two stages fit beside the queries."""
        return 128 if self.head_dim <= 128 else 64

    @property
    def warpgroup_heads(self) -> int:
        return WARPGROUP_ROWS // self.tile_len

    @property
    def num_warpgroups(self) -> int:
        """Consumers of a program: one if that is enough, or needs more registers than each of two has."""
        needs_more = self.has_slopes or self.soft_cap is not None
        needs_more |= self.head_dim == 256 and self.sliding_window is not None
        return min(1 if needs_more else MAX_WARPGROUPS, -(-self.group_size // self.warpgroup_heads))

    @property
    def num_chunks(self) -> int:
        """Programs that share a group's heads."""
        return -(-self.group_size // (self.num_warpgroups * self.warpgroup_heads))

    @property
    def copy_tokens(self) -> int:
        return decode.copy_tokens(self.block_size, self.tile_kv)

    @property
    def copies_per_tile(self) -> int:
        return self.tile_kv // self.copy_tokens


class Scratch(NamedTuple):
    """Shared memory and barriers of one program."""

    q: Any  # [num_warpgroups, 64, head_dim]; in the end, the output
    k: Any  # [num_stages, tile_kv, head_dim] the rings
    v: Any  # [num_stages, tile_kv, head_dim]
    p: Any  # [num_warpgroups, 64, tile_kv] the weights of one tile; None where they stay in registers
    q_full: Any  # [num_warpgroups], an arrival per head
    k_full: Any  # [num_stages], an arrival per copy
    v_full: Any
    k_free: Any  # [num_stages], an arrival per consumer
    v_free: Any
    turn: Any  # of both consumers


def _scratch_types(p: Problem) -> Scratch:
    def rows(count: int, size: int, width: int) -> Any:
        return plgpu.SMEM((count, size, width), p.dtype, transforms=decode.tiled(width))

    return Scratch(
        q=rows(p.num_warpgroups, WARPGROUP_ROWS, p.head_dim),
        k=rows(p.num_stages, p.tile_kv, p.head_dim),
        v=rows(p.num_stages, p.tile_kv, p.head_dim),
        p=None if p.in_registers else rows(p.num_warpgroups, WARPGROUP_ROWS, p.tile_kv),
        q_full=plgpu.Barrier(num_arrivals=p.warpgroup_heads, num_barriers=p.num_warpgroups),
        k_full=plgpu.Barrier(num_arrivals=p.copies_per_tile, num_barriers=p.num_stages),
        v_full=plgpu.Barrier(num_arrivals=p.copies_per_tile, num_barriers=p.num_stages),
        k_free=plgpu.Barrier(num_arrivals=p.num_warpgroups, num_barriers=p.num_stages),
        v_free=plgpu.Barrier(num_arrivals=p.num_warpgroups, num_barriers=p.num_stages),
        turn=plgpu.Barrier(num_arrivals=MAX_WARPGROUPS),
    )


class Span(NamedTuple):
    """What a tile of queries sees: tokens [begin, end), in tiles of K and V from the first on."""

    position: jax.Array  # of the first query
    begin: jax.Array
    end: jax.Array
    first: jax.Array
    num_tiles: jax.Array
    full_from: jax.Array  # among these tiles, those of which every query sees all
    full_to: jax.Array


def _span(p: Problem, position: jax.Array, seq_len: jax.Array) -> Span:
    tile_kv = jnp.int32(p.tile_kv)
    end = jnp.where(seq_len == 0, 0, jnp.minimum(seq_len, position + p.query_len))
    begin = full_from = jnp.int32(0)
    if p.sliding_window is not None:
        begin = jnp.clip(position + 1 - p.sliding_window, 0, end)
        full_from = jnp.maximum(position + p.tile_len - p.sliding_window, 0)
    first = lax.div(begin, tile_kv)
    num_tiles = pl.cdiv(end, tile_kv) - first
    full_to = jnp.clip(lax.div(jnp.minimum(position + 1, end), tile_kv) - first, 0, num_tiles)
    full_from = jnp.clip(pl.cdiv(full_from, tile_kv) - first, 0, full_to)
    return Span(position, begin, end, first, num_tiles, full_from, full_to)


def _kernel(
    gmem: Any,  # `Arrays`, as refs, q as [num_tiles, tile_len, num_q_heads, head_dim]
    positions_gmem: Any,  # [num_tiles] of the tiles' first queries
    extras: Extras,
    out_gmem: Any,  # like q
    scratch: Scratch,
    *,
    problem: Problem,
) -> None:
    p = problem
    tile, chunk, kv_head, warpgroup = (
        lax.axis_index(name) for name in ("tile", "chunk", "kv_head", "warpgroup")
    )
    span = _span(p, positions_gmem[tile], gmem.seq_lens[tile])

    @pl.when(warpgroup == p.num_warpgroups)
    def _producer() -> None:
        if p.in_registers and p.num_warpgroups == MAX_WARPGROUPS:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        plgpu.warp_map(lambda warp: _produce(p, span, gmem, tile, kv_head, scratch, warp))

    @pl.when(warpgroup < p.num_warpgroups)
    def _consumer() -> None:
        if p.in_registers and p.num_warpgroups == MAX_WARPGROUPS:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        first_head = (chunk * p.num_warpgroups + warpgroup) * p.warpgroup_heads  # in the group
        _load_queries(p, gmem.q.at[tile], kv_head, first_head, scratch, warpgroup)
        out = _consume(p, span, extras, kv_head * p.group_size + first_head, scratch, warpgroup)
        _store_output(p, out, out_gmem.at[tile], kv_head, first_head, scratch, warpgroup)


def _produce(
    p: Problem, span: Span, gmem: Any, row: jax.Array, kv_head: jax.Array, scratch: Scratch, warp: jax.Array
) -> None:
    """Fetch what this warp has of the tiles of K and V."""
    # Only blocks that hold tokens of the span are looked up. Copies beyond them fetch the nearest again.
    first_block = lax.div(span.begin, jnp.int32(p.block_size))
    last_block = jnp.maximum(pl.cdiv(span.end, jnp.int32(p.block_size)) - 1, first_block)

    def fetch(i: jax.Array, _: None) -> None:
        slot = lax.rem(i, jnp.int32(p.num_stages))
        for cache, ring, full, free in (
            (gmem.k_cache, scratch.k, scratch.k_full, scratch.k_free),
            (gmem.v_cache, scratch.v, scratch.v_full, scratch.v_free),
        ):

            @pl.when(i >= p.num_stages)
            def _wait(free: Any = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            for copy in range(p.copies_per_tile // NUM_WARPS):
                place = (copy * NUM_WARPS + warp) * p.copy_tokens  # in the tile
                token = (span.first + i) * p.tile_kv + place
                column = jnp.clip(lax.div(token, jnp.int32(p.block_size)), first_block, last_block)
                offset = lax.rem(token, jnp.int32(p.block_size)) if p.block_size > p.copy_tokens else 0
                tokens = pl.ds(offset, p.copy_tokens)
                block_id = gmem.block_tables[row, column]
                source = (block_id, tokens, kv_head) if p.token_major else (block_id, kv_head, tokens)
                target = ring.at[slot, pl.ds(place, p.copy_tokens)]
                plgpu.copy_gmem_to_smem(cache.at[source], target, full.at[slot])

    lax.fori_loop(0, span.num_tiles, fetch, None)
    decode.drain(scratch.k_free, p.num_stages, span.num_tiles)
    decode.drain(scratch.v_free, p.num_stages, span.num_tiles)


def _load_queries(
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


def _consume(
    p: Problem, span: Span, extras: Extras, first_head: jax.Array, scratch: Scratch, warpgroup: jax.Array
) -> jax.Array:
    """The warpgroup's output [64, head_dim], normalised."""
    takes_turns = p.num_warpgroups == MAX_WARPGROUPS
    slopes = None
    if extras.alibi_slopes is not None:
        slopes = _per_row(p, extras.alibi_slopes, first_head) * LOG2E

    def give_and_take_turn() -> None:
        plgpu.barrier_arrive(scratch.turn)
        plgpu.barrier_wait(scratch.turn)

    def take(i: jax.Array, state: Softmax, *, is_edge: bool) -> Softmax:
        slot = lax.rem(i, jnp.int32(p.num_stages))
        first_token = (span.first + i) * p.tile_kv
        plgpu.barrier_wait(scratch.k_full.at[slot])

        def scores(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, scratch.q.at[warpgroup], scratch.k.at[slot].T)
            if takes_turns:
                give_and_take_turn()
            return acc[...]

        s = pl.run_scoped(scores, plgpu.ACC((WARPGROUP_ROWS, p.tile_kv), jnp.float32))
        plgpu.barrier_arrive(scratch.k_free.at[slot])
        s, factor = _logits(p, span, s, first_token, slopes, is_edge=is_edge)
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
            plgpu.barrier_wait(scratch.v_full.at[slot])
        if is_edge:
            is_first = (warpgroup == 0) & ((first_token < span.begin) | (first_token + p.tile_kv > span.end))
            pl.when(is_first)(lambda: _zero_stale_tokens(p, span, scratch.v.at[slot], first_token))
        if takes_turns:
            plgpu.barrier_arrive(scratch.turn)
            if not is_edge:
                plgpu.barrier_wait(scratch.v_full.at[slot])
            plgpu.barrier_wait(scratch.turn)
        out = _add_weighted(p, out, weights, scratch, slot, warpgroup)
        plgpu.barrier_arrive(scratch.v_free.at[slot])
        return Softmax(out, largest, total)

    if takes_turns:  # the second begins half a turn later
        pl.when(warpgroup == 1)(give_and_take_turn)
    state = Softmax(
        _filled((WARPGROUP_ROWS, p.head_dim), 0.0, WGMMA),
        _filled((WARPGROUP_ROWS,), LOWEST, PER_ROW),
        _filled((WARPGROUP_ROWS,), 0.0, PER_ROW),
    )
    bounds = (jnp.int32(0), span.full_from, span.full_to, span.num_tiles)
    for k, is_edge in enumerate((True, False, True)):
        if k or p.sliding_window is not None:
            state = lax.fori_loop(bounds[k], bounds[k + 1], _with(take, is_edge), state)
    if takes_turns:
        pl.when(warpgroup == 0)(give_and_take_turn)
    return _normalised(p, state, extras, first_head)


def _with(take: Callable[..., Softmax], is_edge: bool) -> Callable[[jax.Array, Softmax], Softmax]:
    return lambda i, state: take(i, state, is_edge=is_edge)


def _filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _logits(
    p: Problem, span: Span, s: jax.Array, first_token: jax.Array, slopes: jax.Array | None, *, is_edge: bool
) -> tuple[jax.Array, float]:
    """What times the factor returned is the logits times log2(e), [64, tile_kv]; -inf where unseen."""
    factor = p.scale * LOG2E
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
        for column in decode.columns_of(p.head_dim):
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
            plgpu.wgmma(acc, weights, scratch.v.at[slot])

        return pl.run_state(add)(plgpu.ACC.init(out))
    scratch.p.at[warpgroup][...] = weights
    plgpu.commit_smem()

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, scratch.p.at[warpgroup], scratch.v.at[slot])
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


def _store_output(
    p: Problem,
    out: jax.Array,
    out_gmem: Any,
    kv_head: jax.Array,
    first_head: jax.Array,
    scratch: Scratch,
    warpgroup: jax.Array,
) -> None:
    """Write the heads that the group has."""
    scratch.q.at[warpgroup][...] = out.astype(p.dtype)
    plgpu.commit_smem()
    for h in range(p.warpgroup_heads):

        @pl.when(first_head + h < p.group_size)
        def _copy(h: int = h) -> None:
            source = scratch.q.at[warpgroup, pl.ds(h * p.tile_len, p.tile_len)]
            plgpu.copy_smem_to_gmem(source, out_gmem.at[:, kv_head * p.group_size + first_head + h])

    plgpu.wait_smem_to_gmem(0)


def prompt_attention(
    arrays: Arrays,
    query_starts: jax.Array,
    options: Options,
    *,
    in_registers: bool | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Launch the kernel. Arguments as `ops.tiled_paged_attention` has checked them, with q of four axes.

    in_registers: whether P stays in registers; by default unless it is interpreted.
    interpret: bool or plgpu.InterpretGPUParams.
    """
    num_tiles, query_len, num_q_heads, head_dim = arrays.q.shape
    if query_len > TILE_LENS[-1]:
        raise NotImplementedError(
            f"mosaic_gpu serves tiles of at most {TILE_LENS[-1]} tokens, not {query_len}. Use 'xla'."
        )
    if not interpret:
        support.refuse_ptxas(support.ptxas_version())
    tile_len = next(length for length in TILE_LENS if length >= query_len)
    cache = layout.sizes(arrays.k_cache, options.kv_layout)
    p = Problem(
        num_kv_heads=cache.num_kv_heads,
        group_size=num_q_heads // cache.num_kv_heads,
        tile_len=tile_len,
        query_len=query_len,
        head_dim=head_dim,
        block_size=cache.block_size,
        dtype=arrays.q.dtype,
        token_major=options.kv_layout == "token_major",
        scale=options.scale,
        has_slopes=options.alibi_slopes is not None,
        soft_cap=options.soft_cap,
        sliding_window=options.sliding_window,
        in_registers=not interpret if in_registers is None else in_registers,
    )
    q = jnp.pad(arrays.q, [(0, 0), (0, tile_len - query_len), (0, 0), (0, 0)])

    def prompt_attention_kernel(*refs: Any) -> None:
        _kernel(*refs, problem=p)

    out = plgpu.kernel(
        prompt_attention_kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_tiles, p.num_chunks, p.num_kv_heads),
        grid_names=("tile", "chunk", "kv_head"),
        num_threads=p.num_warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[_scratch_types(p)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=decode.interpret_params(interpret),
    )(arrays._replace(q=q), query_starts, decode.extras_of(options))
    return out[:, :query_len]
