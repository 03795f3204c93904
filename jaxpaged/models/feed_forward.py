"""A dense feed-forward part, and how products are made of a decoder's weights."""

import statistics

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged import row_sums
from jaxpaged.models import layers
from jaxpaged.models.shards import total
from jaxpaged.models.weights import Weights


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, or without a gate `down(act(up(x)))`.

    `prefix`: that of its roles. An expert that all tokens have is such a part; its caller sums `pieces`.
    """

    def __init__(self, weights: Weights, prefix: str = "") -> None:
        self.config = weights.config
        self.shards = weights.shards
        self.up = linear(weights, f"{prefix}gate_up" if self.config.gated else f"{prefix}up")
        self.down = linear(weights, f"{prefix}down")
        self.xielu = XIELU(weights) if self.config.activation == "xielu" else None

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        layer: layers.Layer,
        is_padding: Bool[Array, " num_tokens"],  # part of the common signature; only experts use it
        adapters: Int[Array, " num_tiles"] | None = None,
    ) -> Float[Array, "num_tokens hidden"]:
        return total(self.shards, self.pieces(x, layer, adapters))

    def pieces(
        self,
        x: Float[Array, "num_tokens hidden"],
        layer: layers.Layer,
        adapters: Int[Array, " num_tiles"] | None = None,
    ) -> list[Float[Array, "num_tokens hidden"]]:
        """Return what the columns of this shard give, piece by piece."""
        wide = self.up(x, layer, adapters)
        if self.config.gated:
            gate, up = jnp.split(wide, 2, axis=-1)
            gate = times(gate, self.config.factors.gate)
            wide = self._activated(self._sparse(gate, layer), layer) * up
        else:
            wide = self._activated(wide, layer)
        return self.down.pieces(wide.astype(x.dtype), layer, adapters)

    def _sparse(
        self, x: Float[Array, "num_tokens width"], layer: layers.Layer
    ) -> Float[Array, "num_tokens width"]:
        """Return what a token's numbers have above a quantile of a Gaussian of their mean and deviation."""
        shares = [kind.sparsity for kind in self.config.layers]
        if not any(shares):
            return x
        deviations = [statistics.NormalDist().inv_cdf(share) if share else 0.0 for share in shares]
        mean_of = row_sums.mean if self.shards is None else self.shards.mean
        mean = mean_of(x)
        variance = mean_of(jnp.square(x - mean))
        count = deviations[layer] if isinstance(layer, int) else jnp.asarray(deviations)[layer]
        is_sparse = shares[layer] > 0 if isinstance(layer, int) else jnp.asarray(shares)[layer] > 0
        return jnp.where(is_sparse, jax.nn.relu(x - mean - jnp.sqrt(variance) * count), x)

    def _activated(
        self, x: Float[Array, "num_tokens width"], layer: layers.Layer
    ) -> Float[Array, "num_tokens width"]:
        if self.xielu is not None:
            return self.xielu(x, layer)
        return layers.ACTIVATIONS[self.config.activation](x)


class XIELU(nnx.Module):
    """Each layer's `p x^2 + beta x` for x > 0, else `n (exp(min(x, eps)) - 1 - x) + beta x`.

    p is the softplus of `alpha_p`, n is beta plus the softplus of `alpha_n`: numbers that the model has.
    """

    def __init__(self, weights: Weights) -> None:
        def number(name: str) -> layers.Stack:
            weight = stack(weights, f"xielu.{name}")
            assert weight is not None
            return weight

        self.numbers = nnx.List(number(name) for name in ("alpha_p", "alpha_n", "beta", "eps"))

    def __call__(
        self, x: Float[Array, "num_tokens width"], layer: layers.Layer
    ) -> Float[Array, "num_tokens width"]:
        alpha_p, alpha_n, beta, eps = (values[layer].astype(jnp.float32) for values in self.numbers)
        positive = jax.nn.softplus(alpha_p) * x * x
        negative = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x, eps)) - x)
        return jnp.where(x > 0, positive, negative) + beta * x


def times(x: Float[Array, "..."], factor: float) -> Float[Array, "..."]:
    """Return a rounded product with a factor: XLA may not add it unrounded to something else."""
    return x if factor == 1.0 else lax.optimization_barrier(x * jnp.asarray(factor, x.dtype))


def linear(weights: Weights, role: str) -> layers.Linear:
    """Return the layers' product of this role."""
    kernels = weights.each(f"{role}.weight")
    assert kernels is not None
    num_pieces = weights.num_pieces(role)
    return layers.Linear(kernels, weights.each(f"{role}.bias"), form=weights.form, num_pieces=num_pieces)


def stack(weights: Weights, role: str) -> layers.Stack | None:
    """Return the layers' array of this role; None where they have none."""
    arrays = weights.each(role)
    if arrays is None:
        return None
    return layers.Stack(arrays, len(arrays), together=weights.form.loops)
