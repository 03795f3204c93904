"""Mellum 2, Flint and Kolibri: experts behind attention with a window in most layers."""

import dataclasses
from typing import Any

from jaxpaged.checks import check, is_int
from jaxpaged.models.config import Experts, LayerKind, ModelConfig
from jaxpaged.models.families import layer_ropes, llama, qwen, routing
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

SHARED = f"{routing.MLP}.shared_expert"
FLINT_TABLE = {**qwen.MOE_NAMES.table} | {
    "sinks": f"{llama.LAYER}.self_attn.softmax_offset",
    "shared.gate_up": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
    "shared.down": f"{SHARED}.down_proj",
}
KOLIBRI_TABLE = routing.TABLE | {
    "attention_out_norm": f"{llama.LAYER}.post_attn_norm",
    "mlp_out_norm": f"{llama.LAYER}.post_ffn_norm",
    "correction": f"{llama.LAYER}.moe.router.expert_bias",
}
ROPES: dict[str, dict[str, Any]] = {
    layer_ropes.FULL: {"rope_theta": 500000.0},
    layer_ropes.SLIDING: {"rope_theta": 10000.0},
}


def read_mellum(f: Fields) -> ModelConfig:
    """Read Mellum 2: Qwen3 of experts with a window and a RoPE of their own in some layers."""
    same, num_layers = _common(f), f.size("num_hidden_layers")
    local, everywhere = layer_ropes.read(f, same["head_dim"], **ROPES)
    sliding = LayerKind(rope=local, sliding_window=f.size("sliding_window", 1024))
    types = [layer_ropes.FULL] * num_layers
    layers = f.layer_kinds(types, sliding=sliding, full=LayerKind(rope=everywhere))
    dense = routing.dense_layers(f, 0)
    experts = Experts(
        num_experts=f.size("num_experts", f.size("num_local_experts", 64)),
        num_chosen=f.size("num_experts_per_tok", 8),
        renormalise=f.flag("norm_topk_prob", True),
        dense_layers=dense,
        dense_size=f.size("intermediate_size") if dense else 0,
    )
    return _with_experts(f, same, experts, layers, width=896)


def read_flint(f: Fields) -> ModelConfig:
    """Read Flint: sinks in all layers, RoPE in those with a window, and experts chosen by a sigmoid."""
    same, num_layers = _common(f), f.size("num_hidden_layers")
    f.only("decoder_sparse_step", 1)
    dense = f.get("mlp_only_layers", [i for i in (0, 1) if i < num_layers])
    ok = isinstance(dense, list) and all(is_int(i) and 0 <= i < num_layers for i in dense)
    check("model config: mlp_only_layers", dense, f"a list of ints in [0, {num_layers})", ok)
    experts = Experts(
        num_experts=f.size("num_experts", f.size("num_local_experts", 256)),
        num_chosen=f.size("num_experts_per_tok", 6),
        renormalise=f.flag("norm_topk_prob", True),
        scoring="sigmoid",
        shared_size=f.size("shared_expert_intermediate_size", 1024),
        dense_layers=tuple(dense),
        dense_size=same["intermediate_size"] if dense else 0,
    )
    types = [
        layer_ropes.FULL if i < 2 or i % 4 == 1 or i == num_layers - 1 else layer_ropes.SLIDING
        for i in range(num_layers)
    ]
    config = _with_experts(f, same, experts, _unturned(f, types, same["head_dim"]), width=512)
    return dataclasses.replace(config, sinks=True)


def read_kolibri(f: Fields) -> ModelConfig:
    """Read Kolibri: four norms, and experts ranked by the router's output with a correction."""
    same = _common(f, f.size("moe_intermediate_size", 512))
    experts = Experts(
        num_experts=f.size("num_experts", f.size("num_local_experts", 384)),
        num_chosen=f.size("num_experts_per_tok", 6),
        renormalise=f.flag("norm_topk_prob"),
        scoring="sigmoid",
        correction=True,
        ranks_logits=True,
        shared_size=f.size("shared_expert_intermediate_size", 512),
    )
    types = [
        layer_ropes.SLIDING if (i + 1) % 5 else layer_ropes.FULL for i in range(f.size("num_hidden_layers"))
    ]
    config = _with_experts(f, same, experts, _unturned(f, types, same["head_dim"]), width=512)
    return dataclasses.replace(config, norm_place="both", qkv_bias=False, o_bias=False)


def _common(f: Fields, intermediate_size: int | None = None) -> dict[str, Any]:
    f.only("use_sliding_window", True, False)  # of files made from Qwen's: `layer_types` says it
    return llama.common(f, intermediate_size)


def _unturned(f: Fields, types: list[str], head_dim: int) -> tuple[LayerKind, ...]:
    """Return layers of which those that see all tokens know no positions."""
    sliding = LayerKind(rope=f.rope(head_dim), sliding_window=f.size("sliding_window", 513))
    return f.layer_kinds(types, sliding=sliding, full=LayerKind())


def _with_experts(
    f: Fields, same: dict[str, Any], experts: Experts, layers: tuple[LayerKind, ...], *, width: int
) -> ModelConfig:
    bias = f.flag("attention_bias")
    return ModelConfig(
        **same | {"intermediate_size": f.size("moe_intermediate_size", width)},
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        experts=experts,
        layers=layers,
    )


MELLUM = Family(
    model_type="mellum",
    models="Mellum 2 12B-A2.5B",
    read=read_mellum,
    names=lambda config: Names(table=qwen.MOE_NAMES.table, ignored=("mtp.",)),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 128},
)
FLINT = Family(
    model_type="flint",
    models="Flint",
    read=read_flint,
    names=lambda config: Names(table=FLINT_TABLE),
    defaults={"max_position_embeddings": 262144, "num_key_value_heads": 4, "head_dim": 128},
)
KOLIBRI = Family(
    model_type="kolibri1",
    models="Kolibri 1",
    read=read_kolibri,
    names=lambda config: Names(table=KOLIBRI_TABLE),
    defaults={"max_position_embeddings": 262144, "num_key_value_heads": 4, "head_dim": 128},
)
