"""MiniMax M2: sigmoid routing with a correction, norms of all queries and all keys, RoPE of half a head."""

from typing import Any

from jaxpaged.checks import check
from jaxpaged.models.config import Experts, ModelConfig, uniform
from jaxpaged.models.families import llama, mixtral, routing
from jaxpaged.models.families.family import Family, Gguf, Metadata
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

TABLE = {**mixtral.NAMES.table, "correction": f"{mixtral.MOE}.e_score_correction_bias"}


def read_minimax(f: Fields) -> ModelConfig:
    same = llama.common(f)
    for name, values in {
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": (0,),
    }.items():
        f.only(name, *values)
    kinds = f.get("attn_type_list") or []
    is_same = isinstance(kinds, list) and all(kind == 1 for kind in kinds)
    check("model config: attn_type_list", kinds, "a list of ones: others are not supported", is_same)
    experts = Experts(
        num_experts=f.size("num_local_experts", 256),
        num_chosen=f.size("num_experts_per_tok", 8),
        renormalise=True,
        scoring="sigmoid",
        correction=True,
    )
    turned = f.size("rotary_dim", same["head_dim"]) / same["head_dim"]
    layers = uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"], part=turned))
    return ModelConfig(**same, qk_norm="all", experts=experts, layers=layers)


def _gguf_fields(read: Metadata) -> dict[str, Any]:
    routing.gguf_fields(read)
    return {}


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    models="MiniMax M2, M2.1",
    read=read_minimax,
    names=lambda config: Names(table=TABLE, ignored=routing.beyond(config)),
    defaults={
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 5000000.0,
    },
    gguf=(
        Gguf(
            architecture="minimax-m2",
            metadata={"num_local_experts": "expert_count", "rotary_dim": "rope.dimension_count"},
            fields=_gguf_fields,
        ),
    ),
)
