"""Experts in DeepSeek-V3's way, which other families have: sigmoid scores with a correction, in groups."""

from typing import Any

from jaxpaged.checks import check
from jaxpaged.models.config import Experts, ModelConfig
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Metadata
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

MLP = f"{llama.LAYER}.mlp"
EXPERT = f"{MLP}.experts.{{expert}}"
SHARED = f"{MLP}.shared_experts"
TABLE = llama.TABLE | {
    "router": f"{MLP}.gate",
    "correction": f"{MLP}.gate.e_score_correction_bias",
    "experts.gate_up": (f"{EXPERT}.gate_proj", f"{EXPERT}.up_proj"),
    "experts.down": f"{EXPERT}.down_proj",
    "shared.gate_up": (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
    "shared.down": f"{SHARED}.down_proj",
}


def names(config: ModelConfig) -> Names:
    """Return the files' names. Layers behind the last predict further tokens, and are not read."""
    return Names(table=TABLE, ignored=beyond(config))


def beyond(config: ModelConfig, count: int = 8) -> tuple[str, ...]:
    """Return how the names of a few layers behind the last begin."""
    return tuple(f"{llama.LAYER}.".format(layer=config.num_layers + i) for i in range(count))


def read(f: Fields, dense_size: int, *, dense_layers: int, has_flags: bool = False) -> tuple[Experts, int]:
    """Return the experts, and the width of one.

    dense_layers: how many, unless the config says another number.
    has_flags: whether the caller reads for each layer whether it has experts (`moe_layer_freq`).
    """
    f.only("scoring_func", "sigmoid", "noaux_tc")  # dots.llm1 says so of the same
    f.only("topk_method", "noaux_tc")
    if not has_flags:
        f.only("moe_layer_freq", 1)
    width = f.size("moe_intermediate_size")
    first = f.count("first_k_dense_replace", dense_layers)
    experts = Experts(
        num_experts=f.size("n_routed_experts"),
        num_chosen=f.size("num_experts_per_tok"),
        renormalise=f.flag("norm_topk_prob", True),
        scoring="sigmoid",
        correction=True,
        num_groups=f.size("n_group", 1),
        num_chosen_groups=f.size("topk_group", 1),
        scale=f.positive("routed_scaling_factor", 1.0),
        shared_size=width * f.count("n_shared_experts", 0),
        dense_layers=tuple(range(first)),
        dense_size=dense_size if first else 0,
    )
    return experts, width


def dense_layers(f: Fields, first: int) -> tuple[int, ...]:
    """Return the numbers of the layers without experts: those that the file names, or so many first ones."""
    num_layers = f.size("num_hidden_layers")
    default = ["dense" if i < first else "sparse" for i in range(num_layers)]
    types = f.get("mlp_layer_types") or default
    ok = isinstance(types, list) and len(types) == num_layers
    ok = ok and all(each in ("dense", "sparse") for each in types)
    check("model config: mlp_layer_types", types, "a list of 'dense' and 'sparse', one for each layer", ok)
    return tuple(i for i, each in enumerate(types) if each == "dense")


SIGMOID = 2  # llama.cpp's number of it
GGUF_METADATA = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}


def gguf_fields(read: Metadata) -> dict[str, Any]:
    """Return the number of layers without those that predict further tokens, and how experts are scored."""
    scoring = read("expert_gating_func")
    check("model config: expert_gating_func", scoring, f"{SIGMOID}, a sigmoid", scoring in (None, SIGMOID))
    return {"num_hidden_layers": read("block_count") - (read("nextn_predict_layers") or 0)}
