"""Mixers over paged blocks: the tiles of a pass, one after the other where they are of one sequence."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import layers
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.feed_forward import stack
from jaxpaged.models.weights import Weights
from pallas_kernels.ops import states

# Computes tokens [num_seqs, num_tokens, ...] of sequences: (blocks, tokens, tables, starts, lengths) to
# (outputs, blocks).
type Compute = Callable[..., tuple[Array, Any]]


def tables_of(cache: KVCache, number: int, batch: PassBatch) -> Int[Array, "num_tiles max_blocks"]:
    """Return the place of each tile's blocks in the arrays of the state layer of this number."""
    group = 0 if batch.grouping is None else batch.grouping.num_groups - 1
    rows = batch.rows_of(group)
    tables = batch.block_tables if rows is None else batch.block_tables[rows]
    return cache.state_places(tables, number)


class _Real(NamedTuple):
    """The real tokens of each tile: neighbours, with padding in front of them and behind.

    A tile begins at a multiple of its length. Where a sequence's beginning is in the cache already, tokens in
    front are padding.
    """

    shift: Int[Array, " num_tiles"]  # places of padding in front
    starts: Int[Array, " num_tiles"]  # position of the first
    lengths: Int[Array, " num_tiles"]

    def to_front(self, x: Float[Array, "num_tiles tile_len ..."]) -> Float[Array, "num_tiles tile_len ..."]:
        """Return tiles that begin with their first real token; what is behind the last means nothing."""
        return self._moved(x, self.shift)

    def back(self, x: Float[Array, "num_tiles tile_len ..."]) -> Float[Array, "num_tiles tile_len ..."]:
        """Return tiles as they were before `to_front`; padding means nothing."""
        return self._moved(x, -self.shift)

    def _moved(self, x: Array, by: Int[Array, " num_tiles"]) -> Array:
        tile_len = x.shape[1]
        if tile_len == 1:
            return x
        places = jnp.clip(jnp.arange(tile_len) + by[:, None], 0, tile_len - 1)
        return jnp.take_along_axis(x, places.reshape(*places.shape, *[1] * (x.ndim - 2)), axis=1)


def _real(batch: PassBatch) -> _Real:
    is_real = ~batch.is_padding.reshape(batch.query_starts.shape[0], -1)
    shift = jnp.argmax(is_real, axis=1).astype(jnp.int32)
    return _Real(shift, batch.query_starts + shift, jnp.sum(is_real, axis=1, dtype=jnp.int32))


def over_tiles(
    compute: Compute,
    blocks: Any,
    tokens: tuple[Float[Array, "num_tokens ..."], ...],
    tables: Int[Array, "num_tiles max_blocks"],
    batch: PassBatch,
) -> tuple[Float[Array, "num_tokens ..."], Any]:
    """Compute a pass's tokens tile by tile; tiles of one sequence in the order of their positions.

    Tiles of prompts are computed one by one. Tiles of one token are computed together, in as many rounds as
    a sequence has tiles: one, but for drafts.
    """
    real = _real(batch)
    starts, lengths = real.starts, real.lengths
    num_tiles, tile_len = starts.shape[0], batch.tile_len
    by_tile = jax.tree.map(lambda x: real.to_front(x.reshape(num_tiles, tile_len, *x.shape[1:])), tokens)
    if tile_len > 1:

        def one(blocks: Any, tile: tuple[Any, ...]) -> tuple[Any, Array]:
            table, start, length, *tokens = jax.tree.map(lambda x: x[None], tile)

            def run(blocks: Any) -> tuple[Array, Any]:
                return compute(blocks, tuple(tokens), table, start, length)

            shape = jax.eval_shape(run, blocks)[0]
            nothing = jnp.zeros(shape.shape, shape.dtype)
            out, blocks = lax.cond(length[0] > 0, run, lambda blocks: (nothing, blocks), blocks)
            return blocks, out[0]

        # A scan, and not a loop over those in use: gradients go through it.
        order = jnp.argsort(starts, stable=True)
        tiles = jax.tree.map(lambda x: x[order], (tables, starts, lengths, *by_tile))
        blocks, out = lax.scan(one, blocks, tiles)
        out = real.back(jnp.zeros_like(out).at[order].set(out))
        return out.reshape(num_tiles * tile_len, *out.shape[2:]), blocks

    is_used = lengths > 0
    rows = batch.rows_of(0)
    if rows is None:
        same = jnp.all(tables[:, None] == tables[None], axis=2)
    else:
        same = rows[:, None] == rows[None]
    earlier = same & is_used[None] & (starts[None] < starts[:, None])
    rank = jnp.sum(earlier, 1)

    def run_round(blocks: Any, number: Int[Array, ""]) -> tuple[Array, Any]:
        return compute(blocks, by_tile, tables, starts, jnp.where(rank == number, lengths, 0))

    shape = jax.eval_shape(run_round, blocks, jnp.int32(0))[0]
    type Carry = tuple[Int[Array, ""], Array, Any]

    def one_round(carry: Carry) -> Carry:
        number, out, blocks = carry
        new, blocks = run_round(blocks, number)
        mine = (rank == number).reshape(-1, *[1] * (new.ndim - 1))
        return number + 1, jnp.where(mine, new, out), blocks

    last = jnp.max(jnp.where(is_used, rank, -1))
    carry = jnp.int32(0), jnp.zeros(shape.shape, shape.dtype), blocks
    _, out, blocks = lax.while_loop(lambda carry: carry[0] <= last, one_round, carry)
    return out.reshape(num_tiles, *out.shape[2:]), blocks


