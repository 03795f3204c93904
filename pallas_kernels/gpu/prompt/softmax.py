"""The consumers of a program of the prompt kernel: the softmax over tiles of K and V as they arrive.

    S [rows, tile_kv] = Q @ K^T          O [rows, head_dim] += P @ V

A consumer has 64 rows, or 128 with tensor memory. Two consumers take turns: while one multiplies, the other
takes its softmax. P goes to the second product from registers, and O is added up in place. Pallas'
interpreter can do neither: there (`in_registers` False) P goes through shared memory and the product is added
afterwards. Nothing else differs.

With tensor memory another warp starts the products, by tcgen05 (`products`), and O stays there. A GPU without
both wgmma and tcgen05 multiplies by mma.sync, a part of a product at a time (`common.product`). Consumers
take no turns then, and wait for each other at the edge alone, where one zeroes V for both. With long heads a
consumer by mma.sync is alone, and also widens a quantised cache: K, and then V, into the same memory.

Only tiles at the edge of what the queries see are masked: the last ones, and those where a window or a chunk
begins. There, V outside the tile's tokens is zeroed, for zero times NaN is NaN; of two consumers the first
zeroes it, before it gives the second its turn.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, exponents
from pallas_kernels.gpu.attention import Softmax, factor_of_output, filled, widen_slot
from pallas_kernels.gpu.common import LOG2E, LOWEST, WGMMA, Extras
from pallas_kernels.gpu.prompt import products, tensor_memory
from pallas_kernels.gpu.prompt.program import (
    MAX_WARPGROUPS,
    MMA_COLUMNS,
    WARPGROUP_ROWS,
    KeyRange,
    Problem,
    Scratch,
)

# Of V in registers at a time. Without TMA two consumers share registers equally: with as many columns of V
# (None: all) ptxas spills nothing of what each version of JAX makes.
MMA_TOKENS, MMA_OUTPUTS = 16, 16
SHARED_OUTPUTS = None if jax.__version_info__ >= (0, 12) else 32
WEIGHED_AT_A_TIME = 64  # tokens, with tensor memory: registers are free once weights are stored


def load_queries(
    p: Problem, q_gmem: Any, kv_head: jax.Array, first_head: jax.Array, scratch: Scratch, warpgroup: jax.Array
) -> None:
    """Fetch the queries of the warpgroup's heads; heads beyond the group repeat its last one."""
    for h in range(p.warpgroup_heads):
        head = kv_head * p.group_size + jnp.minimum(first_head + h, p.group_size - 1)
        target = scratch.q.at[warpgroup, pl.ds(h * p.tile_len, p.tile_len)]
        copy = p.copier(p.tiled(p.line), by_warp=False)
        copy(q_gmem.at[:, head], target, scratch.q_full.at[warpgroup])
    p.waiter(1, jnp.int32(0))(scratch.q_full.at[warpgroup])


