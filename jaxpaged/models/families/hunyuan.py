"""Hunyuan of experts: A13B, and Hy3 with sigmoid routing."""

import dataclasses
from typing import Any

from jaxpaged.checks import check, checked_int
from jaxpaged.models.config import Experts, ModelConfig, uniform
from jaxpaged.models.families import llama, near_llama, routing
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

MLP = routing.MLP
SHARED = f"{MLP}.shared_mlp"
SHARED_TABLE: dict[str, str | tuple[str, ...]] = {
    "shared.gate_up": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
    "shared.down": f"{SHARED}.down_proj",
}
HUNYUAN_TABLE = {
    **routing.TABLE,
    **near_llama.HUNYUAN_NAMES.table,
    **SHARED_TABLE,
    "router": f"{MLP}.gate.wg",
}
HY_TABLE = {
    **routing.TABLE,
    **SHARED_TABLE,
    "router": f"{MLP}.router.gate",
    "correction": f"{MLP}.expert_bias",
}


def read_hunyuan_moe(f: Fields) -> ModelConfig:
    """Read Hunyuan dense with experts, and one that all tokens have."""
    config = near_llama.read_hunyuan(f)
    f.only("use_mixed_mlp_moe", True)
    for name in ("moe_drop_tokens", "use_mla"):
        f.only(name, False)
    width = config.intermediate_size
    widths, shared = _same(f, "moe_intermediate_size", width), _same(f, "num_shared_expert", 1)
    check("model config: moe_intermediate_size", widths, f"{width}, as intermediate_size is", widths == width)
    check("model config: num_shared_expert", shared, "1 in each layer", shared == 1)
    experts = Experts(
        num_experts=_same(f, "num_experts", 1),
        num_chosen=_same(f, "moe_topk", _same(f, "num_experts_per_tok", 1)),
        renormalise=True,
        shared_size=width,
    )
    f.only("norm_topk_prob", True)
    return dataclasses.replace(config, mlp_bias=False, experts=experts)


def _same(f: Fields, name: str, default: int) -> int:
    """Read a number that may be given for each layer, and must be the same in all."""
    value = f.get(name, default)
    each = value if isinstance(value, list) and value else [value]
    check(f"model config: {name}", value, "an int, or the same for each layer", each == [each[0]] * len(each))
    return checked_int(f"model config: {name}", each[0], "an int >= 1", 1)


def read_hy_v3(f: Fields) -> ModelConfig:
    """Read Hy3: norms of each head's queries and keys, and sigmoid routing with a correction."""
    same = llama.common(f)
    for name in ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"):
        f.only(name, True)
    width = f.size("moe_intermediate_size", f.size("expert_hidden_dim", 1536))
    dense = routing.dense_layers(f, f.count("first_k_dense_replace", 1))
    experts = Experts(
        num_experts=f.size("num_experts", f.size("num_local_experts", 192)),
        num_chosen=f.size("num_experts_per_tok", 8),
        renormalise=True,
        scoring="sigmoid",
        correction=True,
        scale=f.positive("router_scaling_factor", 2.826),
        shared_size=width * f.count("num_shared_experts", 1),
        dense_layers=dense,
        dense_size=same["intermediate_size"] if dense else 0,
    )
    f.only("mlp_bias", False)
    bias: dict[str, Any] = dict.fromkeys(("qkv_bias", "o_bias"), f.flag("attention_bias"))
    return ModelConfig(
        **same | {"intermediate_size": width},
        **bias,
        qk_norm="head",
        experts=experts,
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"], theta=11158840.0)),
    )


HUNYUAN_MOE = Family(
    model_type="hunyuan_v1_moe",
    models="Hunyuan A13B",
    read=read_hunyuan_moe,
    names=lambda config: Names(table=HUNYUAN_TABLE),
    defaults=near_llama.HUNYUAN.defaults,
)
HY_V3 = Family(
    model_type="hy_v3",
    models="Hy3",
    read=read_hy_v3,
    names=lambda config: Names(table=HY_TABLE, ignored=routing.beyond(config)),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
)
