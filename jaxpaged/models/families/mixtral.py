"""Mixtral: Mistral with experts."""

from jaxpaged.models.config import Experts, ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

MOE = f"{llama.LAYER}.block_sparse_moe"
EXPERT = f"{MOE}.experts.{{expert}}"
NAMES = Names(
    table=llama.TABLE
    | {
        "router": f"{MOE}.gate",
        "experts.gate_up": (f"{EXPERT}.w1", f"{EXPERT}.w3"),
        "experts.down": f"{EXPERT}.w2",
    }
)


def read_mixtral(f: Fields) -> ModelConfig:
    same = llama.common(f)
    rope, window = f.rope(same["head_dim"]), f.get("sliding_window")
    experts = Experts(
        num_experts=f.size("num_local_experts", f.size("num_experts", 8)),
        num_chosen=f.size("num_experts_per_tok", 2),
        renormalise=True,
    )
    layers = uniform(f.size("num_hidden_layers"), rope=rope, sliding_window=window)
    return ModelConfig(**same, experts=experts, layers=layers)


MIXTRAL = Family(
    model_type="mixtral",
    models="Mixtral 8x7B, 8x22B",
    read=read_mixtral,
    names=lambda config: NAMES,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    gguf=(Gguf(architecture="llama", forms=llama.PAIRS, marker="blk.0.ffn_gate_exps.weight"),),
)