def consume(
    p: Problem,
    keys: KeyRange,
    extras: Extras,
    kv_head: jax.Array,
    first_head: jax.Array,
    scratch: Scratch,
    warpgroup: jax.Array,
) -> Softmax:
    """Compute the softmax of the warpgroup's rows over the tiles of keys, for `pieces`.

    first_head: of the warpgroup, among all query heads.
    """
    k_scale = None if extras.k_scale is None else extras.k_scale[kv_head]
    takes_turns, ring, tensors = p.takes_turns, scratch.ring, scratch.tensors
    slopes = None
    if extras.alibi_slopes is not None:
        slopes = _per_row(p, extras.alibi_slopes, first_head) * LOG2E

    def give_and_take_turn() -> None:
        plgpu.barrier_arrive(scratch.turn)
        plgpu.barrier_wait(scratch.turn)

    def meet(i: jax.Array) -> None:
        """Synchronise the warpgroups of a tile at the edge, so that the later ones see the numbers of the
        earlier ones.
        """
        p.barrier_arrive(scratch.turn)
        past = jnp.where(i < keys.full_from, 0, keys.full_to - keys.full_from)
        p.waiter(1, i, -past)(scratch.turn)

    def operand(number: int, slot: jax.Array) -> Any:
        """Return K (0) or V (1) of a slot as its product reads it. If it is widened for that, the slot is
        free.
        """
        tiles, _, free = ring.arrays[number]
        if scratch.wide is None:
            return tiles.at[slot]
        widen_slot(p, ring, slot, number, scratch.wide)
        p.commit_smem()
        p.barrier_arrive(free.at[slot])
        return scratch.wide

    def take(i: jax.Array, state: Softmax, *, is_edge: bool) -> Softmax:
        slot = lax.rem(i, jnp.int32(p.num_stages))
        first_token = (keys.first + i) * p.tile_kv

        def wait_for_v() -> Any:
            p.waiter(p.num_stages, i)(ring.v_full.at[slot])
            v = operand(1, slot)
            if is_edge:
                is_stale = (first_token < keys.start) | (first_token + p.tile_kv > keys.end)
                pl.when((warpgroup == 0) & is_stale)(lambda: _zero_stale_tokens(p, keys, v, first_token))
            return v

        if tensors is None:
            p.waiter(p.num_stages, i)(ring.k_full.at[slot])
        else:
            wait_for_v()  # while registers are free; who multiplies relies on it
        k = operand(0, slot)

        def scores(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, scratch.q.at[warpgroup], k.T)
            if takes_turns:
                give_and_take_turn()
            return acc[...]

        shape = p.warpgroup_rows, p.tile_kv
        if p.has_wgmma:
            s = pl.run_scoped(scores, plgpu.ACC(shape, jnp.float32))
        elif tensors is not None:
            tile = tensor_memory.slot_of(i, warpgroup, p.num_warpgroups)
            s = products.scores(p, tensors, tile)
        else:
            s = common.product(scratch.q.at[warpgroup], k.T, shape, p.multiply, depth=MMA_COLUMNS)
            p.commit_smem()  # warps read K by themselves: all must have, before others come
        if not (p.widens_itself or p.has_tensor_memory):
            p.barrier_arrive(ring.k_free.at[slot])
        s, factor = _logits(p, keys, s, k_scale, first_token, slopes, is_edge=is_edge)
        maximum = jnp.maximum if tensors is None else products.maximum
        largest = maximum(state.max, s.max(axis=1) * factor)
        rescale = jnp.exp2(state.max - largest)
        if tensors is not None:
            total = state.sum * rescale
            for column in range(0, p.tile_kv, WEIGHED_AT_A_TIME):
                x = s[:, column : column + WEIGHED_AT_A_TIME] * factor
                x = x - lax.broadcast_in_dim(largest, x.shape, [0])
                weights = exponents.exp2(x, p.one_by_polynomial_in)
                total = total + weights.sum(axis=1)
                products.store_weights(tensors, tile, column, weights.astype(p.dtype))
            products.hand_over(p, tensors, i, tile, warpgroup, rescale)
            return Softmax(None, largest, total)
        weights = jnp.exp2(s * factor - lax.broadcast_in_dim(largest, s.shape, [0]))
        total = state.sum * rescale + weights.sum(axis=1)
        out = state.out * lax.broadcast_in_dim(rescale, state.out.shape, [0])
        weights = weights.astype(p.dtype)
        if takes_turns:
            # The compiler must not move this work behind the end of the turn.
            out, total, largest, weights = lax.optimization_barrier((out, total, largest, weights))
        if is_edge or not takes_turns:
            v = wait_for_v()
        else:
            v = operand(1, slot)
        if is_edge and not takes_turns and p.num_warpgroups == MAX_WARPGROUPS:
            meet(i)
        if takes_turns:
            plgpu.barrier_arrive(scratch.turn)
            if not is_edge:
                plgpu.barrier_wait(ring.v_full.at[slot])
            plgpu.barrier_wait(scratch.turn)
        out = _add_weighted(p, out, weights, v, scratch, warpgroup)
        if p.multiply == "mma.sync":
            p.commit_smem()
        if not p.widens_itself:
            p.barrier_arrive(ring.v_free.at[slot])
        return Softmax(out, largest, total)

    if takes_turns:  # the second begins half a turn later
        pl.when(warpgroup == 1)(give_and_take_turn)
    state = nothing(p, p.head_dim)
    if tensors is not None:
        state = state._replace(out=None)
    bounds = (jnp.int32(0), keys.full_from, keys.full_to, keys.num_tiles)
    for k, is_edge in enumerate((True, False, True)):
        if k or p.is_bounded:
            state = lax.fori_loop(bounds[k], bounds[k + 1], _with(take, is_edge), state)
    if takes_turns:
        pl.when(warpgroup == 0)(give_and_take_turn)
    if tensors is not None:
        products.finish(p, tensors, keys, warpgroup)
    return state


