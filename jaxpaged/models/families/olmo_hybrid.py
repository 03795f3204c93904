"""OLMo Hybrid: the gated delta rule in three of four layers, attention in the others."""

import numpy as np

from jaxpaged.checks import check
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.mixers.gated_delta import GatedDelta
from jaxpaged.models.names import Form, Names, Pieces, Shape

MIXER = f"{llama.LAYER}.linear_attn"
NORM_EPS = 1e-5  # of the mixer's norm, whatever the config says of others
STATE = LayerKind(attends=False, has_state=True)


def read_olmo_hybrid(f: Fields) -> ModelConfig:
    """Read OLMo Hybrid: norms are before the parts of layers with states, and after those of the others."""
    same, num_layers = llama.common(f), f.size("num_hidden_layers")
    check("model config: hidden_act", same["activation"], "'silu'", same["activation"] == "silu")
    has_rope = f.get("rope_parameters") is not None or f.get("rope_theta") is not None
    rope = f.rope(same["head_dim"]) if has_rope else None
    types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]
    if "full_attention" not in types:
        types[-1] = "full_attention"
    full = LayerKind(rope=rope, norm_place="after")
    layers = f.layer_kinds(types, full=full, others={"linear_attention": STATE})
    bias = f.flag("attention_bias")
    return ModelConfig(
        **same,
        qk_norm="all",
        qkv_bias=bias,
        o_bias=bias,
        layers=layers,
        mixer=_mixer(f) if STATE in layers else None,
    )


def _mixer(f: Fields) -> GatedDelta:
    num_heads = f.size("num_attention_heads")
    num_key_heads = f.size("linear_num_key_heads", num_heads)
    k_dim = f.size("linear_key_head_dim", int(0.75 * f.size("hidden_size") / num_key_heads))
    return GatedDelta(
        num_heads=f.size("linear_num_value_heads", num_heads),
        num_key_heads=num_key_heads,
        k_dim=k_dim,
        v_dim=f.size("linear_value_head_dim", 2 * k_dim),
        kernel_size=f.size("linear_conv_kernel_dim", 4),
        most_beta=2.0 if f.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=NORM_EPS,
    )


def _stored(config: ModelConfig, shape: Shape) -> Shape:
    """Return the shape of a convolution of some channels."""
    assert config.mixer is not None
    return shape[0], 1, config.mixer.kernel_size


def _restored(config: ModelConfig, pieces: Pieces) -> Pieces:
    return [np.concatenate([piece[:, 0] for piece in pieces]).T]


NAMES = Names(
    table={
        **llama.TABLE,
        "attention_norm": f"{llama.LAYER}.attention_layer_norm",
        "mlp_norm": f"{llama.LAYER}.feedforward_layer_norm",
        "attention_out_norm": f"{llama.LAYER}.post_attention_layernorm",
        "mlp_out_norm": f"{llama.LAYER}.post_feedforward_layernorm",
        "mixer.in": tuple(f"{MIXER}.{x}_proj" for x in "qkvg"),
        "mixer.ba": (f"{MIXER}.b_proj", f"{MIXER}.a_proj"),
        "mixer.conv": tuple(f"{MIXER}.{x}_conv1d" for x in "qkv"),
        "mixer.a_log": f"{MIXER}.A_log",
        "mixer.dt_bias": f"{MIXER}.dt_bias",
        "mixer.norm": f"{MIXER}.o_norm",
        "mixer.out": f"{MIXER}.o_proj",
    },
    forms={"mixer.conv.weight": Form(_stored, _restored)},
)
OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    models="OLMo Hybrid 7B",
    read=read_olmo_hybrid,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 65536},
)
