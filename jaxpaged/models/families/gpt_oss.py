"""gpt-oss: experts, attention sinks, and a window in every other layer."""

from typing import Any

from jaxpaged.models.config import Experts, LayerKind, ModelConfig
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf, Metadata, rope_scaling
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Form, Names, Pieces, Shape

MLP = f"{llama.LAYER}.mlp"
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _flipped(config: ModelConfig, shape: Shape) -> Shape:
    return shape[::-1]


def _same(config: ModelConfig, shape: Shape) -> Shape:
    return shape


def _parted(config: ModelConfig, pieces: Pieces) -> Pieces:
    """Reorder outputs from alternating gate and up to all gates, then all ups."""
    [gate_up] = pieces
    rows = gate_up.T  # of a bias it is the same
    return [rows[::2], rows[1::2]]


def _alternating(config: ModelConfig, pieces: Pieces) -> Pieces:
    """Reorder rows from alternating gate and up to all gates, then all ups."""
    [gate_up] = pieces
    return [gate_up[::2], gate_up[1::2]]


def _transposed(config: ModelConfig, pieces: Pieces) -> Pieces:
    return [piece.T for piece in pieces]


NAMES = Names(
    table=llama.TABLE
    | {
        "sinks": f"{llama.LAYER}.self_attn.sinks",
        "router": f"{MLP}.router",
        "experts.gate_up.weight": f"{MLP}.experts.gate_up_proj",
        "experts.gate_up.bias": f"{MLP}.experts.gate_up_proj_bias",
        "experts.down.weight": f"{MLP}.experts.down_proj",
        "experts.down.bias": f"{MLP}.experts.down_proj_bias",
    },
    forms={
        "experts.gate_up.weight": Form(_flipped, _parted),
        "experts.gate_up.bias": Form(_same, _parted),
        "experts.down.weight": Form(_flipped, _transposed),
    },
)


# Where experts are in MXFP4 each has a weight of its own, and they lie as [outputs, inputs].
MXFP4_NAMES = Names(
    table={
        **NAMES.table,
        "experts.gate_up.weight": f"{MLP}.experts.gate_up_proj.{{expert}}",
        "experts.down.weight": f"{MLP}.experts.down_proj.{{expert}}",
    },
    forms={
        "experts.gate_up.weight": Form(_same, _alternating),
        "experts.gate_up.bias": NAMES.forms["experts.gate_up.bias"],
    },
)


def read_gpt_oss(f: Fields) -> ModelConfig:
    same: dict[str, Any] = llama.common(f)
    rope = f.rope(same["head_dim"])
    num_layers, bias = f.size("num_hidden_layers"), f.flag("attention_bias", True)
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    sliding = LayerKind(rope=rope, sliding_window=f.size("sliding_window", 128))
    f.only("swiglu_alpha", 1.702)
    experts = Experts(
        num_experts=f.size("num_local_experts", 128),
        num_chosen=f.size("num_experts_per_tok", 4),
        renormalise=True,
        router_bias=True,
        bias=True,
        glu_limit=f.positive("swiglu_limit", 7.0),
    )
    return ModelConfig(
        **same,
        sinks=True,
        qkv_bias=bias,
        o_bias=bias,
        experts=experts,
        layers=f.layer_kinds(types, sliding=sliding, full=LayerKind(rope=rope)),
    )


def _gguf_fields(read: Metadata) -> dict[str, Any]:
    return {"rope_scaling": rope_scaling(read) | {"truncate": YARN["truncate"]}}


GPT_OSS = Family(
    model_type="gpt_oss",
    models="gpt-oss 20B, 120B, in MXFP4 or bfloat16",
    read=read_gpt_oss,
    names=lambda config: NAMES,
    quantised_names={"mxfp4": MXFP4_NAMES},
    defaults={
        "max_position_embeddings": 131072,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": YARN,
    },
    gguf=(
        Gguf(
            architecture="gpt-oss",
            metadata={"num_local_experts": "expert_count"},
            fields=_gguf_fields,
            names={"mlp_norm": "blk.{layer}.post_attention_norm"},
        ),
    ),
)