def convolve(
    rows: Float[Array, "num_places block_size num_channels"],
    x: Float[Array, "num_tokens num_channels"],
    weight: Float[Array, "kernel_size num_channels"],
    bias: Float[Array, " num_channels"] | None,
    tables: Int[Array, "num_tiles max_blocks"],
    batch: PassBatch,
) -> tuple[Float[Array, "num_tokens num_channels"], Float[Array, "num_places block_size num_channels"]]:
    """Compute a convolution of each channel. Return it in float32, and the rows with x in their slots."""
    real = _real(batch)
    tiles = real.to_front(x.reshape(real.starts.shape[0], batch.tile_len, -1))
    out, rows = states.convolve(rows, tiles, weight, bias, tables, real.starts, real.lengths)
    return real.back(out).reshape(x.shape), rows


def advance(
    arrays: dict[str, Array],
    q: Float[Array, "num_tokens num_key_heads k_dim"],
    k: Float[Array, "num_tokens num_key_heads k_dim"],
    v: Float[Array, "num_tokens num_heads v_dim"],
    log_decay: Float[Array, "num_tokens num_heads"],
    beta: Float[Array, "num_tokens num_heads"] | None,
    tables: Int[Array, "num_tiles max_blocks"],
    batch: PassBatch,
) -> tuple[Float[Array, "num_tokens num_heads v_dim"], dict[str, Array]]:
    """Advance the states of one layer by a pass's tokens; see `ops.states.advance`.

    arrays: those of a layer, by name, perhaps beside others. Returns outputs, and the arrays of the state.
    """
    names = ("state", "k", "u", "log_decay")
    blocks = states.StateBlocks(**{name: arrays[name] for name in names}, has_delta_rule=beta is not None)
    tokens = (q, k, v, log_decay[..., None], *(() if beta is None else (beta,)))

    def compute(
        blocks: states.StateBlocks, tokens: tuple[Array, ...], tables: Array, starts: Array, lengths: Array
    ) -> tuple[Array, states.StateBlocks]:
        q, k, v, log_decay, *rest = tokens
        beta = rest[0] if rest else None
        return states.advance(blocks, q, k, v, log_decay, beta, tables, starts, lengths)

    out, blocks = over_tiles(compute, blocks, tokens, tables, batch)
    return out, {name: getattr(blocks, name) for name in names}


def apart(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return x as numbers of its own. XLA may not fuse what made it with what follows: it would sometimes add
    an unrounded product, in passes of one shape and not in those of another.
    """
    return lax.optimization_barrier(x)


def stacked(weights: Weights, role: str) -> layers.Stack:
    """Return the weights of this role, which all layers with states have."""
    stacked_weights = stack(weights, f"mixer.{role}")
    assert stacked_weights is not None
    return stacked_weights


def in_float32(stack: layers.Stack, number: int) -> Float[Array, "..."]:
    """Return a layer's weight in float32."""
    return stack[number].astype(jnp.float32)
