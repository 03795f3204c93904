"""Recurrent layers over paged memory: a block holds the rows of a chunk of tokens, and the state after it.

Chunks of `chunk` tokens are counted from the sequence's start, and a chunk is a block. With S the state
before a chunk, G_n the sum of the log decays of its tokens up to n, and a row (k_n, u_n) for each token:

    u_n = beta_n (v_n - S' exp(G_n) k_n - sum_{j<n} (k_j . exp(G_n - G_j) k_n) u_j)    with the delta rule
    u_n = v_n                                                                          without it
    o_n = S' exp(G_n) q_n + sum_{j<=n} (k_j . exp(G_n - G_j) q_n) u_j
    S after the chunk = exp(G_last) S + sum_j exp(G_last - G_j) k_j u_j'

This is the recurrence itself, with the sums in another order. A prompt in pieces of any length, a decoding
step, drafts and a recomputation do these same operations at the token's place in its chunk, so a token's
output has the same bits in all of them. Tokens are taken back by a shorter length: what their rows hold is
never read, and is written again. A step reads a state and writes rows; the state is written once a chunk.

A sequence needs the block of its open chunk and the one before. So a prefix is found again where the block
that ends it is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

CHUNK = 16  # tokens: a step then moves 0.6 of the bytes that reading and writing the state would take
LANES = 16  # float32 numbers in the widest vector of a processor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateBlocks:
    """Blocks of a recurrent layer. Block 0 is the null block, which no sequence owns.

    Rows are kept as they are used: k as given, the log decay of each token, and u as it was computed.
    """

    state: Float[Array, "num_blocks num_heads k_dim v_dim"]  # after the block's last token
    k: Float[Array, "num_blocks chunk num_key_heads k_dim"]
    u: Float[Array, "num_blocks chunk num_heads v_dim"]
    log_decay: Float[Array, "num_blocks chunk num_heads decay_dim"]
    has_delta_rule: bool = field(metadata={"static": True})

    @property
    def chunk(self) -> int:
        """Tokens of a block."""
        return int(self.k.shape[1])


def create(
    num_blocks: int,
    num_heads: int,
    k_dim: int,
    v_dim: int,
    *,
    num_key_heads: int | None = None,
    chunk: int = CHUNK,
    has_delta_rule: bool = True,
    decay_by_channel: bool = False,
) -> StateBlocks:
    """Return blocks of zeros, in float32.

    num_key_heads: heads of q and k, each shared by as many consecutive heads of v; `num_heads` by default.
    decay_by_channel: each of the `k_dim` channels decays by itself, as in Kimi Delta Attention.
    """
    num_key_heads = num_heads if num_key_heads is None else num_key_heads
    if num_heads % num_key_heads:
        raise ValueError(f"num_heads={num_heads} must be a multiple of num_key_heads={num_key_heads}")
    return StateBlocks(
        state=jnp.zeros((num_blocks, num_heads, k_dim, v_dim), jnp.float32),
        k=jnp.zeros((num_blocks, chunk, num_key_heads, k_dim), jnp.float32),
        u=jnp.zeros((num_blocks, chunk, num_heads, v_dim), jnp.float32),
        log_decay=jnp.zeros((num_blocks, chunk, num_heads, k_dim if decay_by_channel else 1), jnp.float32),
        has_delta_rule=has_delta_rule,
    )


def advance(
    blocks: StateBlocks,
    q: Float[Array, "num_seqs num_tokens num_key_heads k_dim"],
    k: Float[Array, "num_seqs num_tokens num_key_heads k_dim"],
    v: Float[Array, "num_seqs num_tokens num_heads v_dim"],
    log_decay: Float[Array, "num_seqs num_tokens num_heads decay_dim"],
    beta: Float[Array, "num_seqs num_tokens num_heads"] | None,
    block_tables: Int[Array, "num_seqs max_blocks"],
    starts: Int[Array, " num_seqs"],
    lengths: Int[Array, " num_seqs"],
) -> tuple[Float[Array, "num_seqs num_tokens num_heads v_dim"], StateBlocks]:
    """Compute the next tokens of each sequence. Return their outputs in float32, and the blocks.

    log_decay: at most 0.
    beta: strength of the delta rule's correction; None without the rule.
    block_tables: block of each chunk of a sequence; those of `starts - 1` to the last token are used.
    starts: tokens of the sequence before these. lengths: how many of `num_tokens` are real.

    Outputs of padding mean nothing, and padding changes no block but block 0. Raises `ValueError` for arrays
    whose shapes do not agree. The formulas are in the module's text.
    """
    num_seqs, num_tokens = v.shape[:2]
    num_heads, k_dim, v_dim = blocks.state.shape[1:]
    num_key_heads, decay_dim = blocks.k.shape[2], blocks.log_decay.shape[3]
    _check_shape("q", q, (num_seqs, num_tokens, num_key_heads, k_dim))
    _check_shape("k", k, (num_seqs, num_tokens, num_key_heads, k_dim))
    _check_shape("v", v, (num_seqs, num_tokens, num_heads, v_dim))
    _check_shape("log_decay", log_decay, (num_seqs, num_tokens, num_heads, decay_dim))
    if (beta is not None) != blocks.has_delta_rule:
        raise ValueError("beta must be given with the delta rule, and only with it")
    if beta is None:
        beta = jnp.ones((num_seqs, num_tokens, num_heads), jnp.float32)
    _check_shape("beta", beta, (num_seqs, num_tokens, num_heads))

    tokens = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v, log_decay, beta))
    return _by_chunk(_chunk, blocks, blocks.chunk, tokens, block_tables, starts, lengths)


def _check_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}.shape={x.shape} must be {shape}")


class _Places(NamedTuple):
    """One chunk of each sequence: where its new tokens stand, and its blocks."""

    is_new: Bool[Array, "num_seqs chunk"]
    is_old: Bool[Array, "num_seqs chunk"]  # rows before the first new token
    block: Int[Array, " num_seqs"]  # block 0 where nothing is new
    before: Int[Array, " num_seqs"]  # block that ends in front of the chunk
    is_first: Bool[Array, " num_seqs"]  # the sequence begins with this chunk

    @property
    def is_row(self) -> Bool[Array, "num_seqs chunk"]:
        return self.is_new | self.is_old

    def rows(self, new: Array, old: Array) -> Array:
        """Return new rows and old ones, zeros where there is none."""
        kept = jnp.where(_like(self.is_new, new), new, old)
        return jnp.where(_like(self.is_row, new), kept, 0)

    def state(self, states: Array) -> Array:
        """Return the state before the chunk, zeros at a sequence's start."""
        return jnp.where(_like(~self.is_first, states), states[self.before], 0)

    @property
    def closed(self) -> Int[Array, " num_seqs"]:
        """Block whose last token is new; 0 for none."""
        return jnp.where(self.is_new[:, -1], self.block, 0)


