"""Gemma 3n's additions to a decoder: AltUp's streams, Laurel's shortcut, and inputs of each layer.

With AltUp a token has several streams of the residual's width. A layer predicts all streams from all,
computes the first, and corrects every stream by how far the first's prediction was off. Each layer also has
inputs of its own, looked up by the token, which it adds to the streams behind the first.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged import row_sums
from jaxpaged.models import layers
from jaxpaged.models.change import Change
from jaxpaged.models.feed_forward import linear, stack
from jaxpaged.models.norms import last_norm, norm
from jaxpaged.models.quantised.codes import QuantisedWeight
from jaxpaged.models.weights import Weights

SMALLEST = 1e-5  # mean square that a stream's is taken for, where it is less
HALF = 0.5**0.5  # a sum of two is multiplied by it: as large as each of them


def _as_large(
    x: Float[Array, "num_tokens hidden"], like: Float[Array, "num_tokens hidden"]
) -> Float[Array, "num_tokens hidden"]:
    """Return x with the root mean square of `like`."""
    wide, goal = x.astype(jnp.float32), like.astype(jnp.float32)
    wanted = jnp.sqrt(row_sums.mean(goal * goal))
    root_mean_square = jnp.sqrt(jnp.maximum(row_sums.mean(wide * wide), SMALLEST))
    return (wide * wanted / root_mean_square).astype(x.dtype)


class Streams(nnx.Module):
    """Parallel streams of hidden values (AltUp), made from a token's embedding; their mean is the end."""

    def __init__(self, weights: Weights) -> None:
        altup = weights.config.altup
        assert altup is not None
        self.count = altup.num_streams - 1  # of those that are not the first

        def products(role: str) -> layers.Linear:
            whole = weights.get(role)
            assert whole is not None
            assert not isinstance(whole, QuantisedWeight)
            if isinstance(whole, Change):
                return layers.Linear(whole.split(self.count), form=weights.form)
            return layers.Linear(jnp.split(jnp.asarray(whole), self.count), form=weights.form)

        self.begin, self.end = products("altup_begin.weight"), products("altup_end.weight")

    def started(self, x: Float[Array, "num_tokens hidden"]) -> Float[Array, "num_tokens num_streams hidden"]:
        """Return the embeddings, and products of them that are as large."""
        others = [self.begin(x, i).astype(x.dtype) for i in range(self.count)]
        return jnp.stack([x, *(_as_large(other, x) for other in others)], axis=1)

    def joined(self, x: Float[Array, "num_tokens num_streams hidden"]) -> Float[Array, "num_tokens hidden"]:
        """Return the mean of the first stream, and of products of the others that are as large."""
        first = x[:, 0]
        others = [self.end(x[:, i + 1], i).astype(x.dtype) for i in range(self.count)]
        total = first.astype(jnp.float32)
        for other in others:
            total = total + _as_large(other, first)
        return (total / x.shape[1]).astype(x.dtype)


