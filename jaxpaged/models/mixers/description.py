"""Descriptions of recurrent mixers: their sizes, weights, and what a layer keeps for a block of tokens."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import jax.numpy as jnp

from jaxpaged.checks import check, checked_int

type Shape = tuple[int, ...]
IN_FLOAT32 = ("mixer.a_log", "mixer.d", "mixer.dt_bias")  # roles that are float32 in every model


class Mixer(Protocol):
    """Protocol of a description. Instances are frozen and hashable. Roles begin with `mixer.`."""

    name: ClassVar[str]

    @property
    def kernel_size(self) -> int:
        """Tokens of the short convolution, the newest among them."""
        ...

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role."""
        ...

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return the outputs of each of a role's tensors in a file; None: all have as many."""
        ...

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return shapes and dtypes of what a layer keeps in a block of so many tokens, by name."""
        ...


@dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """Gated delta rule of Qwen3-Next (Yang and others 2024), behind a short convolution of q, k and v."""

    name: ClassVar[str] = "gated_delta"
    num_heads: int  # of values; each key head serves `num_heads / num_key_heads` of them
    num_key_heads: int
    k_dim: int
    v_dim: int
    kernel_size: int

    def __post_init__(self) -> None:
        """Check the sizes, which come from files. Raises `InputError`."""
        _check_sizes(self, "num_heads", "num_key_heads", "k_dim", "v_dim", "kernel_size")
        rule = f"a multiple of the {self.num_key_heads} key heads"
        check("model config: value heads", self.num_heads, rule, self.num_heads % self.num_key_heads == 0)

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: all of q, k and v."""
        return 2 * self.num_key_heads * self.k_dim + self.num_heads * self.v_dim

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role: `in` has q, k, v and z, `ba` has b and a."""
        width = self.num_heads * self.v_dim
        return {
            "mixer.in.weight": (self.num_channels + width, hidden_size),
            "mixer.ba.weight": (2 * self.num_heads, hidden_size),
            "mixer.conv.weight": (self.kernel_size, self.num_channels),
            "mixer.a_log": (self.num_heads,),
            "mixer.dt_bias": (self.num_heads,),
            "mixer.norm.weight": (self.v_dim,),
            "mixer.out.weight": (hidden_size, width),
        }

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return the outputs of q, k, v and of z, where they are two tensors."""
        is_in = role == "mixer.in.weight" and count == len(("qkv", "z"))
        return [self.num_channels, self.num_heads * self.v_dim] if is_in else None

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return the arrays of `ops.states.StateBlocks`, and the convolution's inputs in `dtype`."""
        return _state_arrays(block_size, self.num_heads, self.num_key_heads, self.k_dim, self.v_dim) | {
            "conv": ((block_size, self.num_channels), dtype)
        }


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Mamba-2 (Dao and Gu 2024): heads with one decay each, B and C shared by groups of heads."""

    name: ClassVar[str] = "mamba2"
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    kernel_size: int
    conv_bias: bool = True
    bias: bool = False  # of both projections
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    norm_groups: int = 1  # groups of numbers that the output's norm takes apart

    def __post_init__(self) -> None:
        """Check the sizes, which come from files. Raises `InputError`."""
        names = ("num_heads", "head_dim", "state_size", "num_groups", "kernel_size", "norm_groups")
        _check_sizes(self, *names)
        rule = f"a multiple of the {self.num_groups} groups"
        check("model config: mamba heads", self.num_heads, rule, self.num_heads % self.num_groups == 0)
        rule = f"a multiple of {self.norm_groups}, the norm's groups"
        check("model config: mamba width", self.width, rule, self.width % self.norm_groups == 0)

    @property
    def width(self) -> int:
        """Numbers of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.width + 2 * self.num_groups * self.state_size

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role: `in` has z; x, B and C; dt."""
        shapes: dict[str, Shape] = {
            "mixer.in.weight": (self.width + self.num_channels + self.num_heads, hidden_size),
            "mixer.conv.weight": (self.kernel_size, self.num_channels),
            "mixer.a_log": (self.num_heads,),
            "mixer.d": (self.num_heads,),
            "mixer.dt_bias": (self.num_heads,),
            "mixer.norm.weight": (self.width,),
            "mixer.out.weight": (hidden_size, self.width),
        }
        if self.conv_bias:
            shapes["mixer.conv.bias"] = (self.num_channels,)
        if self.bias:
            shapes["mixer.in.bias"] = shapes["mixer.in.weight"][:1]
            shapes["mixer.out.bias"] = (hidden_size,)
        return shapes

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return None: every role is one tensor."""
        return None

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return the arrays of `ops.states.StateBlocks`, and the convolution's inputs in `dtype`."""
        sizes = self.num_heads, self.num_groups, self.state_size, self.head_dim
        return _state_arrays(block_size, *sizes) | {"conv": ((block_size, self.num_channels), dtype)}


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """LFM2's gated short convolution: `C * conv(B * x)` of three parts of one projection."""

    name: ClassVar[str] = "short_convolution"
    width: int
    kernel_size: int
    bias: bool = False  # of the convolution and both projections

    def __post_init__(self) -> None:
        """Check the sizes, which come from files. Raises `InputError`."""
        _check_sizes(self, "width", "kernel_size")

    def weights(self, hidden_size: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role: `in` has B, C and x."""
        shapes: dict[str, Shape] = {
            "mixer.in.weight": (3 * self.width, hidden_size),
            "mixer.conv.weight": (self.kernel_size, self.width),
            "mixer.out.weight": (hidden_size, self.width),
        }
        if self.bias:
            shapes |= {
                "mixer.in.bias": (3 * self.width,),
                "mixer.conv.bias": (self.width,),
                "mixer.out.bias": (hidden_size,),
            }
        return shapes

    def pieces(self, role: str, count: int) -> list[int] | None:
        """Return None: every role is one tensor."""
        return None

    def arrays(self, block_size: int, dtype: jnp.dtype) -> dict[str, tuple[Shape, jnp.dtype]]:
        """Return the convolution's inputs in the model's dtype."""
        return {"conv": ((block_size, self.width), dtype)}


def _state_arrays(
    chunk: int, num_heads: int, num_key_heads: int, k_dim: int, v_dim: int
) -> dict[str, tuple[Shape, jnp.dtype]]:
    float32 = jnp.dtype("float32")
    return {
        "state": ((num_heads, k_dim, v_dim), float32),
        "k": ((chunk, num_key_heads, k_dim), float32),
        "u": ((chunk, num_heads, v_dim), float32),
        "log_decay": ((chunk, num_heads, 1), float32),
    }


def _check_sizes(mixer: object, *names: str) -> None:
    for name in names:
        checked_int(f"model config: {name} of a mixer", getattr(mixer, name), "an int >= 1", 1)
