"""MPT: ALiBi, and no biases at all."""

from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.models.alibi import alibi_slopes
from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families.early import common
from jaxpaged.models.families.family import FUSED, Family, Gguf, Metadata
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

LAYER = "transformer.blocks.{layer}"
NAMES = Names(
    table={
        "embedding": "transformer.wte",
        "norm": "transformer.norm_f",
        "lm_head": "lm_head",
        "attention_norm": f"{LAYER}.norm_1",
        "qkv": f"{LAYER}.attn.Wqkv",
        "o": f"{LAYER}.attn.out_proj",
        "mlp_norm": f"{LAYER}.norm_2",
        "up": f"{LAYER}.ffn.up_proj",
        "down": f"{LAYER}.ffn.down_proj",
    }
)


def read_mpt(f: Fields) -> ModelConfig:
    same = common(f, heads="n_heads", hidden="d_model") | {"norm_bias": False}
    f.only("expansion_ratio", 4)
    f.only("no_bias", True)
    f.only("embedding_fraction", 1)
    attention = f.get("attn_config", {})
    if not isinstance(attention, dict):
        raise InputError(f"model config: attn_config={shown(attention)} must be a JSON object or null")
    a = Fields(attention)
    a.only("alibi", True)
    a.only("qk_ln", False)
    a.only("prefix_lm", False)
    a.only("attn_type", "multihead_attention")
    slopes = alibi_slopes(same["num_q_heads"], a.positive("alibi_bias_max", 8))
    return ModelConfig(
        **same,
        alibi_slopes=slopes,
        qkv_clip=a.get("clip_qkv"),
        attention_scale=a.get("softmax_scale"),
        intermediate_size=4 * same["hidden_size"],
        max_model_len=f.size("max_seq_len", 2048),
        norm_eps=f.positive("layer_norm_epsilon", 1e-5),
        activation="gelu",
        layers=uniform(f.size("n_layers"), rope=None),
    )


def _gguf_fields(read: Metadata) -> dict[str, Any]:
    max_bias = read("attention.max_alibi_bias") or 0.0
    attention = {
        "alibi": max_bias > 0,
        "alibi_bias_max": max_bias,
        "clip_qkv": read("attention.clamp_kqv"),
    }
    return {"attn_config": attention}


_METADATA = {
    "d_model": "embedding_length",
    "n_heads": "attention.head_count",
    "n_layers": "block_count",
    "max_seq_len": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}

MPT = Family(
    model_type="mpt",
    models="MPT 7B, 30B",
    read=read_mpt,
    names=lambda config: NAMES,
    gguf=(Gguf(architecture="mpt", metadata=_METADATA, fields=_gguf_fields, names=FUSED),),
)