class AltUp(nnx.Module):
    """Each layer's prediction of the streams, and their correction."""

    def __init__(self, weights: Weights) -> None:
        self.hidden_size = weights.config.hidden_size
        self.router, self.router_norm = linear(weights, "altup_router"), norm(weights, "altup_router_norm")
        self.prediction, self.correction = linear(weights, "altup_predict"), linear(weights, "altup_correct")
        self.scale = stack(weights, "altup_scale")

    def predicted(
        self, x: Float[Array, "num_tokens num_streams hidden"], layer: layers.Layer
    ) -> Float[Array, "num_tokens num_streams hidden"]:
        """Return each stream with a sum of all added, by factors that follow from the first."""
        count = x.shape[1]
        factors = self.prediction(self._routed(x[:, 0], layer), layer).reshape(-1, count, count)
        wide = x.astype(jnp.float32)
        total = wide
        for i in range(count):  # one after the other: a token's bits do not follow from the number of tokens
            total = total + factors[:, :, i, None] * wide[:, i, None]
        return total.astype(x.dtype)

    def corrected(
        self,
        predictions: Float[Array, "num_tokens num_streams hidden"],
        computed: Float[Array, "num_tokens hidden"],
        layer: layers.Layer,
    ) -> Float[Array, "num_tokens num_streams hidden"]:
        """Return the predictions with what the first lacked added, by factors that follow from it."""
        factors = self.correction(self._routed(computed, layer), layer) + 1
        lacked = (computed - predictions[:, 0]).astype(jnp.float32)
        return (predictions + factors[:, :, None] * lacked[:, None]).astype(predictions.dtype)

    def scaled(
        self, first: Float[Array, "num_tokens hidden"], layer: layers.Layer
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the first stream as the layer's own inputs are weighed by it."""
        return first if self.scale is None else first * self.scale[layer].astype(first.dtype)

    def _routed(
        self, x: Float[Array, "num_tokens hidden"], layer: layers.Layer
    ) -> Float[Array, "num_tokens num_streams"]:
        assert self.router_norm is not None
        normed = self.router_norm(x, layer)
        return jnp.tanh(self.router(normed, layer) / self.hidden_size).astype(x.dtype)


class Laurel(nnx.Module):
    """Each layer's shortcut of a low rank: `x + norm(right(left(x)))`."""

    def __init__(self, weights: Weights) -> None:
        self.left, self.right = linear(weights, "laurel_left"), linear(weights, "laurel_right")
        self.norm = norm(weights, "laurel_norm")

    def __call__(
        self, x: Float[Array, "num_tokens hidden"], layer: layers.Layer
    ) -> Float[Array, "num_tokens hidden"]:
        assert self.norm is not None
        narrow = self.left(x, layer).astype(x.dtype)
        return x + self.norm(self.right(narrow, layer).astype(x.dtype), layer)


class LayerInputs(nnx.Module):
    """The inputs of all layers: looked up by the token, and made of its embedding."""

    def __init__(self, weights: Weights) -> None:
        sizes = weights.config.layer_inputs
        assert sizes is not None
        self.config, self.sizes = weights.config, sizes
        table, product = (weights.get(f"layer_inputs_{name}.weight") for name in ("table", "product"))
        assert table is not None
        assert product is not None
        self.table = nnx.Param(layers.on_device(table))
        self.product = layers.Linear([product], form=weights.form)
        self.norm = last_norm(weights, "layer_inputs_norm")

    def __call__(
        self, token_ids: Int[Array, " num_tokens"], x: Float[Array, "num_tokens hidden"]
    ) -> Float[Array, "num_tokens num_layers width"]:
        sizes, shape = self.sizes, (len(token_ids), self.config.num_layers, -1)
        # Tokens beyond the table, which stand for images and sounds, have the inputs of token 0.
        token_ids = jnp.where(token_ids < sizes.vocab_size, token_ids, 0)
        looked_up = layers.look_up(self.table.get_value(), token_ids).reshape(shape)
        looked_up = looked_up * jnp.asarray(sizes.width**0.5, x.dtype)
        made = (self.product(x) * self.config.hidden_size**-0.5).astype(x.dtype).reshape(shape)
        return (self.norm(made) + looked_up) * jnp.asarray(HALF, x.dtype)


class LayerInput(nnx.Module):
    """Each layer's `norm(out(act(gate(x)) * input))`."""

    def __init__(self, weights: Weights) -> None:
        self.activation = layers.ACTIVATIONS[weights.config.activation]
        self.gate, self.out = linear(weights, "layer_input_gate"), linear(weights, "layer_input_out")
        self.norm = norm(weights, "layer_input_norm")

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        inputs: Float[Array, "num_tokens num_layers width"],
        layer: layers.Layer,
    ) -> Float[Array, "num_tokens hidden"]:
        assert self.norm is not None
        wide = self.activation(self.gate(x, layer)) * inputs[:, layer]
        return self.norm(self.out(wide.astype(x.dtype), layer).astype(x.dtype), layer)
