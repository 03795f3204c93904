"""Qwen 2, 2.5 and 3, dense and of experts."""

from typing import Any

from jaxpaged.checks import InputError
from jaxpaged.models.config import Experts, LayerKind, ModelConfig
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import TRANSPOSED, Names

EXPERT = f"{llama.LAYER}.mlp.experts.{{expert}}"
MOE_NAMES = Names(
    table=llama.TABLE
    | {
        "router": f"{llama.LAYER}.mlp.gate",
        "experts.gate_up": (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"),
        "experts.down": f"{EXPERT}.down_proj",
    }
)

SHARED = f"{llama.LAYER}.mlp.shared_expert"
QWEN2_MOE_NAMES = Names(
    table={
        **MOE_NAMES.table,
        "shared.gate_up": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
        "shared.down": f"{SHARED}.down_proj",
        "shared_gate": f"{SHARED}_gate",
    }
)

# Experts of which each tensor has those of a layer side by side, inputs first.
VL_MOE_NAMES = Names(
    table={
        **MOE_NAMES.table,
        "experts.gate_up.weight": f"{llama.LAYER}.mlp.experts.gate_up_proj",
        "experts.down.weight": f"{llama.LAYER}.mlp.experts.down_proj",
    },
    forms={"experts.gate_up.weight": TRANSPOSED, "experts.down.weight": TRANSPOSED},
)


def read_qwen2(f: Fields) -> ModelConfig:
    """Read Qwen2: Llama with biases of queries, keys and values."""
    same = llama.common(f)
    return ModelConfig(**same, qkv_bias=True, layers=_layers(f, same["head_dim"]))


def read_qwen3(f: Fields) -> ModelConfig:
    """Read Qwen3: Llama with norms of each head's queries and keys."""
    return ModelConfig(**_qwen3(f))


def _qwen3(f: Fields) -> dict[str, Any]:
    same = llama.common(f)
    bias = f.flag("attention_bias")
    return same | {
        "qk_norm": "head",
        "qkv_bias": bias,
        "o_bias": bias,
        "layers": _layers(f, same["head_dim"]),
    }


def read_qwen3_moe(f: Fields) -> ModelConfig:
    f.only("decoder_sparse_step", 1)
    f.only("mlp_only_layers", [])
    experts = Experts(
        num_experts=f.size("num_experts", f.size("num_local_experts", 128)),
        num_chosen=f.size("num_experts_per_tok", 8),
        renormalise=f.flag("norm_topk_prob"),
    )
    same = _qwen3(f) | {"intermediate_size": f.size("moe_intermediate_size", 768)}
    return ModelConfig(**same, experts=experts)


def read_qwen2_moe(f: Fields) -> ModelConfig:
    """Read Qwen2 with experts, one of which all tokens have, as far as a gate lets it."""
    f.only("decoder_sparse_step", 1)
    f.only("mlp_only_layers", [])
    experts = Experts(
        num_experts=f.size("num_experts", 60),
        num_chosen=f.size("num_experts_per_tok", 4),
        renormalise=f.flag("norm_topk_prob"),
        shared_size=f.size("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    same = llama.common(f) | {"intermediate_size": f.size("moe_intermediate_size", 1408)}
    f.only("use_sliding_window", False)
    types = ["full_attention"] * f.size("num_hidden_layers")
    full = LayerKind(rope=f.rope(same["head_dim"]))
    layers = f.layer_kinds(types, sliding=full, full=full)
    if "sliding_attention" in f.get("layer_types", types):
        raise InputError("model config: layer_types must all be 'full_attention' in 'qwen2_moe'")
    return ModelConfig(**same, qkv_bias=f.flag("qkv_bias", True), experts=experts, layers=layers)


def _layers(f: Fields, head_dim: int) -> tuple[LayerKind, ...]:
    """Read the layers: the first `max_window_layers` see all, the others a window, if one is used."""
    rope, num_layers = f.rope(head_dim), f.size("num_hidden_layers")
    window = f.get("sliding_window") if f.flag("use_sliding_window") else None
    first = f.get("max_window_layers", 0) if window is not None else num_layers
    types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    full = LayerKind(rope=rope)
    return f.layer_kinds(types, sliding=LayerKind(rope=rope, sliding_window=window), full=full)


_SHARED_SIZE = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
QWEN2 = Family(
    model_type="qwen2",
    models="Qwen2, Qwen2.5 and Qwen2.5-Coder",
    read=read_qwen2,
    names=llama.names,
    defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    gguf=(Gguf(architecture="qwen2"), Gguf(architecture="qwen2vl")),
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    models="Qwen1.5-MoE A2.7B, Qwen2 57B-A14B",
    read=read_qwen2_moe,
    names=lambda config: QWEN2_MOE_NAMES,
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 16},
    gguf=(Gguf(architecture="qwen2moe", metadata=_SHARED_SIZE),),
)
QWEN3 = Family(
    model_type="qwen3",
    models="Qwen3 dense",
    read=read_qwen3,
    names=llama.names,
    defaults={**QWEN2.defaults, "head_dim": 128},
    gguf=(Gguf(architecture="qwen3"), Gguf(architecture="qwen3vl")),
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    models="Qwen3 30B-A3B, 235B-A22B",
    read=read_qwen3_moe,
    names=lambda config: MOE_NAMES,
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    # The experts' weights add up to 1 in all of these models, though the files do not say so.
    gguf=tuple(
        Gguf(architecture=name, fields=lambda read: {"norm_topk_prob": True})
        for name in ("qwen3moe", "qwen3vlmoe")
    ),
)
# The text part of Qwen3-VL of experts, which has no config of its own: weights add up to 1, whatever it says.
QWEN3_VL_MOE_TEXT = Family(
    model_type="qwen3_moe",
    models="",
    read=read_qwen3_moe,
    names=lambda config: VL_MOE_NAMES,
    defaults={**QWEN3_MOE.defaults, "norm_topk_prob": True},
)
