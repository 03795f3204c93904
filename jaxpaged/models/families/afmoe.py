"""Trinity (AFMoE): a sigmoid gate behind attention, and sigmoid routing with a correction."""

from jaxpaged.models.config import Experts, LayerKind, ModelConfig
from jaxpaged.models.families import llama, routing
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

TABLE = routing.TABLE | {
    "attention_gate": f"{llama.LAYER}.self_attn.gate_proj",
    "attention_out_norm": f"{llama.LAYER}.post_attention_layernorm",
    "mlp_norm": f"{llama.LAYER}.pre_mlp_layernorm",
    "mlp_out_norm": f"{llama.LAYER}.post_mlp_layernorm",
    "router": f"{routing.MLP}.router.gate",
    "correction": f"{routing.MLP}.expert_bias",
}


def read_afmoe(f: Fields) -> ModelConfig:
    """Read Trinity. Layers with a window have RoPE, those that see all know no positions."""
    same, num_layers = llama.common(f), f.size("num_hidden_layers")
    f.only("score_func", "sigmoid")
    f.only("route_norm", True)
    for name in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        f.only(name, 1)
    width, first = f.size("moe_intermediate_size", 1408), f.count("num_dense_layers", 1)
    experts = Experts(
        num_experts=f.size("num_experts", 64),
        num_chosen=f.size("num_experts_per_tok", 6),
        renormalise=True,
        scoring="sigmoid",
        correction=True,
        scale=f.positive("route_scale", 1.0),
        shared_size=width * f.count("num_shared_experts", 2),
        dense_layers=tuple(range(first)),
        dense_size=same["intermediate_size"] if first else 0,
    )
    every = f.size("global_attn_every_n_layers", 4)
    types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    sliding = LayerKind(rope=f.rope(same["head_dim"]), sliding_window=f.size("sliding_window", 1024))
    bias = f.flag("attention_bias")
    return ModelConfig(
        **same | {"intermediate_size": width},
        embedding_scale=same["hidden_size"] ** 0.5 if f.flag("mup_enabled") else 1.0,
        norm_place="both",
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        output_gate="element",
        experts=experts,
        layers=f.layer_kinds(types, sliding=sliding, full=LayerKind()),
    )


AFMOE = Family(
    model_type="afmoe",
    models="Trinity Nano, Mini and Large of Arcee",
    read=read_afmoe,
    names=lambda config: Names(table=TABLE),
    defaults={"max_position_embeddings": 16384, "head_dim": 128, "rms_norm_eps": 1e-5},
)
