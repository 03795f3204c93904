"""OLMo 2: norms behind attention and feed-forward, and of all queries and all keys."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

NAMES = Names(
    table=llama.TABLE
    | {
        "attention_out_norm": f"{llama.LAYER}.post_attention_layernorm",
        "mlp_out_norm": f"{llama.LAYER}.post_feedforward_layernorm",
    }
)


def read_olmo2(f: Fields) -> ModelConfig:
    same = llama.common(f)
    bias = f.flag("attention_bias")
    f.only("sliding_window", None)  # that of OLMo 3, of which GGUF files have the same architecture
    layers = uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"]))
    return ModelConfig(**same, norm_place="after", qk_norm="all", qkv_bias=bias, o_bias=bias, layers=layers)


OLMO2 = Family(
    model_type="olmo2",
    models="OLMo 2",
    read=read_olmo2,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    gguf=(Gguf(architecture="olmo2"),),
)
