"""ERNIE 4.5 of experts: a softmax with a correction for the choice, and RoPE that turns neighbours."""

import dataclasses

from jaxpaged.checks import check
from jaxpaged.models.config import Experts, ModelConfig
from jaxpaged.models.families import llama, near_llama, routing
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Form, Names

LEAST_SUM = 1e-6  # sums of chosen weights are larger: below this a bound of them changes nothing
FLAT = Form(lambda config, shape: (1, *shape), lambda config, pieces: [piece[0] for piece in pieces])
TABLE = routing.TABLE | {"correction": f"{routing.MLP}.moe_statics.e_score_correction_bias"}


def names(config: ModelConfig) -> Names:
    """Return the names. Parts that predict further tokens are not read."""
    further = ("model.mtp_",)
    return Names(table=TABLE, forms=llama.PAIRS | {"correction": FLAT}, ignored=further)


def read_ernie_moe(f: Fields) -> ModelConfig:
    config, num_layers = near_llama.read_ernie(f), f.size("num_hidden_layers")
    f.only("moe_use_aux_free", True)
    f.only("moe_gate", "topk", "top2_fused")
    least = f.positive("moe_norm_min", 1e-12)
    check("model config: moe_norm_min", least, f"a number of (0, {LEAST_SUM}]", least <= LEAST_SUM)
    every, first = f.size("moe_layer_interval", 1), f.count("moe_layer_start_index", 1)
    last = f.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last == -1 else f.count("moe_layer_end_index", 0)
    dense = tuple(i for i in range(num_layers) if (i + 1) % every or not first <= i <= last)
    width = f.size("moe_intermediate_size", 1536)
    experts = Experts(
        num_experts=f.size("moe_num_experts", f.size("num_experts", 64)),
        num_chosen=f.size("moe_k", f.size("num_experts_per_tok", 6)),
        renormalise=True,
        correction=True,
        shared_size=width * f.count("moe_num_shared_experts", 2),
        dense_layers=dense,
        dense_size=config.intermediate_size if dense else 0,
    )
    return dataclasses.replace(config, intermediate_size=width, experts=experts)


ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    models="ERNIE 4.5 21B-A3B, 300B-A47B",
    read=read_ernie_moe,
    names=names,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
)