def pieces(
    p: Problem, state: Softmax, scratch: Scratch, warpgroup: jax.Array
) -> Iterator[tuple[int, Softmax]]:
    """Yield the softmax of `consume` in pieces of columns, each with the index of its first column."""
    if scratch.tensors is None:
        yield 0, state
        return
    for column, out in products.sums(p, scratch.tensors, warpgroup):
        yield column, state._replace(out=out)


def _with(take: Callable[..., Softmax], is_edge: bool) -> Callable[[jax.Array, Softmax], Softmax]:
    return lambda i, state: take(i, state, is_edge=is_edge)


def nothing(p: Problem, width: int) -> Softmax:
    """Return the softmax over no tokens, with so many columns of output."""
    rows, per_row = p.warpgroup_rows, p.layout.reduce(1)
    return Softmax(
        filled((rows, width), 0.0, p.layout),
        filled((rows,), LOWEST, per_row),
        filled((rows,), 0.0, per_row),
    )


def _logits(
    p: Problem,
    keys: KeyRange,
    s: jax.Array,
    k_scale: jax.Array | None,
    first_token: jax.Array,
    slopes: jax.Array | None,
    *,
    is_edge: bool,
) -> tuple[jax.Array, float]:
    """Return scores and a factor: their product is the logits times log2(e), [warpgroup_rows, tile_kv]; -inf
    where unseen.
    """
    factor = p.scale * LOG2E
    if k_scale is not None:
        s = s * k_scale
    if p.soft_cap is not None:  # tanh(x) = 1 - 2 / (1 + exp(2 x)): good to 1e-7, the GPU's own to 5e-4
        s = (1 - 2 / (1 + jnp.exp2(s * (2 * p.scale / p.soft_cap * LOG2E)))) * (p.soft_cap * LOG2E)
        factor = 1.0
    # Otherwise the factor is applied where the maximum is subtracted; with tensor memory and a window ptxas
    # then spills.
    elif slopes is not None or factor <= 0 or (p.has_tensor_memory and p.is_bounded):
        s, factor = s * factor, 1.0
    if slopes is None and not is_edge:
        return s, factor
    position = keys.position + (_numbers(p.warpgroup_rows, p.layout.reduce(1)) & (p.tile_len - 1))

    columns = _numbers(p.tile_kv, p.layout.reduce(0))
    if not p.has_tensor_memory:
        columns = columns + first_token
    token = lax.broadcast_in_dim(columns, s.shape, [1])

    def of_rows(values: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(values, s.shape, [0])

    def tokens_of_rows(values: jax.Array) -> jax.Array:
        # A thread that has a whole row has a number for each column: counted from the tile's first token
        # they are constants, and take no registers.
        return of_rows(values - first_token if p.has_tensor_memory else values)

    if slopes is not None:
        s = s + of_rows(slopes) * (token - tokens_of_rows(position)).astype(jnp.float32)
    if is_edge:
        seen = token <= tokens_of_rows(jnp.minimum(position, keys.end - 1))
        first = p.first_seen(position)
        if first is not None:
            seen = seen & (token >= tokens_of_rows(first))
        s = jnp.where(seen, s, -jnp.inf)
    return s, factor


def _numbers(count: int, layout: Any) -> jax.Array:
    """Return 0, 1, ... for rows or columns. Numbered element by element they would take a register each."""
    return plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)


