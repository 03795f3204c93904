"""StarCoder2: grouped-query attention with layer norms, and no gate."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

NAMES = Names(table=llama.TABLE | {"up": f"{llama.LAYER}.mlp.c_fc", "down": f"{llama.LAYER}.mlp.c_proj"})


def read_starcoder2(f: Fields) -> ModelConfig:
    same = llama.common(f) | {"norm_eps": f.positive("norm_epsilon", 1e-5)}
    bias = f.flag("use_bias", True)
    rope, window = f.rope(same["head_dim"]), f.get("sliding_window")
    return ModelConfig(
        **same,
        norm="layer",
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        layers=uniform(f.size("num_hidden_layers"), rope=rope, sliding_window=window),
    )


ACTIVATION = {"hidden_act": "gelu_pytorch_tanh"}

STARCODER2 = Family(
    model_type="starcoder2",
    models="StarCoder2",
    read=read_starcoder2,
    names=lambda config: NAMES,
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        **ACTIVATION,
    },
    gguf=(
        Gguf(
            architecture="starcoder2",
            metadata={"norm_epsilon": "attention.layer_norm_epsilon"},
            fields=lambda read: ACTIVATION,
        ),
    ),
)
