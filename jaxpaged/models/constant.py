"""A model that costs nothing, so that what is left of a step is the engine's own."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch

HIDDEN_SIZE = 8
VOCAB_SIZE = 128


class ConstantModel(nnx.Module):
    """Answers token 0 to everything. It has one weight, for a model without any would be folded away."""

    hidden_size = HIDDEN_SIZE
    dtype = jnp.dtype("float32")

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.zeros(HIDDEN_SIZE))

    def __call__(
        self,
        token_ids: Int[Array, " num_tokens"],
        positions: Int[Array, " num_tokens"],
        cache: KVCache,
        batch: PassBatch,
    ) -> tuple[Float[Array, "num_tokens hidden"], KVCache]:
        return jnp.broadcast_to(self.weight[...], (token_ids.shape[0], HIDDEN_SIZE)), cache

    def logits(self, hidden: Float[Array, "num_tokens hidden"]) -> Float[Array, "num_tokens vocab"]:
        return jnp.broadcast_to(hidden[:, :1], (hidden.shape[0], VOCAB_SIZE))
