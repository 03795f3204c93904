"""The consumer of a program of decode attention: the softmax of a unit of work, over tiles of K and V as they
arrive.

The products are transposed, so that the tokens fill the 64 rows of a wgmma. Its columns are the few queries
that share a kv head: the heads of a group, for each new token of the row, padded to a multiple of 8.

    S^T [tile_kv, heads] = K [tile_kv, head_dim] @ Q^T          O^T [head_dim, heads] = V^T @ P^T

A GPU without wgmma multiplies by mma.sync (`common.product`), from and to the same registers.

Columns of a product are independent: padding columns never affect a live head. A tile that is not wholly
inside [start, end) has stale tokens: their scores become -inf and their V is zeroed in shared memory, for
zero times NaN is NaN. Maxima start at a large negative number instead of -inf, so that no difference of two
maxima is NaN. Logits are kept times log2(e): exp2 is the GPU's own.

A quantised cache comes into the ring as it is, and is widened to float16 a tile at a time. V is widened into
other shared memory; K likewise or, where there are registers for it, on its way into its product. (Pallas'
interpreter cannot multiply from registers: there K goes the way of V.) For mma.sync K, and then V, is widened
into the same memory. The scales of a head are factors of the logits and of the output. The scales of each
token come with the tiles, and are factors of what is widened. A cache of 4 bits a number always goes through
shared memory (`int4_cache`); the newest tokens, which the row's last block keeps in full, come with the
queries.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common, int4_cache
from pallas_kernels.gpu.attention import Softmax, factor_of_output, filled, newest_group, widen_slot
from pallas_kernels.gpu.common import FLOAT16_MAX, LOG2E, LOWEST, WGMMA, Extras
from pallas_kernels.gpu.decode.program import Problem, Scratch, WorkUnit, group_heads
from pallas_kernels.support import BlockSparse

TURNED = plgpu.Layout.WGMMA_TRANSPOSED
PER_HEAD = WGMMA.reduce(0)  # one number per column of a wgmma's result


def nothing(p: Problem) -> Softmax:
    """Return the softmax over no tokens: its output is a piece [rows, num_columns] for each of `p.pieces`."""
    return Softmax(
        tuple(filled((rows, p.num_columns), 0.0, WGMMA) for _, rows in p.pieces),
        filled((p.num_columns,), LOWEST, PER_HEAD),
        filled((p.num_columns,), 0.0, PER_HEAD),
    )


def consume(
    p: Problem,
    work: WorkUnit,
    number: jax.Array,
    gmem: Any,
    extras: Extras,
    scratch: Scratch,
    done: jax.Array,
) -> tuple[Softmax, jax.Array]:
    """Compute the softmax over a unit of work, as its tiles arrive.

    number: of the unit, among the program's; done: tiles that were taken for the units before.

    Returns: the softmax, and the number of tiles taken so far.
    """
    _load_queries(p, number, scratch)
    # The factor gives logits times log2(e); with a soft cap, twice the argument of tanh times log2(e).
    factor = p.scale * LOG2E if p.soft_cap is None else 2 * p.scale / p.soft_cap * LOG2E
    if extras.k_scale is not None:
        factor = extras.k_scale[work.kv_head] * factor
    slopes = None
    if extras.alibi_slopes is not None:
        slopes = _per_head_values(p, extras.alibi_slopes, work.kv_head, p.tile_kv) * LOG2E
    first_tile, num_tiles = work.tiles(p)
    query_slot, newest = lax.rem(number, jnp.int32(p.num_query_slots)), None
    if p.packed is not None:
        newest = newest_group(p, gmem.block_tables, work.table, work.start, work.end, extras)

    def take(i: jax.Array, state: Softmax) -> Softmax:
        slot = lax.rem(done + i, jnp.int32(p.num_stages))
        first_token = (first_tile + i) * p.tile_kv
        new_tokens: tuple[Any, ...] = ()
        if newest is not None:
            place = newest - (first_tile + i) * (p.tile_kv // int4_cache.GROUP)
            new_tokens = scratch.k_new.at[query_slot], place
        k, v = _await_tile(p, scratch, slot, (done, i), new_tokens)
        s = _logits(p, work, scratch.q, k, first_token, factor, slopes)
        if p.widens_in_turn:
            v = _turn_to_values(p, scratch, slot)
        largest = jnp.maximum(state.max, s.max(axis=0))
        weights = jnp.exp2(s - lax.broadcast_in_dim(largest, s.shape, [1]))
        rescale = jnp.exp2(state.max - largest)
        total = state.sum * rescale + weights.sum(axis=0)
        _store_turned(p, scratch.p.T, weights.astype(p.operand_dtype))
        _zero_stale_tokens(p, work, v, first_token)
        p.commit_smem()
        out = _add_weighted(p, v, scratch.p, rescale, state.out)
        if not p.has_wgmma:  # warps read K and V by themselves: all must have, before others come
            p.commit_smem()
        if not p.is_quantised:
            p.barrier_arrive(scratch.ring.k_free.at[slot])
        return Softmax(out, largest, total)

    state = lax.fori_loop(0, num_tiles, take, nothing(p))
    if p.packed is not None:
        p.barrier_arrive(scratch.q_free.at[query_slot])
    return state, done + num_tiles


def _load_queries(p: Problem, number: jax.Array, scratch: Scratch) -> None:
    """Move the unit's queries into scratch.q, through registers: TMA cannot tile fewer than eight rows."""
    slot = lax.rem(number, jnp.int32(p.num_query_slots))
    p.waiter(p.num_query_slots, number)(scratch.q_full.at[slot])
    for i, (first, size) in enumerate(p.pieces):
        layout = WGMMA if p.has_tma else TURNED
        q = plgpu.load(scratch.q_rows.at[slot, i].T, layout=layout, optimized=False)
        if p.operand_dtype == jnp.float16 and p.dtype == jnp.bfloat16:  # bfloat16 has a larger range
            q = jnp.clip(q.astype(jnp.float32), -FLOAT16_MAX, FLOAT16_MAX)
        _store_turned(p, scratch.q.at[:, pl.ds(first, size)].T, q.astype(p.operand_dtype))
    p.commit_smem()
    if p.packed is None:  # otherwise the slot also holds the newest tokens
        p.barrier_arrive(scratch.q_free.at[slot])


