"""A feed-forward part of experts: a router chooses a few for each token."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.models import layers
from jaxpaged.models.config import Experts
from jaxpaged.models.weights import Parts

GLU_SLOPE = 1.702


class ExpertLinear(nnx.Module):
    """A product for each layer and expert. An expert's weights are read by its number: in a loop."""

    def __init__(self, parts: Parts, role: str) -> None:
        self.num_experts = parts.config.experts.num_experts if parts.config.experts else 0
        count = parts.config.num_layers
        groups = [range(count)] if parts.form.loops else [[layer] for layer in range(count)]
        self.linears = nnx.List(self._linear(parts, role, group) for group in groups)

    def _linear(self, parts: Parts, role: str, group: range | list[int]) -> layers.Linear:
        weights, biases = parts.of_experts(f"{role}.weight", group), parts.of_experts(f"{role}.bias", group)
        return layers.Linear(weights or (), biases, form=parts.form, together=True)

    def __call__(
        self,
        x: Float[Array, "num_tokens in_features"],
        layer: layers.Layer,
        expert: Int[Array, ""],
    ) -> Float[Array, "num_tokens out_features"]:
        if len(self.linears) == 1:
            return self.linears[0](x, layer * self.num_experts + expert)
        assert isinstance(layer, int)
        return self.linears[layer](x, expert)


class ExpertsMLP(nnx.Module):
    """The chosen experts' outputs, added up with the router's weights.

    One expert after the other, only those whom some token has chosen: nothing else of the weights is read.
    They come in the order of their numbers, so that a token's sum has the same bits in any company.
    """

    def __init__(self, parts: Parts, config: Experts) -> None:
        self.config, self.activation = config, parts.config.activation
        self.shards = parts.shards
        weights, biases = parts.each("router.weight"), parts.each("router.bias")
        self.router = layers.Linear(weights or (), biases, form=parts.form)
        self.gate_up = ExpertLinear(parts, "experts.gate_up")
        self.down = ExpertLinear(parts, "experts.down")

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        layer: layers.Layer,
        is_padding: Bool[Array, " num_tokens"],
        adapters: Int[Array, " num_tiles"] | None = None,  # which change no expert
    ) -> Float[Array, "num_tokens hidden"]:
        weights = jnp.where(is_padding[:, None], 0, self.choose(x, layer))
        chosen = jnp.any(weights > 0, axis=0)
        (experts,) = jnp.nonzero(chosen, size=chosen.shape[0], fill_value=0)

        def add(
            i: Int[Array, ""], total: Float[Array, "num_tokens hidden"]
        ) -> Float[Array, "num_tokens hidden"]:
            expert = experts[i].astype(jnp.int32)
            weight = weights[:, expert, None]
            mine = jnp.where(weight > 0, x, 0)  # products on a CPU skip rows of zeros
            gate, up = jnp.split(self.gate_up(mine, layer, expert), 2, axis=-1)
            out = self.down(self._glu(gate, up).astype(x.dtype), layer, expert)
            return total + weight * jnp.where(weight > 0, out, 0)

        nothing = jnp.zeros(x.shape, jnp.float32)
        out = lax.fori_loop(0, jnp.sum(chosen), add, nothing)
        return out if self.shards is None else self.shards.total(out)

    def choose(
        self, x: Float[Array, "num_tokens hidden"], layer: layers.Layer
    ) -> Float[Array, "num_tokens num_experts"]:
        """Each token's weight for each expert, 0 for those it has not chosen."""
        c = self.config
        scores = self.router(x, layer)
        best, experts = lax.top_k(scores, c.num_chosen)
        if c.renormalise:
            share = jax.nn.softmax(best, axis=-1)
        else:
            share = jnp.exp(best - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
        rows = jnp.arange(x.shape[0])[:, None]
        return jnp.zeros(scores.shape, jnp.float32).at[rows, experts].set(share)

    def _glu(
        self, gate: Float[Array, "num_tokens width"], up: Float[Array, "num_tokens width"]
    ) -> Float[Array, "num_tokens width"]:
        limit = self.config.glu_limit
        if limit is None:
            return layers.ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(GLU_SLOPE * gate) * (up + 1)
