"""Sarvam of experts: GLM-4.5's routing, with one product for queries, keys and values."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama, routing
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

ATTENTION = f"{llama.LAYER}.attention"
TABLE = routing.TABLE | {
    "embedding": "model.word_embeddings",
    "qkv": f"{ATTENTION}.query_key_value",
    "q_norm": f"{ATTENTION}.query_layernorm",
    "k_norm": f"{ATTENTION}.key_layernorm",
    "o": f"{ATTENTION}.dense",
    "correction": f"{routing.MLP}.gate.expert_bias",
}


def read_sarvam(f: Fields) -> ModelConfig:
    f.alias(
        n_routed_experts="num_experts",
        n_shared_experts="num_shared_experts",
        attention_bias="use_qkv_bias",
        num_nextn_predict_layers="num_mtp_layers",
    )
    same = llama.common(f)
    f.only("score_function", "sigmoid")
    f.only("moe_router_enable_expert_bias", True)
    f.only("use_bias", False)
    experts, width = routing.read(f, same["intermediate_size"], dense_layers=1)
    return ModelConfig(
        **same | {"intermediate_size": width},
        qk_norm="head" if f.flag("use_qk_norm", True) else None,
        qkv_bias=f.flag("attention_bias"),
        experts=experts,
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"], theta=8000000.0, part=1.0)),
    )


SARVAM_MOE = Family(
    model_type="sarvam_moe",
    models="Sarvam 30B of experts",
    read=read_sarvam,
    names=lambda config: Names(table=TABLE, ignored=routing.beyond(config)),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
    },
)
