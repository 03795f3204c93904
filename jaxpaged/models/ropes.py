"""Descriptions of what follows from a token's position: RoPE, its scalings, and a temperature."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slow frequencies stretched, from `original_max_len` positions to `factor` times as many."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Theta enlarged for `factor` times as many positions, where sequences may pass `original_max_len`."""

    factor: float
    original_max_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp between; cosines and sines times
    `attention_factor`.
    """

    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # whether the ramp begins and ends at whole pairs
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0  # latent attention multiplies its scores by a factor of it; 0: by none


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongScaling:
    """LongRoPE: each frequency divided by a factor of its own, of `long_factors` where sequences may be
    longer than `original_max_len`; cosines and sines times `attention_factor`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_len: int
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalScaling:
    """The first `num_pairs` pairs turn, as those of all coordinates would, divided by `factor`."""

    num_pairs: int
    factor: float = 1.0


type RopeScaling = (
    Llama3Scaling | LinearScaling | DynamicScaling | YarnScaling | LongScaling | ProportionalScaling
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: how they turn the first `dim` coordinates of queries and keys, in pairs."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Temperature:
    """Queries at position p multiplied by `1 + scale * log(1 + floor((p + offset) / every))`."""

    every: int  # tokens
    scale: float
    offset: int = 1  # 0: a token at position `every` is the first whose queries grow
