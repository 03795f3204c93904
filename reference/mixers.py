"""Recurrent mixers of a decoder in NumPy, token by token: layers that keep a state in place of K and V."""

from typing import Any

import numpy as np

from .parts import Weights, linear
from .states import causal_convolution, recurrence, selective_scan


def mixer(config: Any, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Compute the mixer of a layer for a whole sequence, [num_tokens, hidden_size]."""
    by_name = {
        "gated_delta": gated_delta,
        "lightning": lightning,
        "mamba1": mamba1,
        "mamba2": mamba2,
        "short_convolution": short_convolution,
    }
    return by_name[config.mixer.name](config, weights, f"{name}.mixer", x)


def gated_delta(config: Any, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Compute the gated delta rule behind a convolution of q, k and v; its output normed and gated by z."""
    d = config.mixer
    width, key_width = d.num_heads * d.v_dim, d.num_key_heads * d.k_dim
    mixed, z = np.split(linear(weights, f"{name}.in", x), [2 * key_width + width], axis=1)
    b, a = np.split(linear(weights, f"{name}.ba", x), 2, axis=1)
    q, k, v = np.split(silu(convolved(weights, name, mixed)), [key_width, 2 * key_width], axis=1)
    q, k = (y.reshape(len(x), d.num_key_heads, d.k_dim) for y in (q, k))
    q, k = (y / np.sqrt(np.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    log_decay = -np.exp(weights[f"{name}.a_log"]) * softplus(a + weights[f"{name}.dt_bias"])
    v = v.reshape(len(x), d.num_heads, d.v_dim)
    beta = d.most_beta / (1 + np.exp(-b))
    out, _ = recurrence(q * d.k_dim**-0.5, k, v, log_decay[..., None], beta)
    eps = config.norm_eps if d.norm_eps is None else d.norm_eps
    out = root_mean_square_normed(out, eps) * weights[f"{name}.norm.weight"]
    return linear(weights, f"{name}.out", (out.reshape(len(x), -1) * silu(z)).astype(x.dtype))


def mamba2(config: Any, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Compute Mamba-2 behind a convolution of x, B and C; its output gated by z, and normed in groups."""
    d = config.mixer
    width, of_states = d.num_heads * d.head_dim, d.num_groups * d.state_size
    into = linear(weights, f"{name}.in", x * x.dtype.type(d.in_scale))
    if d.section_scales:
        sizes = (width, width, of_states, of_states, d.num_heads)
        into = into * np.repeat(np.array(d.section_scales, x.dtype), sizes)
    z, mixed, dt = np.split(into, [width, 2 * width + 2 * of_states], axis=1)
    given, b, c = np.split(silu(convolved(weights, name, mixed)), [width, width + of_states], axis=1)
    given = given.reshape(len(x), d.num_heads, d.head_dim)
    b, c = (y.reshape(len(x), d.num_groups, d.state_size) for y in (b, c))
    dt = np.clip(softplus(dt + weights[f"{name}.dt_bias"]), *d.dt_limit)
    log_decay = -np.exp(weights[f"{name}.a_log"]) * dt
    out, _ = recurrence(c, b, given * dt[..., None], log_decay[..., None], None)
    out = (out + given * weights[f"{name}.d"][:, None]).reshape(len(x), width)

    def normed(out: np.ndarray) -> np.ndarray:
        out = root_mean_square_normed(out.reshape(len(x), d.norm_groups, -1), config.norm_eps)
        return out.reshape(len(x), width) * weights[f"{name}.norm.weight"]

    if d.norm == "before_gate":
        out = normed(out) * silu(z)
    elif d.norm == "after_gate":
        out = normed(out * silu(z))
    else:
        out = out * silu(z)
    return linear(weights, f"{name}.out", out.astype(x.dtype)) * x.dtype.type(d.out_scale)


def mamba1(config: Any, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Compute Mamba-1 behind a convolution of x, from which dt, B and C come; its output gated by z."""
    d = config.mixer
    mixed, z = np.split(linear(weights, f"{name}.in", x), 2, axis=1)
    given = silu(convolved(weights, name, mixed))
    parts = np.split(linear(weights, f"{name}.x", given), [d.dt_rank, d.dt_rank + d.state_size], axis=1)
    if d.norms != "none":
        parts = [root_mean_square_normed(part, d.norm_eps) for part in parts]
    if d.norms == "weighted":
        each = zip(parts, ("dt", "b", "c"), strict=True)
        parts = [part * weights[f"{name}.{role}_norm.weight"] for part, role in each]
    dt, b, c = parts
    dt = softplus(linear(weights, f"{name}.dt", dt) + weights[f"{name}.dt_bias"])
    out, _ = selective_scan(given, dt, b, c, -np.exp(weights[f"{name}.a_log"]))
    out = (out + given * weights[f"{name}.d"]) * silu(z)
    return linear(weights, f"{name}.out", out.astype(x.dtype))


def lightning(config: Any, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Compute lightning attention; its output normed, all heads together, and gated."""
    d = config.mixer
    number = config.state_layers.index(int(name.split(".")[1]))
    qkv = silu(linear(weights, f"{name}.in", x)).reshape(len(x), 3, d.num_heads, d.head_dim)
    log_decay = np.broadcast_to(np.array(d.log_decays[number]), (len(x), d.num_heads))
    out, _ = recurrence(qkv[:, 0], qkv[:, 1], qkv[:, 2], log_decay[..., None], None)
    out = root_mean_square_normed(out.reshape(len(x), -1), d.norm_eps) * weights[f"{name}.norm.weight"]
    gate = 1 / (1 + np.exp(-linear(weights, f"{name}.gate", x)))
    return linear(weights, f"{name}.out", (gate * out).astype(x.dtype)) * x.dtype.type(d.out_scale)


def short_convolution(config: Any, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Compute `out(C * conv(B * x))`, with B, C and x of one projection."""
    b, c, given = np.split(linear(weights, f"{name}.in", x), 3, axis=1)
    return linear(weights, f"{name}.out", (c * convolved(weights, name, b * given)).astype(x.dtype))


def convolved(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Return a causal convolution of each channel."""
    return causal_convolution(x, weights[f"{name}.conv.weight"], weights.get(f"{name}.conv.bias"))


def root_mean_square_normed(x: np.ndarray, eps: float) -> np.ndarray:
    """Return numbers of the last axis divided by the root of their mean square."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def silu(x: np.ndarray) -> np.ndarray:
    """Return `x sigmoid(x)`."""
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """Return `log(1 + exp(x))`."""
    return np.logaddexp(0, x)
