"""A decoder's plain twin: the same arithmetic in operations that XLA can differentiate.

It has no kernel of ours, and no loop whose length is known only as it runs. Its values differ from the
kernels' in their last bits. Its weights are made of the engine's, packed or not, by moving numbers.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.contracts.attentions import Attention
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.layer_form import LayerForm
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import AbstractWeights
from pallas_kernels.support import first_seen

FORM = LayerForm("xla", "xla", loops=False, differentiable=True)
HIDDEN_SCORE = -1e30  # of a key that a query does not see: its share is 0, and its gradient no NaN

type Path = tuple[Any, ...]


def twin(config: ModelConfig, load_as: LoadAs) -> Decoder:
    """Return the plain decoder of a description, with shapes for arrays."""

    def made() -> Decoder:
        weights = AbstractWeights(config, load_as)
        weights.form = FORM
        return Decoder(weights)

    return nnx.eval_shape(made)


def weights_of(params: nnx.State, shapes: nnx.State) -> nnx.State:
    """Return the plain decoder's weights, of these shapes, made of an engine's."""
    engine_weights: dict[Path, Any] = {
        path: variable.get_value() for path, variable in nnx.to_flat_state(params)
    }
    made = []
    for path, variable in nnx.to_flat_state(shapes):
        like = variable.get_value()
        made.append((path, variable.replace(_unpacked(_found(engine_weights, path, like), like))))
    return nnx.from_flat_state(made)


def _found(engine_weights: Mapping[Path, Any], path: Path, like: Any) -> Any:
    """Return a weight of the plain decoder as the engine has it: alone, or in a stack of all layers."""
    if path in engine_weights:
        weight = engine_weights[path]
        # A layer's experts, where those of all layers are in one stack.
        return weight[: like.shape[0]] if "linears" in path and path[-1] == "all" else weight
    if path[:-1] in engine_weights:
        return engine_weights[path[:-1]][path[-1]]
    place = path.index("linears") + 1
    count, first = like.shape[0], path[place] * like.shape[0]
    return engine_weights[(*path[:place], 0, *path[place + 1 :])][first : first + count]


def _unpacked(array: Array, like: Any) -> Array:
    """Return a product's weight [*, in_features, out_features] from the packed form of `native.pack`."""
    if array.ndim == len(like.shape):
        return array
    *lead, num_panels, num_steps, width, values = array.shape
    rows = jnp.swapaxes(array, -3, -2).reshape(*lead, num_panels * width, num_steps * values)
    return jnp.swapaxes(rows, -1, -2)[..., : like.shape[-2], : like.shape[-1]]


def log_probs(
    model: Decoder,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    *,
    block_size: int,
    table_width: int,
    adapted: bool,
) -> Float[Array, "batch length_minus_1"]:
    """Compute the log-probability of each token behind the first, 0 beyond a sequence's length.

    All sequences are one pass, with a tile each, over a cache of `table_width` blocks a sequence.
    """
    batch, length = tokens.shape
    blocks = cdiv(length, block_size)
    cache = model.create_cache(1 + batch * blocks, block_size)
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    is_token = position < lengths[:, None]
    tables = tables_of(batch, blocks, table_width)
    block = jnp.take_along_axis(tables, position // block_size, axis=1)
    slots = jnp.where(is_token, block * block_size + position % block_size, 0)
    attention = Attention(prompts=functools.partial(attend, num_blocks=blocks), name="plain")
    passed = PassBatch(
        slot_mapping=slots.reshape(-1),
        block_tables=tables,
        query_starts=jnp.zeros(batch, jnp.int32),
        seq_lens=lengths,
        implementation=attention,
        adapters=(lengths > 0).astype(jnp.int32) if adapted else None,
    )
    ids = jnp.where(is_token, tokens, 0).reshape(-1)
    hidden, _ = model(ids, jnp.where(is_token, position, 0).reshape(-1), cache, passed)
    logits = model.logits(hidden).reshape(batch, length, -1)[:, :-1]
    shares = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(shares, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(is_token[:, 1:], chosen, 0)


def tables_of(batch: int, blocks: int, width: int) -> Int[Array, "batch width"]:
    """Return block tables of so many sequences, each with blocks of its own behind the null block."""
    tables = 1 + jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
    return jnp.pad(tables, ((0, 0), (0, width - blocks)))


def attend(
    q: Float[Array, "batch length num_q_heads head_dim"],
    k_cache: Float[Array, "num_blocks block_size num_kv_heads head_dim"],
    v_cache: Float[Array, "num_blocks block_size num_kv_heads head_dim"],
    block_tables: Int[Array, "batch width"],
    query_starts: Int[Array, " batch"],
    seq_lens: Int[Array, " batch"],
    *,
    num_blocks: int,
    scale: float,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, " num_q_heads"] | None = None,
    sinks: Float[Array, " num_q_heads"] | None = None,
) -> Float[Array, "batch length num_q_heads head_dim"]:
    """Compute `ops.tiled_paged_attention` in float32, all scores at once, over each row's first blocks."""
    batch, length, num_q_heads = q.shape[:3]
    ids = block_tables[:, :num_blocks]
    k, v = (
        x[ids].reshape(batch, -1, *x.shape[2:]).astype(jnp.float32).repeat(num_q_heads // x.shape[2], axis=2)
        for x in (k_cache, v_cache)
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), k) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    query = (query_starts[:, None] + jnp.arange(length))[:, None, :, None]
    key = jnp.arange(k.shape[1])
    if alibi_slopes is not None:
        scores = scores + alibi_slopes[:, None, None] * (key - query)
    seen = (key <= query) & (key < seq_lens[:, None, None, None])
    if (first := first_seen(query, sliding_window, attention_chunk)) is not None:
        seen &= key >= first
    scores = jnp.where(seen, scores, HIDDEN_SCORE)
    row_max = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    if sinks is not None:
        row_max = jnp.maximum(row_max, jax.lax.stop_gradient(sinks)[:, None, None])
    powers = jnp.where(seen, jnp.exp(scores - row_max), 0)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks[:, None, None] - row_max)
    shares = powers / jnp.where(total == 0, 1, total)  # a row beyond its sequence sees nothing
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).astype(q.dtype)
