"""Rotary embedding in NumPy, and the scalings of its frequencies."""

import math
from typing import Any, Protocol

import numpy as np


class Rope(Protocol):
    """Rotary embedding: the first `dim` coordinates of a head are turned by the position."""

    theta: float
    dim: int
    scaling: Any  # None, or one of four, told apart by what it has


def rope(x: np.ndarray, rope: Rope, max_len: int, first: int = 0) -> np.ndarray:
    """Turn each pair (i, i + dim / 2) of `x`, [num_tokens, num_heads, head_dim], by its angle.

    The first token is at position `first`.
    """
    half = rope.dim // 2
    angle = np.arange(first, first + len(x))[:, None] * np.array(
        [frequency(rope, i, max_len) for i in range(half)]
    )
    factor = getattr(rope.scaling, "attention_factor", 1.0)
    cos, sin = ((factor * f(angle)).astype(x.dtype)[:, None] for f in (np.cos, np.sin))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def frequency(rope: Rope, pair: int, max_len: int) -> float:
    """Return the radians that one pair turns in a position, slowed as the scaling says."""
    plain, scaling = rope.theta ** (-2 * pair / rope.dim), rope.scaling
    if scaling is None:
        return plain
    if hasattr(scaling, "long_factors"):
        is_long = max_len > scaling.original_max_len
        return plain / (scaling.long_factors if is_long else scaling.short_factors)[pair]
    if type(scaling).__name__ == "DynamicScaling":
        return dynamic_frequency(rope, pair, max_len)
    if hasattr(scaling, "num_pairs"):
        return plain / scaling.factor if pair < scaling.num_pairs else 0.0
    if hasattr(scaling, "low_freq_factor"):
        return llama3_frequency(plain, scaling)
    if hasattr(scaling, "beta_fast"):
        return yarn_frequency(rope, plain, pair)
    return plain / scaling.factor


def dynamic_frequency(rope: Rope, pair: int, max_len: int) -> float:
    """Return a frequency of RoPE with a "dynamic" scaling: NTK-aware, for the longest sequence it serves.

    Up to the original length nothing is scaled. Beyond it, theta is what transformers takes for a sequence of
    `factor` times the original length; as in vLLM, for shorter ones, too: keys in a cache keep their angles.
    """
    scaling, theta = rope.scaling, rope.theta
    if max_len > scaling.original_max_len:
        longest = scaling.factor * scaling.original_max_len
        stretch = scaling.factor * longest / scaling.original_max_len - (scaling.factor - 1)
        theta *= stretch ** (rope.dim / (rope.dim - 2))
    return theta ** (-2 * pair / rope.dim)


def llama3_frequency(plain: float, scaling: Any) -> float:
    """Scale a frequency as Llama 3 does, which slows what turns slowly.

    A wave longer than original / low is slowed by `factor`, one shorter than original / high is kept, and
    between them the two are mixed.
    """
    wavelength = 2 * math.pi / plain
    if wavelength < scaling.original_max_len / scaling.high_freq_factor:
        return plain
    if wavelength > scaling.original_max_len / scaling.low_freq_factor:
        return plain / scaling.factor
    smooth = scaling.original_max_len / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def yarn_frequency(rope: Rope, plain: float, pair: int) -> float:
    """Scale a frequency as YaRN does, by the pair's number.

    Pairs before the one that turns `beta_fast` times in the original length are kept. Pairs behind the one
    that turns `beta_slow` times are slowed by `factor`.
    """
    scaling = rope.scaling

    def pair_with(turns: float) -> float:
        """Return the number of the pair that turns so often."""
        return math.log(scaling.original_max_len / (2 * math.pi * turns), rope.theta) * rope.dim / 2

    begin, end = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, rope.dim - 1)
    slow = min(max((pair - begin) / (end - begin or 0.001), 0), 1)
    return (1 - slow) * plain + slow * plain / scaling.factor
