"""Descriptions of Llama models by their sizes."""

from typing import Any

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.ropes import Llama3Scaling, Rope

LLAMA_3_SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)


def llama_config(
    num_layers: int, hidden_size: int, intermediate_size: int, *, num_q_heads: int, num_kv_heads: int,
    head_dim: int, theta: float = 1e4, scaling: Llama3Scaling | None = None, **other: Any,
) -> ModelConfig:  # fmt: skip
    """Describe a model of equal layers; `other` are fields of `ModelConfig`."""
    return ModelConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=uniform(num_layers, rope=Rope(theta=theta, dim=head_dim, scaling=scaling)),
        **{"norm_eps": 1e-5, **other},
    )
