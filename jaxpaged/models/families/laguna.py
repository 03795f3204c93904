"""Laguna: a softplus gate behind attention, query heads by layer, and experts with a shared one."""

import dataclasses
from typing import Any

from jaxpaged.checks import check, is_int
from jaxpaged.models.config import Experts, LayerKind, ModelConfig
from jaxpaged.models.families import layer_ropes, llama, qwen, routing
from jaxpaged.models.families.family import Family
from jaxpaged.models.families.uneven import UNEVEN
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

MLP = f"{llama.LAYER}.mlp"
TABLE = {**qwen.MOE_NAMES.table} | {
    "attention_gate": f"{llama.LAYER}.self_attn.g_proj",
    "correction": f"{MLP}.experts.e_score_correction_bias",
    "shared.gate_up": (f"{MLP}.shared_expert.gate_proj", f"{MLP}.shared_expert.up_proj"),
    "shared.down": f"{MLP}.shared_expert.down_proj",
}
ROPES: dict[str, dict[str, Any]] = {
    layer_ropes.FULL: {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    layer_ropes.SLIDING: {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
# A file that has RoPE of its own leaves the part out where it is the whole.
WHOLE = {kind: {**rope, "partial_rotary_factor": 1.0} for kind, rope in ROPES.items()}


def read_laguna(f: Fields) -> ModelConfig:
    same, num_layers = llama.common(f), f.size("num_hidden_layers")
    f.only("moe_apply_router_weight_on_input", False)
    f.only("decoder_sparse_step", 1)
    f.only("qkv_bias", False)
    f.only("norm_topk_prob", True)
    gating = f.get("gating", True)
    rule = "True, 'per-head' or 'per-element'"
    check("model config: gating", gating, rule, gating is True or gating in ("per-head", "per-element"))
    defaults = WHOLE if f.get("rope_parameters") else ROPES
    local, everywhere = layer_ropes.read(f, same["head_dim"], **defaults)
    window = f.get("sliding_window", 512)
    sliding = LayerKind(rope=local, sliding_window=window)
    kinds = f.layer_kinds([layer_ropes.FULL] * num_layers, sliding=sliding, full=LayerKind(rope=everywhere))
    heads = f.get("num_attention_heads_per_layer") or [same["num_q_heads"]] * num_layers
    ok = isinstance(heads, list) and len(heads) == num_layers and all(map(is_int, heads))
    check("model config: num_attention_heads_per_layer", heads, "a list of ints, one for each layer", ok)
    max_heads = max(heads)
    layers = tuple(
        kind if num_heads == max_heads else dataclasses.replace(kind, num_q_heads=num_heads)
        for kind, num_heads in zip(kinds, heads, strict=True)
    )
    dense = routing.dense_layers(f, 1)
    f.only("mlp_only_layers", list(dense))  # older files say it so, too
    cap = f.get("moe_router_logit_softcapping") or None
    experts = Experts(
        num_experts=f.size("num_experts", f.size("num_local_experts", 256)),
        num_chosen=f.size("num_experts_per_tok", 8),
        renormalise=True,
        scoring="sigmoid",
        correction=True,
        router_soft_cap=None if cap is None else f.positive("moe_router_logit_softcapping"),
        scale=f.positive("moe_routed_scaling_factor", 1.0),
        shared_size=f.size("shared_expert_intermediate_size", 512),
        dense_layers=dense,
        dense_size=same["intermediate_size"] if dense else 0,
    )
    bias = f.flag("attention_bias")
    return ModelConfig(
        **same | {"num_q_heads": max_heads, "intermediate_size": f.size("moe_intermediate_size", 512)},
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        output_gate="element" if gating == "per-element" else "head",
        gate_activation="softplus",
        experts=experts,
        layers=layers,
    )


LAGUNA = Family(
    model_type="laguna",
    models="Laguna XS and S of Poolside",
    read=read_laguna,
    names=lambda config: Names(table=TABLE, of_layers=UNEVEN),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
    },
)
