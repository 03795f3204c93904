"""Lengths of sequences that scalings of RoPE are made for."""

import dataclasses

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.ropes import (
    DynamicScaling,
    LinearScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)


def lengthened(config: ModelConfig) -> ModelConfig:
    """Return the model with the length that its RoPE is scaled for."""
    scalings = {kind.rope.scaling for kind in config.layers if kind.rope is not None}
    longest = max(
        (scaled_len(scaling, config.max_model_len) for scaling in scalings if scaling is not None), default=0
    )
    return dataclasses.replace(config, max_model_len=longest) if longest else config


def scaled_len(scaling: RopeScaling | None, max_len: int) -> int:
    """Return how long sequences may be with a scaling, by vLLM's rule for each kind.

    max_len: what the config says, which already counts the scalings of Llama 3 and LongRoPE, and of YaRN
        in most files: the factor that they leave out is rounded.
    """
    match scaling:
        case YarnScaling():
            return max(max_len, int(scaling.original_max_len * scaling.factor))
        case LinearScaling() | DynamicScaling() | ProportionalScaling():
            return int(max_len * scaling.factor)
        case _:
            return max_len
