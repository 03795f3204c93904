"""Phi-3 and Phi-4: Llama with its products stored as one, and LongRoPE."""

import dataclasses

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import FUSED, Family, Gguf, rotated_part
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

NAMES = Names(
    table=llama.TABLE
    | {"qkv": f"{llama.LAYER}.self_attn.qkv_proj", "gate_up": f"{llama.LAYER}.mlp.gate_up_proj"}
)


def read_phi3(f: Fields) -> ModelConfig:
    same = llama.common(f)
    window = f.get("sliding_window")
    layers = uniform(
        f.size("num_hidden_layers"), rope=f.rope(same["head_dim"], part=1.0), sliding_window=window
    )
    return dataclasses.replace(ModelConfig(**same, layers=layers), norm_eps=f.positive("rms_norm_eps", 1e-5))


PHI3 = Family(
    model_type="phi3",
    models="Phi-3, Phi-3.5 mini, Phi-4, Phi-4-mini",
    read=read_phi3,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    gguf=(Gguf(architecture="phi3", fields=rotated_part, names=FUSED | {"gate_up": "blk.{layer}.ffn_up"}),),
)
