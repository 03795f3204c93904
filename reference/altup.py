"""Gemma 3n's additions to a decoder in NumPy: streams, a shortcut of a low rank, and inputs of each layer.

A token has several streams. Each layer predicts all of them from all, computes the first, and corrects each
by how far the first was off. The streams behind the first also get the layer's own input.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .parts import Weights, activate, linear, norm

Compute = Callable[[np.ndarray], np.ndarray]


def started(config: Any, weights: Weights, x: np.ndarray) -> np.ndarray:
    """Return the streams, [num_streams, num_tokens, hidden_size]: the embeddings, and products as large."""
    matrices = np.split(weights["altup_begin.weight"], config.altup.num_streams - 1)
    return np.stack([x, *(as_large(x @ matrix.T, x) for matrix in matrices)])


def joined(config: Any, weights: Weights, streams: np.ndarray) -> np.ndarray:
    """Return the mean of the first stream and of the products of the others, each as large."""
    matrices = np.split(weights["altup_end.weight"], config.altup.num_streams - 1)
    pairs = zip(streams[1:], matrices, strict=True)
    others = [as_large(stream @ matrix.T, streams[0]) for stream, matrix in pairs]
    return np.mean([streams[0], *others], axis=0)


def as_large(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return x with the root mean square of `like`; a mean square below 1e-5 counts as that."""
    wanted = np.sqrt(np.mean(like * like, axis=-1, keepdims=True))
    root_mean_square = np.sqrt(np.maximum(np.mean(x * x, axis=-1, keepdims=True), x.dtype.type(1e-5)))
    return x * wanted / root_mean_square


def layer(
    config: Any, weights: Weights, name: str, streams: np.ndarray, layer_inputs: np.ndarray, compute: Compute
) -> np.ndarray:
    """Return the streams behind a layer. `layer_inputs`: [num_tokens, width]; `compute`: its rest."""

    def routed(x: np.ndarray) -> np.ndarray:
        normed = norm(config, weights, f"{name}.altup_router_norm", x)
        return np.tanh(linear(weights, f"{name}.altup_router", normed) / x.dtype.type(x.shape[-1]))

    count = len(streams)
    factors = linear(weights, f"{name}.altup_predict", routed(streams[0])).reshape(-1, count, count)
    predictions = streams + np.einsum("tji,ith->jth", factors, streams)
    computed = compute(predictions[0])
    factors = linear(weights, f"{name}.altup_correct", routed(computed)) + 1
    out = predictions + factors.T[:, :, None] * (computed - predictions[0])
    first = out[0] * weights[f"{name}.altup_scale"] if config.altup.scaled else out[0]
    out[1:] += of_inputs(config, weights, name, first, layer_inputs)
    return out


def of_inputs(
    config: Any, weights: Weights, name: str, x: np.ndarray, layer_inputs: np.ndarray
) -> np.ndarray:
    """Return the part of a layer's output that comes of its inputs, [num_tokens, width]: gated by x, and
    normed.
    """
    gate = activate(config, linear(weights, f"{name}.layer_input_gate", x))
    added = linear(weights, f"{name}.layer_input_out", gate * layer_inputs)
    return norm(config, weights, f"{name}.layer_input_norm", added)


def with_laurel(
    config: Any, weights: Weights, name: str, attended: np.ndarray, normed: np.ndarray
) -> np.ndarray:
    """Return the mean of attention's output and Laurel's shortcut around it, times the root of 2."""
    narrow = linear(weights, f"{name}.laurel_left", normed)
    wide = linear(weights, f"{name}.laurel_right", narrow)
    shortcut = normed + norm(config, weights, f"{name}.laurel_norm", wide)
    return (attended + shortcut) / attended.dtype.type(math.sqrt(2))


def layer_inputs(config: Any, weights: Weights, token_ids: list[int], x: np.ndarray) -> np.ndarray:
    """Return the inputs of all layers, [num_tokens, num_layers, width], for tokens with embeddings x."""
    inputs_config = config.layer_inputs
    shape = len(token_ids), len(config.layers), inputs_config.width
    known = [token if token < inputs_config.vocab_size else 0 for token in token_ids]
    looked_up = weights["layer_inputs_table.weight"][known].reshape(shape) * x.dtype.type(
        inputs_config.width**0.5
    )
    made = linear(weights, "layer_inputs_product", x) / x.dtype.type(x.shape[-1] ** 0.5)
    normed = norm(config, weights, "layer_inputs_norm", made.reshape(shape))
    return (normed + looked_up) / x.dtype.type(math.sqrt(2))


def sparse(gate: np.ndarray, deviations: float) -> np.ndarray:
    """Return the excess of each token's values over their mean plus `deviations` standard deviations, at
    least 0.
    """
    cut = gate.mean(axis=-1, keepdims=True) + gate.std(axis=-1, keepdims=True) * gate.dtype.type(deviations)
    return np.maximum(gate - cut, 0)
