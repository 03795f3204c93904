"""Fields and names of Mamba-1 and Mamba-2 that families share."""

import math

from jaxpaged.checks import check, checked_number
from jaxpaged.models.fields import Fields
from jaxpaged.models.mixers.mamba2 import Mamba2


def read(f: Fields, width: int | None = None) -> Mamba2:
    """Read the fields of Mamba-2 as Granite 4, Bamba and Falcon-H1 call them.

    width: numbers of all heads together, where a family has read it.
    """
    if width is None:
        width = f.size("mamba_expand", 2) * f.size("hidden_size")
    has_bias = f.flag("mamba_proj_bias")
    num_heads, num_groups = f.size("mamba_n_heads", 128), f.size("mamba_n_groups", 1)
    head_dim = f.get("mamba_d_head", "auto")
    head_dim = width // num_heads if head_dim == "auto" else f.size("mamba_d_head")
    rule = f"{width} / mamba_n_heads={num_heads}, or 'auto'"
    check("model config: mamba_d_head", head_dim, rule, head_dim * num_heads == width)
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=f.size("mamba_d_state", 256),
        num_groups=num_groups,
        kernel_size=f.size("mamba_d_conv", 4),
        conv_bias=f.flag("mamba_conv_bias", True),
        bias=has_bias,
        out_bias=has_bias,
        dt_limit=dt_limit(f),
        norm_groups=num_groups,
    )


def read_plain(f: Fields, *, num_heads: int, head_dim: int, state_size: int, num_groups: int) -> Mamba2:
    """Read the other fields of Mamba-2 as Nemotron-H and the model of that name call them."""
    has_bias = f.flag("use_bias")
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=state_size,
        num_groups=num_groups,
        kernel_size=f.size("conv_kernel", 4),
        conv_bias=f.flag("use_conv_bias", True),
        bias=has_bias,
        out_bias=has_bias,
        dt_limit=dt_limit(f),
        norm_groups=num_groups,
    )


def dt_limit(f: Fields) -> tuple[float, float]:
    """Read the limits of time steps; without any they are 0 and infinity."""
    said = f.get("time_step_limit") or (0.0, None)
    ok = isinstance(said, list | tuple) and len(said) == len(("low", "high"))
    check("model config: time_step_limit", said, "two numbers >= 0, or null", ok)
    low, high = map(_limit, said)
    return low, high


def _limit(value: object) -> float:
    """Return a limit of time steps. JSON has no infinity: transformers writes an object in its place."""
    if value in (None, math.inf) or value == {"__float__": "Infinity"}:
        return math.inf
    return checked_number("model config: time_step_limit", value, "two numbers >= 0, or null", 0)


def dt_rank(f: Fields, name: str) -> int:
    """Read the rank of Mamba-1's time steps: "auto" is a sixteenth of the hidden size."""
    return -(-f.size("hidden_size") // 16) if f.get(name, "auto") == "auto" else f.size(name)


def table(module: str) -> dict[str, str | tuple[str, ...]]:
    """Return the names of Mamba-2's weights in a module of this name."""
    return _table(module, dt_bias="dt_bias", norm="norm")


def mamba1_table(module: str) -> dict[str, str | tuple[str, ...]]:
    """Return the names of Mamba-1's weights in a module of this name, without those of norms."""
    return _table(module, x="x_proj", dt="dt_proj", dt_bias="dt_proj.bias")


def _table(module: str, **more: str) -> dict[str, str | tuple[str, ...]]:
    names = {"in": "in_proj", "conv": "conv1d", "a_log": "A_log", "d": "D", "out": "out_proj", **more}
    return {f"mixer.{role}": f"{module}.{name}" for role, name in names.items()}
