"""Phi-1.5 and Phi-2, with a bias everywhere; Phi-3.5-MoE, whose router mixes two experts sparsely."""

import dataclasses

from jaxpaged.checks import check
from jaxpaged.models.config import Experts, ModelConfig, uniform
from jaxpaged.models.families import llama, mixtral
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names
from jaxpaged.models.ropes import LongScaling, Rope

NAMES = Names(
    table=llama.TABLE
    | {
        "norm": "model.final_layernorm",
        "o": f"{llama.LAYER}.self_attn.dense",
        "up": f"{llama.LAYER}.mlp.fc1",
        "down": f"{llama.LAYER}.mlp.fc2",
    }
)


def read_phi(f: Fields) -> ModelConfig:
    """Read Phi-2, with feed-forward beside attention on the same norm, and RoPE of a part of each head."""
    same = llama.common(f) | {"norm_eps": f.positive("layer_norm_eps", 1e-5)}
    f.only("qk_layernorm", False)
    return ModelConfig(
        **same,
        norm="layer",
        norm_bias=True,
        parallel=True,
        shared_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        lm_head_bias=True,
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"], part=0.5)),
    )


def read_phimoe(f: Fields) -> ModelConfig:
    same, bias = llama.common(f), f.flag("attention_bias")
    experts = Experts(
        num_experts=f.size("num_local_experts", 16),
        num_chosen=f.size("num_experts_per_tok", 2),
        renormalise=False,
        scoring="sparse_mixer",
        jitter=f.positive("router_jitter_noise", 0.01),
    )
    window = None if f.is_null("sliding_window") else f.get("sliding_window")
    rope = _scaled(f, f.rope(same["head_dim"]))
    return ModelConfig(
        **same,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        lm_head_bias=f.flag("lm_head_bias"),
        experts=experts,
        layers=uniform(f.size("num_hidden_layers"), rope=rope, sliding_window=window),
    )


def _scaled(f: Fields, rope: Rope) -> Rope:
    """Return RoPE with the factor of cosines and sines that the config names for long sequences and short."""
    if not isinstance(rope.scaling, LongScaling):
        return rope
    given = Fields(f.get("rope_parameters") or f.get("rope_scaling"))
    factor, other = given.positive("long_mscale"), given.positive("short_mscale")
    check(
        "model config: short_mscale",
        other,
        f"long_mscale={factor}: others are not supported",
        other == factor,
    )
    return dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, attention_factor=factor))


PHI = Family(
    model_type="phi",
    models="Phi-1, 1.5 and 2",
    read=read_phi,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048, "hidden_act": "gelu_new"},
)
PHIMOE = Family(
    model_type="phimoe",
    models="Phi-3.5-MoE",
    read=read_phimoe,
    names=lambda config: mixtral.NAMES,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
)
