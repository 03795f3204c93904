"""Granite 3 and 4 of experts."""

import dataclasses
from typing import Any

from jaxpaged.models.config import Experts, ModelConfig
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

MOE = f"{llama.LAYER}.block_sparse_moe"
NAMES = Names(
    table=llama.TABLE
    | {
        "router": f"{MOE}.router.layer",
        "experts.gate_up.weight": f"{MOE}.input_linear.weight",
        "experts.down.weight": f"{MOE}.output_linear.weight",
        "shared.gate_up": f"{llama.LAYER}.shared_mlp.input_linear",
        "shared.down": f"{llama.LAYER}.shared_mlp.output_linear",
    }
)


def read_granitemoe(f: Fields) -> ModelConfig:
    """Read Granite with experts, whose weights add up to 1."""
    return dataclasses.replace(llama.read_granite(f), experts=_experts(f))


def read_granitemoeshared(f: Fields) -> ModelConfig:
    """Read the same with one more expert, which all tokens have."""
    experts = dataclasses.replace(_experts(f), shared_size=f.count("shared_intermediate_size", 0))
    return dataclasses.replace(llama.read_granite(f), experts=experts)


def _experts(f: Fields) -> Experts:
    return Experts(
        num_experts=f.size("num_local_experts", 8),
        num_chosen=f.size("num_experts_per_tok", 2),
        renormalise=True,
    )


_METADATA = dict(llama.FACTORS) | {"num_local_experts": "expert_count"}
_SHARED = {"shared_intermediate_size": "expert_shared_feed_forward_length"}


def _gguf(**more: Any) -> Gguf:
    return Gguf(architecture="granitemoe", forms=llama.PAIRS, **more)


GRANITEMOE = Family(
    model_type="granitemoe",
    models="Granite 3.x 1B-A400M, 3B-A800M",
    read=read_granitemoe,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048},
    gguf=(_gguf(metadata=_METADATA),),
)
GRANITEMOESHARED = Family(
    model_type="granitemoeshared",
    models="Granite of experts, one of them shared",
    read=read_granitemoeshared,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048},
    gguf=(_gguf(metadata=_METADATA | _SHARED, marker="blk.0.ffn_gate_shexp.weight"),),
)
