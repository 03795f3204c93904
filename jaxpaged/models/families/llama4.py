"""Llama 4, the text part: chunked layers with RoPE, full ones without, and experts with a shared one."""

import dataclasses

from jaxpaged.checks import InputError, check, is_int, shown
from jaxpaged.models.config import Experts, LayerKind, ModelConfig
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import TRANSPOSED, Names
from jaxpaged.models.ropes import Temperature

MLP = f"{llama.LAYER}.feed_forward"
EXPERT = f"{MLP}.experts.{{expert}}"
TABLE: dict[str, str | tuple[str, ...]] = llama.TABLE | {
    "gate_up": (f"{MLP}.gate_proj", f"{MLP}.up_proj"),
    "down": f"{MLP}.down_proj",
    "router": f"{MLP}.router",
    "shared.gate_up": (f"{MLP}.shared_expert.gate_proj", f"{MLP}.shared_expert.up_proj"),
    "shared.down": f"{MLP}.shared_expert.down_proj",
}
# Experts of which each tensor has those of a layer side by side, inputs first.
NAMES = Names(
    table=TABLE
    | {
        "experts.gate_up.weight": f"{MLP}.experts.gate_up_proj",
        "experts.down.weight": f"{MLP}.experts.down_proj",
    },
    forms={**llama.PAIRS, "experts.gate_up.weight": TRANSPOSED, "experts.down.weight": TRANSPOSED},
)
# Experts of which each has tensors of its own, as in quantised files.
APART_NAMES = Names(
    table=TABLE
    | {
        "experts.gate_up": (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"),
        "experts.down": f"{EXPERT}.down_proj",
    },
    forms=llama.PAIRS,
)


def read_llama4(f: Fields) -> ModelConfig:
    same = llama.common(f)
    num_layers, bias = f.size("num_hidden_layers"), f.flag("attention_bias")
    return ModelConfig(
        **same,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="plain" if f.flag("use_qk_norm", True) else None,
        norm_after_rope=True,
        experts=_experts(f, num_layers, same["intermediate_size"]),
        layers=_layers(f, num_layers, same["head_dim"]),
    )


def _layers(f: Fields, num_layers: int, head_dim: int) -> tuple[LayerKind, ...]:
    """Read the layers: those without RoPE are full unless the config says so, and grow their queries."""
    turns, rope = llama.turning_layers(f, num_layers), f.rope(head_dim, theta=500000.0)
    types = ["chunked_attention" if turn else "full_attention" for turn in turns]
    if f.is_null("attention_chunk_size"):
        raise InputError("model config: attention_chunk_size=null must be an int >= 1")
    chunked = LayerKind(attention_chunk=f.size("attention_chunk_size", 8192))
    every, scale = f.size("floor_scale", 8192), f.positive("attn_scale", 0.1)
    grows = f.get("attn_temperature_tuning", True)  # older configs say 4 for true
    check("model config: attn_temperature_tuning", grows, "a bool", isinstance(grows, bool) or is_int(grows))
    temperature = Temperature(every=every, scale=scale) if grows else None
    kinds = f.layer_kinds(types, chunked=chunked, full=LayerKind())
    return tuple(
        dataclasses.replace(kind, rope=rope) if turn else dataclasses.replace(kind, temperature=temperature)
        for kind, turn in zip(kinds, turns, strict=True)
    )


def _experts(f: Fields, num_layers: int, width: int) -> Experts:
    """Read the experts, and which layers have none."""
    step, numbers = f.size("interleave_moe_layer_step", 1), f.get("moe_layers")
    dense_size = f.size("intermediate_size_mlp", 16384)
    if numbers is None:
        numbers = list(range(step - 1, num_layers, step))
    if not isinstance(numbers, list) or not all(is_int(i) and 0 <= i < num_layers for i in numbers):
        rule = f"a list of ints in [0, {num_layers}), the numbers of layers"
        raise InputError(f"model config: moe_layers={shown(numbers)} must be {rule}")
    dense = tuple(layer for layer in range(num_layers) if layer not in numbers)
    return Experts(
        num_experts=f.size("num_local_experts", 16),
        num_chosen=f.size("num_experts_per_tok", 1),
        renormalise=False,
        scoring="sigmoid",
        scales_input=True,
        shared_size=width,
        dense_layers=dense,
        dense_size=dense_size if dense else 0,
    )


LLAMA4 = Family(
    model_type="llama4_text",
    models="Llama 4 Scout and Maverick, text only",
    read=read_llama4,
    names=lambda config: NAMES,
    quantised_names={"compressed-tensors": APART_NAMES},
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
)
