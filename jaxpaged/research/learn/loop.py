"""The compiled programs of a learner: log-probabilities by the engine's own passes, and their gradients."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.contracts.attentions import Attention
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.layers import AdapterParam
from jaxpaged.research.learn import plain
from jaxpaged.sampling import score
from pallas_kernels import native
from pallas_kernels.layouts import Layout
from pallas_kernels.ops import TiledImplementation
from pallas_kernels.ops.low_rank import LowRank

type Adapter = dict[str, tuple[Any, Any]]  # by role: a and b of all layers, packed as `models.lora` has them


@dataclass(frozen=True, eq=False)
class Program:
    """Constants of a learner's programs, which are compiled for each such object."""

    layout: Layout
    implementation: TiledImplementation | Attention
    block_size: int  # tokens
    table_width: int  # blocks in a row of the block tables
    tiles_per_pass: int
    model: nnx.GraphDef
    plain: nnx.GraphDef
    shapes: Any  # of the plain decoder's weights, as pairs of a path and a variable
    roles: tuple[tuple[str, tuple[Any, ...], tuple[int, ...]], ...]  # adapters' roles, places and widths


@functools.partial(jax.jit, static_argnums=0)
def log_probs(
    program: Program,
    params: nnx.State,
    adapter: Adapter | None,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch length_minus_1"]:
    """Compute the log-probability of each token behind the first, with the engine's bits.

    Tiles, passes, kernels and cache are those with which the engine computes a prompt and scores it. Tiles
    without tokens come last, and passes of them are left out.
    """
    batch, length = tokens.shape
    model: Decoder = nnx.merge(program.model, with_adapter(program, params, adapter))
    blocks, width = cdiv(length, program.block_size), program.tiles_per_pass
    cache = model.create_cache(1 + batch * blocks, program.block_size, program.layout)
    tables = plain.tables_of(batch, blocks, program.table_width)
    per_row = cdiv(length, PREFILL_TILE)
    number = jnp.arange(cdiv(batch * per_row, width) * width, dtype=jnp.int32)
    rows, starts = jnp.minimum(number // per_row, batch - 1), number % per_row * PREFILL_TILE
    used = (number < batch * per_row) & (starts < lengths[rows])
    order = jnp.argsort(~used, stable=True)
    rows, starts, used = rows[order], starts[order], used[order]
    ends = jnp.where(used, jnp.minimum(starts + PREFILL_TILE, lengths[rows]), 0)
    logprobs = jnp.zeros((number.shape[0], PREFILL_TILE), jnp.float32)

    type Carry = tuple[KVCache, Float[Array, "num_tiles tile_len"]]

    def one_pass(i: Int[Array, ""], carry: Carry) -> Carry:
        cache, logprobs = carry
        row, start, end = (lax.dynamic_slice_in_dim(x, i * width, width) for x in (rows, starts, ends))
        positions = start[:, None] + jnp.arange(PREFILL_TILE, dtype=jnp.int32)
        is_token = positions < end[:, None]
        block = tables.at[row[:, None], positions // program.block_size].get(mode="clip")
        slots = jnp.where(is_token, block * program.block_size + positions % program.block_size, 0)
        wanted = jnp.broadcast_to(end[:, None] > 0, positions.shape)
        passed = PassBatch(
            slot_mapping=slots.reshape(-1),
            block_tables=tables,
            query_starts=start,
            seq_lens=end,
            implementation=program.implementation,
            adapters=(end > 0).astype(jnp.int32) if adapter is not None else None,
            table_rows=row,
            wanted=wanted.reshape(-1),
        )
        ids = jnp.where(is_token, tokens.at[row[:, None], positions].get(mode="clip"), 0)
        places = jnp.where(is_token, positions, 0)
        flat, cache = model(ids.reshape(-1), places.reshape(-1), cache, passed)
        hidden = flat.reshape(*positions.shape, -1)

        def score_tile(
            k: Int[Array, ""], logprobs: Float[Array, "num_tiles tile_len"]
        ) -> Float[Array, "num_tiles tile_len"]:
            behind = tokens.at[row[k], positions[k] + 1].get(mode="clip")
            nothing = jnp.zeros(PREFILL_TILE, jnp.int32)
            logprob = score(model.logits(hidden[k]), behind, nothing).logprob
            return logprobs.at[i * width + k].set(jnp.where(positions[k] + 1 < lengths[row[k]], logprob, 0))

        return cache, lax.fori_loop(0, jnp.sum(end > 0), score_tile, logprobs)

    _, logprobs = lax.fori_loop(0, cdiv(jnp.sum(used), width), one_pass, (cache, logprobs))
    placed = jnp.zeros_like(logprobs).at[order].set(logprobs)
    return placed[: batch * per_row].reshape(batch, -1)[:, : length - 1]


@functools.partial(jax.jit, static_argnums=0)
def gradients(
    program: Program,
    params: nnx.State,
    adapter: Adapter | None,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    given: Float[Array, "batch length_minus_1"],
) -> tuple[nnx.State, Adapter | None]:
    """Return the cotangents of weights and adapter, for those of the log-probabilities.

    They are those of the plain decoder, which is computed anew. A tied table that lies twice, as an embedding
    and packed as the head's, has the sum of both in both places.
    """

    def value(params: nnx.State, adapter: Adapter | None) -> Float[Array, "batch length_minus_1"]:
        made = plain.weights_of(params, nnx.from_flat_state(program.shapes))
        model: Decoder = nnx.merge(program.plain, with_adapter(program, made, adapter))
        return plain.log_probs(
            *(model, tokens, lengths),
            block_size=program.block_size,
            table_width=program.table_width,
            adapted=adapter is not None,
        )

    _, transposed = jax.vjp(value, params, adapter)
    of_params, of_adapter = transposed(given)
    return _tied(program, of_params), of_adapter


def with_adapter(program: Program, params: nnx.State, adapter: Adapter | None) -> nnx.State:
    """Return parameters with an adapter in the only adapter slot; without any if there is none."""
    if adapter is None:
        return params
    flat = list(nnx.to_flat_state(params))
    for role, place, widths in program.roles:
        a, b = (x[:, None] for x in adapter[role])
        flat.append((place, AdapterParam(LowRank(a, b, widths))))
    return nnx.from_flat_state(flat)


def _tied(program: Program, cotangents: nnx.State) -> nnx.State:
    """Give the packed head of a tied model the cotangent of its embedding."""
    flat = dict(nnx.to_flat_state(cotangents))
    head = ("lm_head", "kernel", "all")
    if head in flat and not any(path[0] == "lm_head" for path, _ in program.shapes):
        packed = native.pack(flat["embedding",].get_value())
        flat[head] = flat[head].replace(packed[None])
    return nnx.from_flat_state(list(flat.items()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(
    program: Program,
    params: nnx.State,
    adapter: Adapter | None,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch length_minus_1"]:
    """Compute `log_probs` with `gradients` as its gradients."""
    return log_probs(program, params, adapter, tokens, lengths)


def _forward(program: Program, *inputs: Any) -> tuple[Any, Any]:
    return log_probs(program, *inputs), inputs


def _backward(program: Program, inputs: Any, given: Any) -> tuple[Any, ...]:
    return (*gradients(program, *inputs, given), None, None)


differentiable.defvjp(_forward, _backward)
