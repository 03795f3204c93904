"""EXAONE: 3 is Llama under other names; 4 norms each head's queries and keys, and behind each part.

K-EXAONE has EXAONE 4's attention and experts of DeepSeek-V3's way, with norms before each part.
"""

import dataclasses
from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.families import llama, routing
from jaxpaged.models.families.family import Family, Gguf, Metadata
from jaxpaged.models.families.olmo import NAMES
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

BLOCK = "transformer.h.{layer}"
EXAONE_NAMES = Names(
    table={
        "embedding": "transformer.wte",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
        "attention_norm": f"{BLOCK}.ln_1",
        "qkv": tuple(f"{BLOCK}.attn.attention.{x}_proj" for x in "qkv"),
        "o": f"{BLOCK}.attn.attention.out_proj",
        "mlp_norm": f"{BLOCK}.ln_2",
        "gate_up": (f"{BLOCK}.mlp.c_fc_0", f"{BLOCK}.mlp.c_fc_1"),
        "down": f"{BLOCK}.mlp.c_proj",
    }
)
MOE_TABLE = routing.TABLE | {"correction": f"{routing.MLP}.e_score_correction_bias"}


def read_exaone(f: Fields) -> ModelConfig:
    f.alias(
        num_hidden_layers="num_layers",
        rms_norm_eps="layer_norm_epsilon",
        hidden_act="activation_function",
    )
    return llama.read_llama(f)


def read_exaone_moe(f: Fields) -> ModelConfig:
    """Read K-EXAONE, whose norms are before attention and experts."""
    f.alias(n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    config = read_exaone4(f)
    experts, width = routing.read(f, config.intermediate_size, dense_layers=1)
    dense = routing.dense_layers(f, len(experts.dense_layers))
    f.only("is_moe_layer", [i not in dense for i in range(config.num_layers)])  # of older files
    experts = dataclasses.replace(
        experts, dense_layers=dense, dense_size=config.intermediate_size if dense else 0
    )
    return dataclasses.replace(config, norm_place="before", intermediate_size=width, experts=experts)


def read_exaone4(f: Fields) -> ModelConfig:
    """Read EXAONE 4. Where some layers have a window, those that see all know no positions."""
    same = llama.common(f)
    rope = f.rope(same["head_dim"])
    window = None if f.is_null("sliding_window") else f.get("sliding_window", 4096)
    full = LayerKind(rope=rope if window is None else None)
    sliding = LayerKind(rope=rope, sliding_window=window)
    layers = f.layer_kinds(_types(f, window is not None), sliding=sliding, full=full)
    return ModelConfig(**same, norm_place="after", qk_norm="head", layers=layers)


def _types(f: Fields, has_window: bool) -> list[str]:
    """Return the layers' kinds by a pattern: a number, or letters of which L has a window."""
    num_layers, pattern = f.size("num_hidden_layers"), f.get("sliding_window_pattern", 4)
    if not has_window:
        return ["full_attention"] * num_layers
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        letters = [pattern[i % len(pattern)] for i in range(num_layers - 1)] + ["G"]
        return ["sliding_attention" if letter == "L" else "full_attention" for letter in letters]
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise InputError(
            f"model config: sliding_window_pattern={shown(pattern)} must be an int >= 1 or letters L and G"
        )
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]


def _gguf_fields(read: Metadata) -> dict[str, Any]:
    """Return the layers' kinds, of which a file has a list."""
    pattern = read("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {}
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in pattern]}


EXAONE4 = Family(
    model_type="exaone4",
    models="EXAONE 4.0 1.2B, 32B",
    read=read_exaone4,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    gguf=(Gguf(architecture="exaone4", fields=_gguf_fields),),
)
EXAONE = Family(
    model_type="exaone",
    models="EXAONE 3.0, 3.5 and Deep",
    read=read_exaone,
    names=lambda config: EXAONE_NAMES,
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
)
EXAONE_MOE = Family(
    model_type="exaone_moe",
    models="K-EXAONE 236B-A23B",
    read=read_exaone_moe,
    names=lambda config: Names(table=MOE_TABLE, ignored=("mtp.", *routing.beyond(config))),
    defaults={
        **EXAONE4.defaults,
        "num_experts": 64,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.5,
    },
)
