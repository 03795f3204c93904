"""OPT: learned positions, of which the first two rows are not used."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families.early import common
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

LAYER = "model.decoder.layers.{layer}"
NAMES = Names(
    prefix="model.",
    table={
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
        "attention_norm": f"{LAYER}.self_attn_layer_norm",
        "qkv": tuple(f"{LAYER}.self_attn.{x}_proj" for x in "qkv"),
        "o": f"{LAYER}.self_attn.out_proj",
        "mlp_norm": f"{LAYER}.final_layer_norm",
        "up": f"{LAYER}.fc1",
        "down": f"{LAYER}.fc2",
    },
)


def read_opt(f: Fields) -> ModelConfig:
    same = common(f, heads="num_attention_heads", hidden="hidden_size")
    f.only("do_layer_norm_before", True)
    f.only("_remove_final_layer_norm", False)
    f.only("word_embed_proj_dim", same["hidden_size"])
    f.only("layer_norm_elementwise_affine", True)
    max_len, bias = f.size("max_position_embeddings", 2048), f.flag("enable_bias", True)
    return ModelConfig(
        **same,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        intermediate_size=f.size("ffn_dim"),
        max_model_len=max_len,
        num_positions=max_len + 2,
        position_offset=2,
        norm_eps=1e-5,
        activation=f.activation("activation_function", "relu"),
        layers=uniform(f.size("num_hidden_layers"), rope=None),
    )


OPT = Family(model_type="opt", models="OPT, but for 350M", read=read_opt, names=lambda config: NAMES)
