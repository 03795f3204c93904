"""MiMo V2: values narrower than keys, twice the KV heads and sinks in layers with a window."""

import dataclasses
from typing import Any

import numpy as np

from jaxpaged.checks import check, is_int
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.families import layer_ropes, llama, routing
from jaxpaged.models.families.family import Family
from jaxpaged.models.families.uneven import WINDOWED_SINKS
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import FormOfLayers, Names, Pieces, Stored

PART = 0.334  # of each head is turned
TABLE = routing.TABLE | {"sinks": f"{llama.LAYER}.self_attn.attention_sink_bias"}
NAMES = Names(table=TABLE, of_layers=WINDOWED_SINKS, ignored=("model.mtp.",))
ROPES: dict[str, dict[str, Any]] = {
    layer_ropes.FULL: {"rope_theta": 5000000.0, "partial_rotary_factor": PART},
    layer_ropes.SLIDING: {"rope_theta": 10000.0, "partial_rotary_factor": PART},
}


FUSED_TABLE = {**TABLE, "qkv": f"{llama.LAYER}.self_attn.qkv_proj"}
BESIDE = ("visual.", "audio_encoder.", "speech_embeddings.")  # parts for images and sound


def read_mimo(f: Fields) -> ModelConfig:
    """Read MiMo V2 Flash as transformers has it."""
    kv_heads, num_layers = f.size("num_key_value_heads"), f.size("num_hidden_layers")
    size = f.get("sliding_window_size")  # of the tokens before a token, without itself
    window = f.size("sliding_window", 129) if size is None else f.size("sliding_window_size") + 1
    local, everywhere = layer_ropes.read(f, f.size("head_dim"), **ROPES)
    types = [
        layer_ropes.FULL if i == 0 or (i + 1) % 6 == 0 else layer_ropes.SLIDING for i in range(num_layers)
    ]
    layers = f.layer_kinds(
        types,
        sliding=LayerKind(rope=local, sliding_window=window),
        full=LayerKind(rope=everywhere, num_kv_heads=kv_heads),
    )
    return _described(f, layers, 2 * kv_heads, routing.dense_layers(f, 1))


def read_mimo_v2(f: Fields) -> ModelConfig:
    """Read MiMo V2.5 as its own files have it."""
    f.alias(rms_norm_eps="layernorm_epsilon")
    check(
        "model config: attention_projection_layout",
        f.get("attention_projection_layout"),
        "'fused_qkv'",
        f.get("attention_projection_layout") == "fused_qkv",
    )
    head_dim, num_layers = f.size("head_dim"), f.size("num_hidden_layers")
    f.only("swa_num_attention_heads", f.size("num_attention_heads"))
    f.only("swa_head_dim", head_dim)
    f.only("swa_v_head_dim", f.size("v_head_dim", 128))
    f.only("add_swa_attention_sink_bias", True)
    f.only("add_full_attention_sink_bias", False)
    f.only("attention_chunk_size", f.get("sliding_window"))  # repeats the window
    part = {"partial_rotary_factor": f.positive("partial_rotary_factor", PART)}
    name, said = "rope_scaling", f.get("rope_scaling") or f.get("rope_parameters") or {}
    local, everywhere = (
        f.rope_of(name, said, {"rope_theta": f.positive(theta), **part}, head_dim, is_partial=True)
        for theta in ("swa_rope_theta", "rope_theta")
    )
    kv_heads, sliding_kv_heads = f.size("num_key_value_heads"), f.size("swa_num_key_value_heads")
    sliding = LayerKind(rope=local, sliding_window=f.size("sliding_window_size") + 1)
    full = LayerKind(rope=everywhere, num_kv_heads=kv_heads)
    f.get("sliding_window")
    slides, sparse = _flags(f, "hybrid_layer_pattern"), _flags(f, "moe_layer_freq")
    layers = tuple(sliding if each else full for each in slides)
    return _described(f, layers, sliding_kv_heads, tuple(i for i in range(num_layers) if not sparse[i]))