def _store_turned(p: Problem, target: Any, value: jax.Array) -> None:
    """Store 16-bit numbers to a transposed target in shared memory.

    GPUs since Hopper have an instruction that transposes what it stores. Before, neighbours of a column are
    brought into one register.
    """
    if p.has_tma:
        target[...] = value
    else:
        common.store(target, plgpu.layout_cast(value, TURNED))


def _await_tile(
    p: Problem, scratch: Scratch, slot: jax.Array, number: tuple[jax.Array, ...], newest: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Wait for a slot. Return its K and V, [tile_kv, head_dim]; a widened tile frees the slot at once.

    V is None where it is widened after K: by `_turn_to_values`.

    number: of the tile, as summands.
    newest: as `widen_slot` takes them.
    """
    p.waiter(p.num_stages, *number)(scratch.ring.k_full.at[slot])
    if not p.is_quantised:
        return scratch.ring.k.at[slot], scratch.ring.v.at[slot]
    widen = functools.partial(widen_slot, p, scratch.ring, slot)
    if p.widens_in_turn:
        widen(0, scratch.v16, *newest)
        p.commit_smem()
        return scratch.v16, None
    k = scratch.k16
    if p.packed is not None:
        widen(0, k, *newest)
    widen(1, scratch.v16)
    if p.widens_in_registers:  # after V, whose widening then has these registers as well
        k = plgpu.layout_cast(common.widened(scratch.ring.k.at[slot], is_interpreted=p.is_interpreted), WGMMA)
    elif p.packed is None:
        widen(0, k)
    p.commit_smem()
    p.barrier_arrive(scratch.ring.k_free.at[slot])
    return k, scratch.v16


def _turn_to_values(p: Problem, scratch: Scratch, slot: jax.Array) -> Any:
    """Widen V of a slot into the memory of K, which is multiplied. Return it; the slot is free."""
    p.commit_smem()  # warps read K by themselves: all must have
    widen_slot(p, scratch.ring, slot, 1, scratch.v16)
    p.commit_smem()
    p.barrier_arrive(scratch.ring.k_free.at[slot])
    return scratch.v16


def _logits(
    p: Problem, work: WorkUnit, q: Any, k: Any, first_token: jax.Array, factor: Any, slopes: jax.Array | None
) -> jax.Array:
    """Return a tile's logits times log2(e), [tile_kv, num_columns]; -inf for what a query does not see."""
    s = common.product(k, q.T, (p.tile_kv, p.num_columns), p.multiply) * factor
    if p.soft_cap is not None:  # tanh(x) = 1 - 2 / (1 + exp(2 x)): good to 1e-7, the GPU's own to 5e-4
        s = (1 - 2 / (1 + jnp.exp2(s))) * (p.soft_cap * LOG2E)
    token = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=WGMMA) + first_token
    position = work.position if p.query_len == 1 else work.position + _token_of_column(p, s.shape)
    if slopes is not None:
        s = s + slopes * (token - position).astype(jnp.float32)
    seen = (token >= work.start) & (token < work.end)
    if p.query_len > 1:
        seen = seen & (token <= position)
        first = p.first_seen(position)
        if first is not None:
            seen = seen & (token >= first)
    if p.block_sparse is not None:
        seen = seen & _is_kept(p, p.block_sparse, token, work)
    return jnp.where(seen, s, -jnp.inf)


