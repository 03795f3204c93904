"""Attention of layers that have fewer query heads or KV heads than others, or values narrower than keys.

In the decoder all layers are alike. Of the query heads that share a KV head, those that a layer lacks are
zeros at the end. KV heads that it lacks are repetitions, which the cache does not hold. A value's missing
coordinates are zeros, which the cache holds.
"""

import math

import numpy as np

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.names import FormOfLayers, Pieces, Stored

type Sizes = tuple[int, ...]  # what an axis is made of, such as KV heads, query heads of each, coordinates
ABSENT = -60000.0  # the sink of a layer without one: it adds nothing, and float16 has it


def _sizes(config: ModelConfig, role: str, layer: int) -> list[tuple[int, Sizes, Sizes]]:
    """Return of each tensor of a role an axis, and its sizes in the file and in the decoder."""
    c, kind = config, config.layers[layer]
    kv_heads, head_dim = c.heads_of(layer)
    groups = c.num_kv_heads, (kind.num_q_heads or c.num_q_heads) // c.num_kv_heads
    whole = c.num_kv_heads, c.num_q_heads // c.num_kv_heads
    v_dim = c.v_head_dim or head_dim
    stem = role.rpartition(".")[0]
    if stem == "qkv":
        kv = (0, (kv_heads, head_dim), (kv_heads, head_dim))
        return [
            (0, (*groups, head_dim), (*whole, head_dim)),
            kv,
            (0, (kv_heads, v_dim), (kv_heads, head_dim)),
        ]
    if role == "o.weight":
        return [(1, (*groups, v_dim), (*whole, head_dim))]
    if stem == "attention_gate":
        tail = (head_dim,) if c.output_gate == "element" else ()
        return [(0, (*groups, *tail), (*whole, *tail))]
    return []


def _is_absent(config: ModelConfig, role: str, layer: int) -> bool:
    """Return whether a layer has no sinks of its own: those that see all tokens have none."""
    return role == "sinks" and config.layers[layer].most_seen is None


def _stored(config: ModelConfig, role: str, layer: int, tensors: Stored) -> Stored:
    stored = list(tensors)
    for i, (axis, sizes, _) in enumerate(_sizes(config, role, layer)):
        name, shape = stored[i]
        stored[i] = name, (*shape[:axis], math.prod(sizes), *shape[axis + 1 :])
    return stored


def _restored(config: ModelConfig, role: str, layer: int, pieces: Pieces) -> Pieces:
    restored = list(pieces)
    for i, (axis, sizes, full) in enumerate(_sizes(config, role, layer)):
        restored[i] = _padded(restored[i], axis, sizes, full)
    times = config.num_kv_heads // config.heads_of(layer)[0]
    if role.startswith("qkv.") and times > 1:
        restored[1:] = [_repeated(piece, config.head_dim, times) for piece in restored[1:]]
    return restored


def _padded(x: np.ndarray, axis: int, sizes: Sizes, full: Sizes) -> np.ndarray:
    if sizes == full:
        return x
    before, behind = x.shape[:axis], x.shape[axis + 1 :]
    pad = [(0, 0)] * len(before) + [(0, b - a) for a, b in zip(sizes, full, strict=True)]
    x = np.pad(x.reshape(*before, *sizes, *behind), [*pad, *[(0, 0)] * len(behind)])
    return x.reshape(*before, -1, *behind)


def _repeated(x: np.ndarray, head_dim: int, times: int) -> np.ndarray:
    rest = x.shape[1:]
    return np.repeat(x.reshape(-1, head_dim, *rest), times, axis=0).reshape(-1, *rest)


UNEVEN = FormOfLayers(_stored, _restored)


def _stored_sinks(config: ModelConfig, role: str, layer: int, tensors: Stored) -> Stored:
    return [] if _is_absent(config, role, layer) else _stored(config, role, layer, tensors)


def _restored_sinks(config: ModelConfig, role: str, layer: int, pieces: Pieces) -> Pieces:
    if _is_absent(config, role, layer):
        return [np.full(config.num_q_heads, ABSENT, np.float32)]
    return _restored(config, role, layer, pieces)


WINDOWED_SINKS = FormOfLayers(_stored_sinks, _restored_sinks)  # the same, with sinks in layers with a window
