"""Norms made of a decoder's weights: those that each layer has, and those that it has once."""

from jaxpaged.models import layers
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.feed_forward import stack
from jaxpaged.models.weights import Weights

Norm = layers.RMSNorm | layers.LayerNorm


def norm(weights: Weights, role: str) -> Norm | None:
    """Return every layer's norm of this role; None where layers have none."""
    scales = stack(weights, f"{role}.weight")
    return None if scales is None else made_norm(weights.config, scales, stack(weights, f"{role}.bias"))


def last_norm(weights: Weights, role: str) -> Norm:
    """Return a norm that the decoder has once."""
    weight, bias = weights.get(f"{role}.weight"), weights.get(f"{role}.bias")
    assert weight is not None
    biases = None if bias is None else layers.Stack([bias], 1, together=False)
    return made_norm(weights.config, layers.Stack([weight], 1, together=False), biases)


def made_norm(config: ModelConfig, weights: layers.Stack, biases: layers.Stack | None) -> Norm:
    if config.norm == "layer":
        return layers.LayerNorm(weights, biases, config.norm_eps, config.norm_offset)
    return layers.RMSNorm(weights, config.norm_eps, config.norm_offset)