def _zero_stale_tokens(p: Problem, work: WorkUnit, v: Any, first_token: jax.Array) -> None:
    """Zero V of a tile's tokens outside the unit of work."""

    @pl.when((first_token < work.start) | (first_token + p.tile_kv > work.end))
    def _zero() -> None:
        place = plgpu.broadcasted_iota(jnp.int32, (p.tile_kv, 64), 0, layout=WGMMA) + first_token
        for column in common.columns_of(
            p.head_dim
        ):  # 64 columns at a time, to need no more registers than the rest
            piece = v.at[:, pl.ds(column, 64)]
            old = piece[...]
            piece[...] = jnp.where((place >= work.start) & (place < work.end), old, jnp.zeros_like(old))


def _add_weighted(
    p: Problem, v: Any, weights: Any, rescale: jax.Array, out: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Rescale the output's pieces, and add a tile's V^T @ weights^T."""
    new = []
    for (first, rows), old in zip(p.pieces, out, strict=True):
        part = v.at[:, pl.ds(first, rows)].T
        product = common.product(part, weights.T, (rows, p.num_columns), p.multiply)
        new.append(old * lax.broadcast_in_dim(rescale, old.shape, [1]) + product)
    return tuple(new)


def _is_kept(p: Problem, sparse: BlockSparse, token: jax.Array, work: WorkUnit) -> jax.Array:
    """Return whether the block-sparse pattern keeps a token [tile_kv, num_columns] for the head of its
    column.
    """
    heads = p.group_size * p.num_kv_heads
    if sparse.head_sliding_step >= 0:
        column = plgpu.broadcasted_iota(jnp.int32, token.shape, 1, layout=WGMMA)
        head = column + (sparse.tp_rank * heads + work.kv_head * p.group_size)
        offset = head * sparse.head_sliding_step + 1
    else:
        offset = 1 - sparse.head_sliding_step * (sparse.tp_rank * p.num_kv_heads + work.kv_head)
    block = lax.div(token, jnp.full_like(token, sparse.block_size))
    own_block = lax.div(work.position, jnp.int32(sparse.block_size))
    is_vertical = lax.rem(block + offset, jnp.full_like(token, sparse.vertical_stride)) == 0
    return is_vertical | (block > own_block - sparse.local_blocks)


def normalised(p: Problem, state: Softmax, extras: Extras, kv_head: jax.Array) -> list[jax.Array]:
    """Divide the output by the sum, with the sinks in the sum, and multiply by v_scale; zeros where there was
    no token.
    """

    def sinks() -> jax.Array:
        return _per_head_values(p, extras.sinks, kv_head, 64).max(axis=0) * LOG2E

    def scale() -> jax.Array:
        v_scale: jax.Array = extras.v_scale[kv_head]
        return v_scale

    factor = factor_of_output(
        state, None if extras.sinks is None else sinks, None if extras.v_scale is None else scale
    )
    return [piece * lax.broadcast_in_dim(factor, piece.shape, [1]) for piece in state.out]


def _token_of_column(p: Problem, shape: tuple[int, ...]) -> jax.Array:
    """Return which of the row's new tokens a column belongs to, for a shape [rows, num_columns]."""
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
    return lax.div(column, jnp.full_like(column, p.group_size))


def _per_head_values(p: Problem, values_gmem: Any, kv_head: jax.Array, num_rows: int) -> jax.Array:
    """Return the group's values as [num_rows, num_columns] float32; padding columns hold anything.

    values_gmem: [num_q_heads] in the GPU's memory.
    """
    head = plgpu.broadcasted_iota(jnp.int32, (num_rows, p.num_columns), 1, layout=WGMMA)
    if p.query_len > 1:
        head = lax.rem(head, jnp.full_like(head, p.group_size))
    values = filled((num_rows, p.num_columns), 0.0, WGMMA)
    for g in range(p.group_size):
        values = jnp.where(head == g, values_gmem[kv_head * p.group_size + g], values)
    return values


def store_outputs(
    p: Problem,
    out: list[jax.Array],  # the pieces, [rows, num_columns] each
    work: WorkUnit,
    out_smem: Any,  # [pieces, num_columns, piece_rows]
    out_gmem: Any,  # [num_rows * query_len, num_q_heads, head_dim]
) -> None:
    """Start to copy the outputs of a unit of work to the GPU's memory."""
    for i, ((first, size), piece) in enumerate(zip(p.pieces, out, strict=True)):
        # Wait until the unit before has left the buffer. Pieces overlap, and are written in turn.
        p.wait_smem_to_gmem(0, wait_read_only=i == 0)
        if p.has_tma:
            common.store(out_smem.at[i].T, piece.astype(p.dtype))
        else:
            _store_turned(p, out_smem.at[i].T, piece.astype(p.dtype))
        p.commit_smem()
        for token in range(p.query_len):
            heads, columns = group_heads(p, work.kv_head, token)
            target = out_gmem.at[work.row * p.query_len + token, heads, pl.ds(first, size)]
            p.copy_out(out_smem.at[i, columns], target)
