"""Apertus: norms of each head's queries and keys, and xIELU, whose shape each layer has learned."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Form, Names

# A number that is an array of no dimensions in files.
NUMBER = Form(lambda config, shape: (), lambda config, pieces: [pieces[0].reshape(1)])
NAMES = Names(
    table=llama.TABLE
    | {
        "attention_norm": f"{llama.LAYER}.attention_layernorm",
        "mlp_norm": f"{llama.LAYER}.feedforward_layernorm",
        "up": f"{llama.LAYER}.mlp.up_proj",
        **{
            f"xielu.{name}": f"{llama.LAYER}.mlp.act_fn.{name}"
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        },
    },
    forms={"xielu.beta": NUMBER, "xielu.eps": NUMBER},
)
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_apertus(f: Fields) -> ModelConfig:
    same, bias = llama.common(f), f.flag("attention_bias")
    f.only("post_norm", False)
    f.only("qk_norm", True)
    return ModelConfig(
        **same,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        gated=False,
        mlp_bias=f.flag("mlp_bias"),
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"])),
    )


APERTUS = Family(
    model_type="apertus",
    models="Apertus 8B, 70B",
    read=read_apertus,
    names=lambda config: NAMES,
    defaults={
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "hidden_act": "xielu",
        "rope_theta": 12000000.0,
        "rope_parameters": ROPE,
    },
)
