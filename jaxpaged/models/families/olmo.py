"""OLMo: of the first the norms have no weights; later ones norm all queries and all keys together."""

import dataclasses
from collections.abc import Mapping

from jaxpaged.checks import InputError, shown
from jaxpaged.models.config import Experts, LayerKind, ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.families.qwen import MOE_NAMES
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names
from jaxpaged.models.ropes import Rope

UNWEIGHED = Names(
    table=llama.TABLE,
    filled=dict.fromkeys(("norm.weight", "attention_norm.weight", "mlp_norm.weight"), 1.0),
)
OLMO_EPS = 1e-5  # of the first OLMo, whose files do not say it
NAMES = Names(
    table=llama.TABLE
    | {
        "attention_out_norm": f"{llama.LAYER}.post_attention_layernorm",
        "mlp_out_norm": f"{llama.LAYER}.post_feedforward_layernorm",
    }
)

FLEX_NAMES = Names(
    table={
        **NAMES.table,
        **{role: names_of_role for role, names_of_role in MOE_NAMES.table.items() if role not in llama.TABLE},
    }
)


def read_olmo(f: Fields) -> ModelConfig:
    """Read the first OLMo: Llama with layer norms without weights."""
    same, bias = llama.common(f), f.flag("attention_bias")
    clip = f.get("clip_qkv")
    return ModelConfig(
        **same | {"norm_eps": OLMO_EPS},
        norm="layer",
        qkv_bias=bias,
        o_bias=bias,
        qkv_clip=None if clip is None else f.positive("clip_qkv"),
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"])),
    )


def read_olmo2(f: Fields) -> ModelConfig:
    same = llama.common(f)
    bias = f.flag("attention_bias")
    layers = uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"]))
    return ModelConfig(**same, norm_place="after", qk_norm="all", qkv_bias=bias, o_bias=bias, layers=layers)


def read_olmo3(f: Fields) -> ModelConfig:
    """Read OLMo 2 with a window in three of four layers; only the RoPE of the others is scaled."""
    same, num_layers, bias = llama.common(f), f.size("num_hidden_layers"), f.flag("attention_bias")
    local, everywhere = _ropes(f, same["head_dim"])
    sliding = LayerKind(rope=local, sliding_window=f.size("sliding_window", 4096))
    types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(num_layers)]
    layers = f.layer_kinds(types, sliding=sliding, full=LayerKind(rope=everywhere))
    return ModelConfig(**same, norm_place="after", qk_norm="all", qkv_bias=bias, o_bias=bias, layers=layers)


def _ropes(f: Fields, head_dim: int) -> list[Rope]:
    """Return RoPE of layers with a window, and of those that see all."""
    given = f.get("rope_parameters") or {"full_attention": f.get("rope_scaling")}
    if not isinstance(given, Mapping):
        raise InputError(f"model config: rope_parameters={shown(given)} must be a JSON object or null")
    theta = {"rope_theta": f.get("rope_theta", 500000.0)}
    return [
        f.rope_of(f"rope_parameters.{kind}", given.get(kind) or {}, theta, head_dim)
        for kind in ("sliding_attention", "full_attention")
    ]


def _read_gguf(f: Fields) -> ModelConfig:
    """Read OLMo 3 where there is a window, else OLMo 2: llama.cpp has one architecture for both."""
    return read_olmo2(f) if f.get("sliding_window") is None else read_olmo3(f)


def read_flex_olmo(f: Fields) -> ModelConfig:
    """Read OLMo 2 with OLMoE's experts."""
    return dataclasses.replace(read_olmoe(f), norm_place="after")


def read_olmoe(f: Fields) -> ModelConfig:
    same, bias = llama.common(f), f.flag("attention_bias")
    experts = Experts(
        num_experts=f.size("num_experts", 64),
        num_chosen=f.size("num_experts_per_tok", 8),
        renormalise=f.flag("norm_topk_prob"),
    )
    return ModelConfig(
        **same,
        qk_norm="all",
        qkv_bias=bias,
        o_bias=bias,
        experts=experts,
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"])),
    )


OLMO = Family(
    model_type="olmo",
    models="OLMo 1B and 7B of 2024",
    read=read_olmo,
    names=lambda config: UNWEIGHED,
    defaults={"max_position_embeddings": 2048},
)
OLMO2 = Family(
    model_type="olmo2",
    models="OLMo 2",
    read=read_olmo2,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    gguf=(Gguf(architecture="olmo2", read=_read_gguf),),
)
OLMO3 = Family(
    model_type="olmo3",
    models="OLMo 3 7B, 32B",
    read=read_olmo3,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
OLMOE = Family(
    model_type="olmoe",
    models="OLMoE 1B-7B",
    read=read_olmoe,
    names=lambda config: MOE_NAMES,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    gguf=(Gguf(architecture="olmoe"),),
)
FLEX_OLMO = Family(
    model_type="flex_olmo",
    models="FlexOlmo 7x7B",
    read=read_flex_olmo,
    names=lambda config: FLEX_NAMES,
    defaults={
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "num_experts": 7,
        "num_experts_per_tok": 5,
    },
)
