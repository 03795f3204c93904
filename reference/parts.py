"""The parts of a decoder that all others are made of: products, norms and activations."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def activate(config: Any, x: np.ndarray) -> np.ndarray:
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    if config.activation == "relu":
        return np.maximum(x, 0)
    if config.activation == "relu2":
        return np.maximum(x, 0) ** 2
    if config.activation == "gelu_tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert config.activation == "gelu"
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)).astype(x.dtype))


def linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def norm(config: Any, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Normalise by the root of the mean square; a layer norm subtracts the mean first."""
    if config.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    weight = weights[f"{name}.weight"] + x.dtype.type(config.norm_offset)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(config.norm_eps)) * weight
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def gated(config: Any, gate: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return the output of attention, [num_tokens, heads, head_dim], times a gate of each head or each
    coordinate.
    """
    gate = gate.reshape(len(out), -1, 1 if config.output_gate == "head" else out.shape[-1])
    factors = 1 / (1 + np.exp(-gate)) if config.gate_activation == "sigmoid" else np.log1p(np.exp(gate))
    return out * factors