def _like(mask: Array, x: Array) -> Array:
    """Return a mask of the first axes with as many axes as x."""
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))


def _by_chunk[Blocks](
    compute: Callable[..., tuple[Array, Blocks]],
    blocks: Blocks,
    chunk: int,
    tokens: tuple[Array, ...],
    block_tables: Int[Array, "num_seqs max_blocks"],
    starts: Int[Array, " num_seqs"],
    lengths: Int[Array, " num_seqs"],
) -> tuple[Array, Blocks]:
    """Call `compute(blocks, places, *tokens)` for one chunk after the other. Return outputs and blocks.

    tokens: arrays [num_seqs, num_tokens, ...]; `compute` gets those of a chunk, each at its place in it.
    """
    num_seqs, num_tokens = tokens[0].shape[:2]
    offset = starts % chunk  # place of the first token in its chunk
    num_chunks = (num_tokens + 2 * chunk - 2) // chunk  # that the tokens may touch
    last = block_tables.shape[1] - 1

    def step(blocks: Blocks, number: Int[Array, ""]) -> tuple[Blocks, Array]:
        at = number * chunk + jnp.arange(chunk) - offset[:, None]
        is_new = (at >= 0) & (at < lengths[:, None])
        is_used, index = jnp.any(is_new, 1), starts // chunk + number
        block, before = (
            jnp.take_along_axis(block_tables, jnp.clip(i, 0, last)[:, None], 1)[:, 0]
            for i in (index, index - 1)
        )
        is_old = (jnp.arange(chunk) < jnp.argmax(is_new, 1)[:, None]) & is_used[:, None]
        places = _Places(is_new, is_old, jnp.where(is_used, block, 0), before, index == 0)
        at = jnp.clip(at, 0, num_tokens - 1)
        rows = [jnp.take_along_axis(x, _like(at, x), 1) for x in tokens]
        out, blocks = compute(blocks, places, *rows)
        return blocks, out

    def step_if_any(blocks: Blocks, number: Int[Array, ""]) -> tuple[Blocks, Array]:
        is_used = jnp.any(number * chunk < offset + lengths)
        shape = jax.eval_shape(step, blocks, number)[1]
        return lax.cond(
            is_used,
            lambda blocks: step(blocks, number),
            lambda blocks: (blocks, jnp.zeros(shape.shape, shape.dtype)),
            blocks,
        )

    one_by_one = step if num_chunks == 1 else step_if_any
    blocks, out = lax.scan(one_by_one, blocks, jnp.arange(num_chunks))
    out = jnp.moveaxis(out, 0, 1).reshape(num_seqs, num_chunks * chunk, *out.shape[3:])
    taken = jnp.minimum(offset[:, None] + jnp.arange(num_tokens), num_chunks * chunk - 1)
    return jnp.take_along_axis(out, _like(taken, out), 1), blocks


