"""Solar Open: GLM-4.5's experts in every layer, without norms of queries and keys."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama, routing
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields


def read_solar(f: Fields) -> ModelConfig:
    same = llama.common(f, f.size("moe_intermediate_size", 1280))
    f.only("first_k_dense_replace", 0)
    f.only("use_qk_norm", False)
    experts, width = routing.read(f, same["intermediate_size"], dense_layers=0)
    return ModelConfig(
        **same | {"intermediate_size": width},
        qkv_bias=f.flag("attention_bias"),
        experts=experts,
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"], theta=1000000.0, part=1.0)),
    )


SOLAR_OPEN = Family(
    model_type="solar_open",
    models="Solar Open 100B",
    read=read_solar,
    names=routing.names,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
    },
)