def _flags(f: Fields, name: str) -> list[int]:
    """Read a list of zeros and ones, one for each layer."""
    value = f.get(name)
    ok = isinstance(value, list) and len(value) == f.size("num_hidden_layers")
    ok = ok and all(is_int(each) and each in (0, 1) for each in value)
    check(f"model config: {name}", value, "a list of zeros and ones, one for each layer", ok)
    return list(value)


def _described(
    f: Fields, layers: tuple[LayerKind, ...], sliding_kv_heads: int, dense: tuple[int, ...]
) -> ModelConfig:
    """Return the description of layers, of which those with a window have so many KV heads, and sinks."""
    same, v_head_dim = llama.common(f), f.size("v_head_dim", 128)
    has_sliding = any(kind.sliding_window is not None for kind in layers)
    kv_heads = sliding_kv_heads if has_sliding else same["num_kv_heads"]
    if kv_heads == same["num_kv_heads"]:  # all have as many
        layers = tuple(dataclasses.replace(kind, num_kv_heads=None) for kind in layers)
    experts, width = routing.read(f, same["intermediate_size"], dense_layers=0, has_flags=True)
    experts = dataclasses.replace(
        experts, dense_layers=dense, dense_size=same["intermediate_size"] if dense else 0
    )
    check("model config: n_shared_experts", experts.shared_size, "0 or left out", experts.shared_size == 0)
    scale = 1.0 if f.is_null("attention_value_scale") else f.positive("attention_value_scale", 0.707)
    return ModelConfig(
        **same | {"intermediate_size": width, "num_kv_heads": kv_heads},
        v_head_dim=None if v_head_dim == same["head_dim"] else v_head_dim,
        value_scale=scale,
        sinks=has_sliding,
        qkv_bias=f.flag("attention_bias"),
        experts=experts,
        layers=layers,
    )


def _fused(config: ModelConfig, layer: int) -> tuple[int, int, int]:
    """Return how many rows of queries, keys and values a layer's fused product has."""
    kv_heads, head_dim = config.heads_of(layer)
    v_dim = config.v_head_dim or head_dim
    return config.num_q_heads * head_dim, kv_heads * head_dim, kv_heads * v_dim


def _num_parts(config: ModelConfig) -> int:
    """Return into how many parts a fused product is divided, each of queries, keys and values."""
    return min(config.heads_of(i)[0] for i in range(config.num_layers))


def _stored(config: ModelConfig, role: str, layer: int, tensors: Stored) -> Stored:
    if not role.startswith("qkv."):
        return WINDOWED_SINKS.stored(config, role, layer, tensors)
    [(name, shape)] = tensors
    return [(name, (sum(_fused(config, layer)), *shape[1:]))]


def _restored(config: ModelConfig, role: str, layer: int, pieces: Pieces) -> Pieces:
    """Return the pieces. A fused product has as many parts of queries, keys and values as there are KV heads
    in the layers that have fewest.
    """
    if not role.startswith("qkv."):
        return WINDOWED_SINKS.restored(config, role, layer, pieces)
    [fused] = pieces
    parts = _num_parts(config)
    rows = fused.reshape(parts, -1, *fused.shape[1:])
    q, k, _ = (count // parts for count in _fused(config, layer))
    parts_of_rows = [each.reshape(-1, *fused.shape[1:]) for each in np.split(rows, [q, q + k], axis=1)]
    return WINDOWED_SINKS.restored(config, role, layer, parts_of_rows)


FUSED_NAMES = Names(
    table=FUSED_TABLE,
    of_layers=FormOfLayers(_stored, _restored),
    ignored=(*NAMES.ignored, *BESIDE),
    chunks={".qkv_proj": _num_parts},
)
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "rms_norm_eps": 1e-5,
}
MIMO_V2 = Family(
    model_type="mimo_v2",
    models="MiMo V2.5, text only",
    read=read_mimo_v2,
    names=lambda config: FUSED_NAMES,
    defaults=_DEFAULTS,
)
MIMO_V2_FLASH = Family(
    model_type="mimo_v2_flash",
    models="MiMo V2 Flash",
    read=read_mimo,
    names=lambda config: NAMES,
    defaults=_DEFAULTS,
)
