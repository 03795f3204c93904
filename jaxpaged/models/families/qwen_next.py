"""Qwen3-Next, and Qwen 3.5 to 3.8: three layers with states for each one with attention."""

from typing import Any

import numpy as np

from jaxpaged.checks import check
from jaxpaged.models.config import STATE, Experts, LayerKind, ModelConfig
from jaxpaged.models.families import llama, qwen
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.mixers.gated_delta import GatedDelta
from jaxpaged.models.names import BY_CHANNEL, FormOfLayers, Names, Pieces, Stored, reordered

MIXER = f"{llama.LAYER}.linear_attn"


def read_qwen3_next(f: Fields) -> ModelConfig:
    """Read Qwen3-Next: experts in all layers."""
    return _of_experts(f, num_experts=512, num_chosen=10)


def read_qwen3_5(f: Fields) -> ModelConfig:
    """Read the text part of Qwen 3.5."""
    return ModelConfig(**_common(f, f.size("intermediate_size")))


def read_qwen3_5_moe(f: Fields) -> ModelConfig:
    """Read the text part of Qwen 3.5 with experts."""
    return _of_experts(f, num_experts=256, num_chosen=8)


def _common(f: Fields, width: int) -> dict[str, Any]:
    same = llama.common(f, width)
    head_dim = same["head_dim"]
    f.only("attention_bias", False)
    every, num_layers = f.size("full_attention_interval", 4), f.size("num_hidden_layers")
    types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    full = LayerKind(rope=f.rope(head_dim, part=0.25))
    layers = f.layer_kinds(types, full=full, others={"linear_attention": STATE})
    num_heads = f.size("linear_num_value_heads", 32)
    num_key_heads = f.size("linear_num_key_heads", 16)
    mixer = GatedDelta(
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        k_dim=f.size("linear_key_head_dim", 128),
        v_dim=f.size("linear_value_head_dim", 128),
        kernel_size=f.size("linear_conv_kernel_dim", 4),
    )
    f.only("mamba_ssm_dtype", "float32")
    check("model config: hidden_act", same["activation"], "'silu'", same["activation"] == "silu")
    has_states = any(kind.has_state for kind in layers)
    return same | {
        "layers": layers,
        "mixer": mixer if has_states else None,
        "qk_norm": "head",
        "norm_offset": 1.0,
        "output_gate": "element",
    }


def _of_experts(f: Fields, num_experts: int, num_chosen: int) -> ModelConfig:
    f.only("decoder_sparse_step", 1)
    f.only("mlp_only_layers", [])
    experts = Experts(
        num_experts=f.size("num_experts", num_experts),
        num_chosen=f.size("num_experts_per_tok", num_chosen),
        renormalise=f.flag("norm_topk_prob", True),
        shared_size=f.size("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
    return ModelConfig(**_common(f, f.size("moe_intermediate_size", 512)), experts=experts)


def _stored(config: ModelConfig, role: str, layer: int, stored: Stored) -> Stored:
    """Return q's tensor with each head's gate behind its queries, once for each of both roles."""
    if role == "qkv.weight":
        (name, (width, *rest)), *others = stored
        return [(name, (2 * width, *rest)), *others]
    if role == "attention_gate.weight":
        [(name, (width, *rest))] = stored
        return [(name, (2 * width, *rest))]
    return stored


def _restored(config: ModelConfig, role: str, layer: int, pieces: Pieces) -> Pieces:
    if role not in ("qkv.weight", "attention_gate.weight"):
        return pieces
    both = pieces[0].reshape(config.num_q_heads, 2, config.head_dim, -1)
    mine = both[:, int(role == "attention_gate.weight")]
    return [mine.reshape(-1, both.shape[-1]), *pieces[1:]]


def _by_key_head(config: ModelConfig, weight: np.ndarray, widths: list[int]) -> Pieces:
    """Reorder each key head's parts to all of the first part, all of the second, and so on."""
    mixer = config.mixer
    assert isinstance(mixer, GatedDelta)
    heads = weight.reshape(mixer.num_key_heads, sum(widths), -1)
    parts = np.split(heads, np.cumsum(widths)[:-1], axis=1)
    return [part.reshape(-1, weight.shape[1]) for part in parts]


def _qkvz(config: ModelConfig, weight: np.ndarray) -> Pieces:
    mixer = config.mixer
    assert isinstance(mixer, GatedDelta)
    values = mixer.num_heads // mixer.num_key_heads * mixer.v_dim
    return _by_key_head(config, weight, [mixer.k_dim, mixer.k_dim, values, values])


def _ba(config: ModelConfig, weight: np.ndarray) -> Pieces:
    mixer = config.mixer
    assert isinstance(mixer, GatedDelta)
    return _by_key_head(config, weight, [mixer.num_heads // mixer.num_key_heads] * 2)


# Norms other than the mixer's own are stored as what is added to 1.
_TABLE: dict[str, str | tuple[str, ...]] = {
    "attention_gate": f"{llama.LAYER}.self_attn.q_proj",
    "mixer.conv": f"{MIXER}.conv1d",
    "mixer.a_log": f"{MIXER}.A_log",
    "mixer.dt_bias": f"{MIXER}.dt_bias",
    "mixer.norm": f"{MIXER}.norm",
    "mixer.out": f"{MIXER}.out_proj",
}
_TOGETHER = {"mixer.in": f"{MIXER}.in_proj_qkvz", "mixer.ba": f"{MIXER}.in_proj_ba"}
_APART = {
    "mixer.in": (f"{MIXER}.in_proj_qkv", f"{MIXER}.in_proj_z"),
    "mixer.ba": (f"{MIXER}.in_proj_b", f"{MIXER}.in_proj_a"),
}
_FORMS = {"mixer.conv.weight": BY_CHANNEL}
_OF_LAYERS = FormOfLayers(_stored, _restored)
NEXT_NAMES = Names(
    table={**qwen.QWEN2_MOE_NAMES.table, **_TABLE, **_TOGETHER},
    forms=_FORMS | {"mixer.in.weight": reordered(_qkvz), "mixer.ba.weight": reordered(_ba)},
    of_layers=_OF_LAYERS,
    ignored=("mtp.",),
)
NAMES_3_5 = Names(table=llama.TABLE | _TABLE | _APART, forms=_FORMS, of_layers=_OF_LAYERS, ignored=("mtp.",))
MOE_NAMES_3_5 = Names(
    table={**qwen.QWEN2_MOE_NAMES.table, **_TABLE, **_APART},
    forms=_FORMS,
    of_layers=_OF_LAYERS,
    ignored=("mtp.",),
)

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
}
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    models="Qwen3-Next 80B-A3B",
    read=read_qwen3_next,
    names=lambda config: NEXT_NAMES,
    defaults=_DEFAULTS,
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    models="Qwen 3.5 to 3.8, dense",
    read=read_qwen3_5,
    names=lambda config: NAMES_3_5,
    defaults=_DEFAULTS | {"num_key_value_heads": 4},
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    models="Qwen 3.5 to 3.8 with experts",
    read=read_qwen3_5_moe,
    names=lambda config: MOE_NAMES_3_5,
    defaults=_DEFAULTS,
)