def _zero_stale_tokens(p: Problem, keys: KeyRange, v: Any, first_token: jax.Array) -> None:
    """Zero V of a tile's tokens outside the keys that the queries see."""
    is_short = p.tile_kv < WARPGROUP_ROWS
    height, layout = (common.LINES, common.lines(64)) if is_short else (WARPGROUP_ROWS, WGMMA)
    for row in range(0, p.tile_kv, height):
        place = _numbers(height, layout.reduce(1)) + (first_token + row)
        place = lax.broadcast_in_dim(place, (height, 64), [0])
        for column in common.columns_of(p.head_dim):
            piece = v.at[pl.ds(row, height), pl.ds(column, 64)]
            old = plgpu.load(piece, layout=layout, optimized=False) if is_short else piece[...]
            piece[...] = jnp.where((place >= keys.start) & (place < keys.end), old, jnp.zeros_like(old))
    p.commit_smem()


def _add_weighted(
    p: Problem, out: jax.Array, weights: jax.Array, v: Any, scratch: Scratch, warpgroup: jax.Array
) -> jax.Array:
    """Return out + weights @ V, for the V of a tile."""
    if not p.has_wgmma:
        width = MMA_OUTPUTS if p.has_tma or p.is_quantised else SHARED_OUTPUTS
        return common.product(weights, v, (WARPGROUP_ROWS, p.head_dim), p.multiply, out, MMA_TOKENS, width)
    if p.in_registers:

        def add(acc: Any) -> None:
            plgpu.wgmma(acc, weights, v)

        return pl.run_state(add)(plgpu.ACC.init(out))
    scratch.p.at[warpgroup][...] = weights
    plgpu.commit_smem()

    def product(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, scratch.p.at[warpgroup], v)
        return acc[...]

    return out + pl.run_scoped(product, plgpu.ACC((WARPGROUP_ROWS, p.head_dim), jnp.float32))


def _normalised(p: Problem, state: Softmax, extras: Extras, first_head: jax.Array) -> jax.Array:
    """Divide the output by the sum, with the sinks in the sum; zeros where there was no token."""

    def sinks() -> jax.Array:
        return _per_row(p, extras.sinks, first_head) * LOG2E

    factor = factor_of_output(state, None if extras.sinks is None else sinks)
    return state.out * lax.broadcast_in_dim(factor, state.out.shape, [0])


def _per_row(p: Problem, values_gmem: Any, first_head: jax.Array) -> jax.Array:
    """Return the values of the rows' heads as [warpgroup_rows] float32.

    values_gmem: [num_q_heads] in the GPU's memory.
    """
    shape = p.warpgroup_rows, 8  # the narrowest result that a wgmma has
    head = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=p.layout), p.tile_len)
    values = filled(shape, 0.0, p.layout)
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
    """Write the output of the heads that the group has to the GPU's memory.

    pieces: of the softmax, each with its first column.
    """
    for column, piece in pieces:
        out = _normalised(p, piece, extras, kv_head * p.group_size + first_head)
        target = scratch.q.at[warpgroup, :, pl.ds(column, out.shape[1])]
        if p.has_tensor_memory:
            common.store(target, out.astype(p.dtype))
        else:
            target[...] = out.astype(p.dtype)
    p.commit_smem()
    for h in range(p.warpgroup_heads):

        @pl.when(first_head + h < p.group_size)
        def _copy(h: int = h) -> None:
            source = scratch.q.at[warpgroup, pl.ds(h * p.tile_len, p.tile_len)]
            target = out_gmem.at[:, kv_head * p.group_size + first_head + h]
            p.copy_out(source, target, p.tiled(p.line))

    p.wait_smem_to_gmem(0)
