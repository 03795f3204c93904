"""GLM-4, dense and of experts: RoPE of one half of each head."""

from typing import Any

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama, routing
from jaxpaged.models.families.family import Family, Gguf, Metadata, rotated_part
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

TABLE = llama.TABLE | {"gate_up": f"{llama.LAYER}.mlp.gate_up_proj"}
NAMES = Names(table=TABLE, forms=llama.PAIRS)
FOUR_NORMS = Names(
    table=TABLE
    | {
        "attention_out_norm": f"{llama.LAYER}.post_self_attn_layernorm",
        "mlp_out_norm": f"{llama.LAYER}.post_mlp_layernorm",
    },
    forms=llama.PAIRS,
)
HALF = 0.5  # of each head is turned


def _common(f: Fields) -> dict[str, Any]:
    same = llama.common(f)
    rope = f.rope(same["head_dim"], part=HALF)
    layers = uniform(f.size("num_hidden_layers"), rope=rope)
    return same | {"qkv_bias": f.flag("attention_bias", True), "layers": layers}


def read_glm(f: Fields) -> ModelConfig:
    """Read Llama with RoPE of half of each head, which turns neighbouring coordinates."""
    return ModelConfig(**_common(f))


def read_glm4(f: Fields) -> ModelConfig:
    """Read GLM with norms of what goes into attention and feed-forward, and of what comes out."""
    return ModelConfig(**_common(f), norm_place="both")


def read_glm4_moe(f: Fields) -> ModelConfig:
    """Read GLM with sigmoid routing, an expert that all tokens have, and dense layers at first."""
    same = _common(f)
    experts, width = routing.read(f, same["intermediate_size"], dense_layers=1)
    f.get("num_nextn_predict_layers")
    return ModelConfig(
        **same | {"intermediate_size": width},
        qk_norm="head" if f.flag("use_qk_norm") else None,
        experts=experts,
    )


def _gguf_moe(*, use_qk_norm: bool, marker: str | None = None) -> Gguf:
    def fields(read: Metadata) -> dict[str, Any]:
        return routing.gguf_fields(read) | rotated_part(read) | {"use_qk_norm": use_qk_norm}

    return Gguf(
        architecture="glm4moe",
        metadata=routing.GGUF_METADATA,
        fields=fields,
        names={"mlp_norm": "blk.{layer}.post_attention_norm"},
        marker=marker,
    )


_DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}
GLM = Family(
    model_type="glm",
    models="GLM-4 9B of 2024",
    read=read_glm,
    names=lambda config: NAMES,
    defaults=_DEFAULTS,
)
GLM4 = Family(
    model_type="glm4",
    models="GLM-4-0414 9B, 32B",
    read=read_glm4,
    names=lambda config: FOUR_NORMS,
    defaults=_DEFAULTS,
    gguf=(
        Gguf(
            architecture="glm4",
            fields=rotated_part,
            forms=llama.PAIRS,
            names={"gate_up": "blk.{layer}.ffn_up"},
        ),
    ),
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    models="GLM-4.5, 4.5-Air, 4.6, 4.7",
    read=read_glm4_moe,
    names=routing.names,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
    },
    gguf=(
        _gguf_moe(use_qk_norm=False),
        _gguf_moe(use_qk_norm=True, marker="blk.0.attn_q_norm.weight"),
    ),
)
