"""Nemotron 4, Minitron and Jais 2: layer norms, and relu squared without a gate."""

from typing import Any

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf, Metadata, rotated_part
from jaxpaged.models.families.gemma import LESS_ONE
from jaxpaged.models.families.near_llama import UNGATED
from jaxpaged.models.fields import Fields


def read_jais2(f: Fields) -> ModelConfig:
    """Read Llama with layer norms, biases and no gate."""
    same = llama.common(f) | {"norm_eps": f.positive("layer_norm_eps", 1e-5)}
    return ModelConfig(
        **same,
        **llama.biases(f),
        norm="layer",
        norm_bias=True,
        gated=False,
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"])),
    )


def read_nemotron(f: Fields) -> ModelConfig:
    """Read Nemotron, of whose norms the weights are stored less one."""
    same = llama.common(f) | {"norm_eps": f.positive("norm_eps", 1e-5)}
    layers = uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"], part=0.5))
    return ModelConfig(
        **same,
        **llama.biases(f),
        norm="layer",
        norm_bias=True,
        norm_offset=1.0,
        gated=False,
        layers=layers,
    )


def _gguf_fields(read: Metadata) -> dict[str, Any]:
    return rotated_part(read) | {"hidden_act": "relu2"}


NEMOTRON = Family(
    model_type="nemotron",
    models="Nemotron 4, Minitron",
    read=read_nemotron,
    names=lambda config: UNGATED,
    defaults={"max_position_embeddings": 4096, "hidden_act": "relu2"},
    gguf=(
        Gguf(
            architecture="nemotron",
            metadata={"norm_eps": "attention.layer_norm_epsilon"},
            fields=_gguf_fields,
            forms={f"{name}.weight": LESS_ONE for name in ("attention_norm", "mlp_norm", "norm")},
        ),
    ),
)
JAIS2 = Family(
    model_type="jais2",
    models="Jais 2 8B, 70B",
    read=read_jais2,
    names=lambda config: UNGATED,
    defaults={
        "max_position_embeddings": 8192,
        "hidden_act": "relu2",
        "attention_bias": True,
        "mlp_bias": True,
    },
)
