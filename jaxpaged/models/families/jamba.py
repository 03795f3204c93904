"""Jamba: Mamba-1 in most layers, attention without positions in some, experts in every other."""

from jaxpaged.checks import check
from jaxpaged.models.config import STATE, Experts, LayerKind, ModelConfig
from jaxpaged.models.families import bamba, llama, mamba_fields
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.mixers.mamba1 import Mamba1
from jaxpaged.models.names import BY_CHANNEL, Names

MAMBA = f"{llama.LAYER}.mamba"


def read_jamba(f: Fields) -> ModelConfig:
    """Read Jamba: layers with attention and with experts are every so many, from a number on."""
    same, num_layers = llama.common(f), f.size("num_hidden_layers")
    check("model config: hidden_act", same["activation"], "'silu'", same["activation"] == "silu")
    attends = _every(f, "attn_layer", (8, 4), num_layers)
    layers = tuple(LayerKind() if i in attends else STATE for i in range(num_layers))
    return ModelConfig(
        **same,
        layers=layers,
        mixer=_mixer(f, same["norm_eps"]) if STATE in layers else None,
        experts=_experts(f, num_layers, same["intermediate_size"]),
    )


def _mixer(f: Fields, eps: float) -> Mamba1:
    return Mamba1(
        width=f.size("mamba_expand", 2) * f.size("hidden_size"),
        state_size=f.size("mamba_d_state", 16),
        dt_rank=mamba_fields.dt_rank(f, "mamba_dt_rank"),
        kernel_size=f.size("mamba_d_conv", 4),
        conv_bias=f.flag("mamba_conv_bias", True),
        bias=f.flag("mamba_proj_bias"),
        norms="weighted",
        norm_eps=eps,
    )


def _experts(f: Fields, num_layers: int, width: int) -> Experts | None:
    num_experts, num_chosen = f.size("num_experts", 16), f.size("num_experts_per_tok", 2)
    has_some = _every(f, "expert_layer", (2, 1), num_layers)
    if num_experts == 1 or not has_some:
        return None
    dense = tuple(i for i in range(num_layers) if i not in has_some)
    return Experts(
        num_experts=num_experts,
        num_chosen=num_chosen,
        renormalise=False,
        dense_layers=dense,
        dense_size=width if dense else 0,
    )


def _every(f: Fields, name: str, default: tuple[int, int], num_layers: int) -> set[int]:
    """Read the numbers of layers that are `offset` and so many periods further on."""
    period, offset = f.size(f"{name}_period", default[0]), f.count(f"{name}_offset", default[1])
    check(f"model config: {name}_offset", offset, f"less than {name}_period={period}", offset < period)
    return {*range(offset, num_layers, period)}


NAMES = Names(
    table={
        **bamba.TABLE,
        **mamba_fields.mamba1_table(MAMBA),
        **{f"mixer.{name}_norm": f"{MAMBA}.{name}_layernorm" for name in ("dt", "b", "c")},
        "router": f"{bamba.FEED_FORWARD}.router",
        "experts.gate_up": tuple(f"{bamba.FEED_FORWARD}.experts.{{expert}}.{x}_proj" for x in ("gate", "up")),
        "experts.down": f"{bamba.FEED_FORWARD}.experts.{{expert}}.down_proj",
    },
    forms={"mixer.conv.weight": BY_CHANNEL},
)
JAMBA = Family(
    model_type="jamba",
    models="Jamba 1.5 to 1.7, Jamba Reasoning 3B",
    read=read_jamba,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8},
)