def _chunk(
    blocks: StateBlocks,
    places: _Places,
    q: Float[Array, "num_seqs chunk num_key_heads k_dim"],
    k: Float[Array, "num_seqs chunk num_key_heads k_dim"],
    v: Float[Array, "num_seqs chunk num_heads v_dim"],
    log_decay: Float[Array, "num_seqs chunk num_heads decay_dim"],
    beta: Float[Array, "num_seqs chunk num_heads"],
) -> tuple[Float[Array, "num_seqs chunk num_heads v_dim"], StateBlocks]:
    """Compute the new tokens of one chunk of each sequence, each at its place in the chunk.

    Every product has the whole chunk's shape. What is no row yet is selected away, whatever it holds.
    """
    chunk, block, is_new = blocks.chunk, places.block, places.is_new
    state = places.state(blocks.state)
    k, log_decay = places.rows(k, blocks.k[block]), places.rows(log_decay, blocks.log_decay[block])
    old_u = jnp.where(_like(places.is_old, v), blocks.u[block], 0)
    q = jnp.where(_like(is_new, q), q, 0)
    decay = jnp.moveaxis(_running_sums(log_decay), 1, 2)  # [num_seqs, num_heads, chunk, decay_dim]

    repeats = blocks.u.shape[2] // blocks.k.shape[2]
    by_head_q, by_head_k = (jnp.repeat(jnp.swapaxes(x, 1, 2), repeats, 1) for x in (q, k))
    far = _exp(decay)
    of_state_q = _product(by_head_q * far, state)
    q_k, k_k = (_weights(x, by_head_k, decay) for x in (by_head_q, by_head_k))
    v, old_u, beta = jnp.swapaxes(v, 1, 2), jnp.swapaxes(old_u, 1, 2), jnp.swapaxes(beta, 1, 2)
    u = jnp.where(is_new[:, None, :, None], v, old_u)
    left = v
    if blocks.has_delta_rule:
        left = v - _product(by_head_k * far, state)

    # Rows one after the other, so that each sum has the order of the rows: forward substitution.
    type Carry = tuple[Array, Array, Array]

    def take_row(i: Int[Array, ""], carry: Carry) -> Carry:
        u, left, out = carry
        row = u[:, :, i]
        if blocks.has_delta_rule:
            row = jnp.where(is_new[:, i, None, None], beta[:, :, i, None] * left[:, :, i], row)
            u = u.at[:, :, i].set(row)
            left = left - k_k[..., i, None] * row[:, :, None]
        return u, left, out + q_k[..., i, None] * row[:, :, None]

    u, _, out = lax.fori_loop(0, chunk, take_row, (u, left, of_state_q))

    rest = by_head_k * _exp(decay[:, :, -1:] - decay)
    closed = lax.fori_loop(
        0,
        chunk,
        lambda i, s: s + rest[:, :, i, :, None] * u[:, :, i, None, :],
        far[:, :, -1, :, None] * state,
    )
    blocks = replace(
        blocks,
        state=blocks.state.at[places.closed].set(closed),
        k=blocks.k.at[block].set(k),
        u=blocks.u.at[block].set(jnp.swapaxes(u, 1, 2)),
        log_decay=blocks.log_decay.at[block].set(log_decay),
    )
    return jnp.swapaxes(out, 1, 2), blocks


def _running_sums(x: Float[Array, "num_seqs chunk *rest"]) -> Float[Array, "num_seqs chunk *rest"]:
    """Return sums over a chunk's rows up to each, in their order: a decoding step has no other way."""

    def add(total: Array, row: Array) -> tuple[Array, Array]:
        return total + row, total + row

    return jnp.moveaxis(lax.scan(add, jnp.zeros_like(x[:, 0]), jnp.moveaxis(x, 1, 0))[1], 0, 1)


