"""StableLM 2: layer norms with biases, and RoPE of a part of each head."""

from typing import Any

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf, Metadata, rotated_part
from jaxpaged.models.fields import Fields


def read_stablelm(f: Fields) -> ModelConfig:
    """Read StableLM, with feed-forward after attention, or beside it on the same norm."""
    same = llama.common(f) | {"norm_eps": f.positive("layer_norm_eps", 1e-5)}
    parallel = f.flag("use_parallel_residual")
    f.only("qk_layernorm", False)
    layers = uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"], part=0.25))
    return ModelConfig(
        **same,
        norm="layer",
        norm_bias=True,
        parallel=parallel,
        shared_norm=parallel,
        qkv_bias=f.flag("use_qkv_bias"),
        layers=layers,
    )


def _gguf_fields(read: Metadata) -> dict[str, Any]:
    return rotated_part(read) | {"use_parallel_residual": read("use_parallel_residual")}


STABLELM = Family(
    model_type="stablelm",
    models="StableLM 3B, StableLM 2 1.6B",
    read=read_stablelm,
    names=llama.names,
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 32},
    gguf=(
        Gguf(
            architecture="stablelm",
            metadata={"layer_norm_eps": "attention.layer_norm_epsilon"},
            fields=_gguf_fields,
        ),
    ),
)
