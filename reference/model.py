"""A whole Llama or Mistral in NumPy: no cache, no batch, every token anew. The oracle of the engine."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np


class Config(Protocol):
    """The numbers the model needs; `jaxpaged.models.config.ModelConfig` has them."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Any  # None, or Llama 3's: factor, low_freq_factor, high_freq_factor, original_max_len
    tie_word_embeddings: bool
    sliding_window: int | None  # tokens that a token sees, itself among them; None: all before it


Weights = Mapping[str, np.ndarray]  # by Hugging Face name; a projection is [out_features, in_features]


def logits(config: Config, weights: Weights, token_ids: list[int]) -> np.ndarray:
    """Scores of the token after each of `token_ids`: [num_tokens, vocab_size], in the weights' dtype."""
    x = weights["model.embed_tokens.weight"][token_ids]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], config.rms_norm_eps)
        x = x + attention(config, weights, f"{prefix}.self_attn", normed)
        normed = rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], config.rms_norm_eps)
        x = x + mlp(weights, f"{prefix}.mlp", normed)
    x = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return x @ weights[f"{head}.weight"].T


def generate(
    config: Config,
    weights: Weights,
    prompt: list[int],
    max_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
) -> list[int]:
    """Greedy answer: the likeliest token again and again, a stop token included."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(np.argmax(logits(config, weights, tokens)[-1])))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


def attention(config: Config, weights: Weights, prefix: str, x: np.ndarray) -> np.ndarray:
    """Causal attention over all of `x`, [num_tokens, hidden_size]; query heads share kv heads in groups.

    Token i sees token j if j <= i and, with a sliding window, i - j < sliding_window.
    """
    num_tokens = len(x)
    q = linear(weights, f"{prefix}.q_proj", x).reshape(num_tokens, config.num_q_heads, config.head_dim)
    k = linear(weights, f"{prefix}.k_proj", x).reshape(num_tokens, config.num_kv_heads, config.head_dim)
    v = linear(weights, f"{prefix}.v_proj", x).reshape(num_tokens, config.num_kv_heads, config.head_dim)
    q, k = rope(q, config), rope(k, config)
    out = np.empty_like(q)
    group = config.num_q_heads // config.num_kv_heads
    seen = np.tri(num_tokens, dtype=bool)
    if config.sliding_window is not None:
        seen &= ~np.tri(num_tokens, k=-config.sliding_window, dtype=bool)
    for head in range(config.num_q_heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(config.head_dim)
        scores = np.where(seen, scores, -np.inf)
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weight / weight.sum(axis=-1, keepdims=True) @ v[:, head // group]
    return linear(weights, f"{prefix}.o_proj", out.reshape(num_tokens, -1))


def mlp(weights: Weights, prefix: str, x: np.ndarray) -> np.ndarray:
    """`down(silu(gate(x)) * up(x))`."""
    gate = linear(weights, f"{prefix}.gate_proj", x)
    return linear(
        weights, f"{prefix}.down_proj", gate / (1 + np.exp(-gate)) * linear(weights, f"{prefix}.up_proj", x)
    )


def linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def rope(x: np.ndarray, config: Config) -> np.ndarray:
    """Turn each pair (i, i + head_dim / 2) of `x`, [num_tokens, num_heads, head_dim], by its angle."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * np.array([rope_frequency(config, i / half) for i in range(half)])
    cos, sin = (f(angle).astype(x.dtype)[:, None] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_frequency(config: Config, place: float) -> float:
    """Radians a position of the pair that stands at `place` in [0, 1) among the pairs of a head.

    Llama 3 stretches what turns slowly: a wave longer than original / low is slowed by `factor`, one shorter
    than original / high is kept, and between them the two are mixed.
    """
    frequency = config.rope_theta**-place
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = scaling.original_max_len / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