def _exp(x: Float[Array, "*n chunk decay_dim"]) -> Float[Array, "*n chunk decay_dim"]:
    """Return exponentials. One decay a row lies row after row, in whole vectors: those of a part of a vector
    have another last bit at times, by the number of sequences.
    """
    if x.shape[-1] > 1:
        return jnp.exp(x)
    rows = x[..., 0]
    missing = -rows.shape[-1] % LANES
    if not missing:
        return jnp.exp(x)
    whole = lax.optimization_barrier(jnp.pad(rows, [*[(0, 0)] * (rows.ndim - 1), (0, missing)]))
    return lax.optimization_barrier(jnp.exp(whole))[..., : rows.shape[-1], None]


def _product(x: Array, state: Array) -> Float[Array, "num_seqs num_heads chunk v_dim"]:
    """Return the product of rows with the states before the chunk, in float32."""
    return jnp.einsum("nhck,nhkv->nhcv", x, state, precision=lax.Precision.HIGHEST)


def _weights(x: Array, k: Array, decay: Array) -> Float[Array, "num_seqs num_heads chunk chunk"]:
    """Return `x_n . exp(G_n - G_j) k_j` for row n and column j up to n, else 0. No exponent is above 0."""
    chunk = x.shape[2]
    is_before = jnp.arange(chunk)[:, None] >= jnp.arange(chunk)
    between = jnp.minimum(decay[:, :, :, None] - decay[:, :, None], 0)  # [..., chunk, chunk, decay_dim]
    if decay.shape[-1] == 1:
        dots = jnp.einsum("nhik,nhjk->nhij", x, k, precision=lax.Precision.HIGHEST)
        weights = dots * _exp(between)[..., 0]
    else:
        decayed = k[:, :, None] * jnp.exp(between)
        weights = jnp.einsum("nhijk,nhik->nhij", decayed, x, precision=lax.Precision.HIGHEST)
    return jnp.where(is_before, weights, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SelectiveBlocks:
    """Blocks of a Mamba-1 layer: the rows (dt, x, B) of a chunk's tokens, and the state after it."""

    state: Float[Array, "num_blocks num_channels state_size"]
    dt: Float[Array, "num_blocks chunk num_channels"]
    x: Float[Array, "num_blocks chunk num_channels"]
    b: Float[Array, "num_blocks chunk state_size"]


def create_selective(
    num_blocks: int, num_channels: int, state_size: int, *, chunk: int = CHUNK // 2
) -> SelectiveBlocks:
    """Return blocks of zeros, in float32. Rows of 8 tokens take as many bytes as a state of 16 a channel."""
    rows = jnp.zeros((num_blocks, chunk, num_channels), jnp.float32)
    return SelectiveBlocks(
        state=jnp.zeros((num_blocks, num_channels, state_size), jnp.float32),
        dt=rows,
        x=rows,
        b=jnp.zeros((num_blocks, chunk, state_size), jnp.float32),
    )


def selective_scan(
    blocks: SelectiveBlocks,
    x: Float[Array, "num_seqs num_tokens num_channels"],
    dt: Float[Array, "num_seqs num_tokens num_channels"],
    b: Float[Array, "num_seqs num_tokens state_size"],
    c: Float[Array, "num_seqs num_tokens state_size"],
    a: Float[Array, "num_channels state_size"],
    block_tables: Int[Array, "num_seqs max_blocks"],
    starts: Int[Array, " num_seqs"],
    lengths: Int[Array, " num_seqs"],
) -> tuple[Float[Array, "num_seqs num_tokens num_channels"], SelectiveBlocks]:
    """Compute the next tokens of a Mamba-1 layer (Gu and Dao 2023). Return float32 outputs, and the blocks.

    With S the state: S = exp(dt a) S + dt x b', and the output is S c. Each channel's decay differs by state
    number, so a chunk has no products: its rows are taken one after the other, from the state before it. All
    else is as in `advance`.

    a: at most 0. dt: at least 0. Raises `ValueError` for arrays whose shapes do not agree.
    """
    num_seqs, num_tokens, num_channels = x.shape
    chunk, state_size = blocks.dt.shape[1], blocks.state.shape[2]
    _check_shape("x", x, (num_seqs, num_tokens, blocks.dt.shape[2]))
    _check_shape("dt", dt, x.shape)
    _check_shape("b", b, (num_seqs, num_tokens, state_size))
    _check_shape("c", c, b.shape)
    _check_shape("a", a, (num_channels, state_size))
    a = a.astype(jnp.float32)

    def compute(
        blocks: SelectiveBlocks, places: _Places, x: Array, dt: Array, b: Array, c: Array
    ) -> tuple[Array, SelectiveBlocks]:
        block = places.block
        dt, x = places.rows(dt, blocks.dt[block]), places.rows(x, blocks.x[block])
        b, c = places.rows(b, blocks.b[block]), jnp.where(_like(places.is_new, c), c, 0)

        def take_row(state: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
            x, dt, b, c = row
            state = jnp.exp(dt[..., None] * a) * state + (dt * x)[..., None] * b[:, None]
            out = state[..., 0] * c[:, None, 0]
            for i in range(1, state_size):
                out = out + state[..., i] * c[:, None, i]
            return state, out

        by_row = [jnp.moveaxis(rows, 1, 0) for rows in (x, dt, b, c)]
        state, out = lax.scan(take_row, places.state(blocks.state), tuple(by_row), length=chunk)
        kept = SelectiveBlocks(
            state=blocks.state.at[places.closed].set(state),
            dt=blocks.dt.at[block].set(dt),
            x=blocks.x.at[block].set(x),
            b=blocks.b.at[block].set(b),
        )
        return jnp.moveaxis(out, 0, 1), kept

    tokens = jax.tree.map(lambda array: array.astype(jnp.float32), (x, dt, b, c))
    return _by_chunk(compute, blocks, chunk, tokens, block_tables, starts, lengths)


def convolve(
    rows: Float[Array, "num_blocks block_size num_channels"],
    x: Float[Array, "num_seqs num_tokens num_channels"],
    weight: Float[Array, "kernel_size num_channels"],
    bias: Float[Array, " num_channels"] | None,
    block_tables: Int[Array, "num_seqs max_blocks"],
    starts: Int[Array, " num_seqs"],
    lengths: Int[Array, " num_seqs"],
) -> tuple[
    Float[Array, "num_seqs num_tokens num_channels"], Float[Array, "num_blocks block_size num_channels"]
]:
    """Compute a causal convolution of each channel for the next tokens. Return it in float32, and the rows.

    rows: inputs of earlier tokens in their slots, in x's type; the last `kernel_size - 1` of a sequence are
        read, as from a window.
    weight: for the oldest token first. Products are added in this order, so a token's bits depend on its own
        inputs alone.
    starts: tokens of each sequence before these; zeros come before a sequence. lengths: how many are real.

    Outputs of padding mean nothing, and padding changes block 0 alone. Raises `ValueError` for arrays whose
    shapes or types do not agree.
    """
    block_size, num_channels = rows.shape[1:]
    num_seqs, num_tokens = x.shape[:2]
    _check_shape("x", x, (num_seqs, num_tokens, num_channels))
    _check_shape("weight", weight, (weight.shape[0], num_channels))
    if bias is not None:
        _check_shape("bias", bias, (num_channels,))
    if x.dtype != rows.dtype:
        raise ValueError(f"{x.dtype=} must be {rows.dtype=}")
    kernel_size, positions = weight.shape[0], starts[:, None] + jnp.arange(num_tokens)

    def slots(positions: Array, is_used: Array) -> tuple[Array, Array]:
        """Return blocks and offsets of positions; block 0 where none is used."""
        index = jnp.clip(positions // block_size, 0, block_tables.shape[1] - 1)
        return jnp.where(is_used, jnp.take_along_axis(block_tables, index, 1), 0), positions % block_size

    # First written, then read: a sequence may have several lines here, one behind the other.
    is_real = jnp.arange(num_tokens) < lengths[:, None]
    rows = rows.at[slots(positions, is_real)].set(x)
    before = starts[:, None] - jnp.arange(kernel_size - 1, 0, -1)
    kept = jnp.where((before >= 0)[..., None], rows[slots(before, before >= 0)], 0)
    inputs = jnp.concatenate([kept, x], 1).astype(jnp.float32)
    out = jnp.zeros(x.shape, jnp.float32)
    for j in range(kernel_size):
        # Rounded by itself: in programs of some shapes XLA would add the unrounded product.
        product = lax.optimization_barrier(inputs[:, j : j + num_tokens] * weight[j].astype(jnp.float32))
        out = out + product
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out, rows
