"""GPT-J: feed-forward beside attention on one norm, RoPE of neighbouring coordinates, a bias of the head."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families.early import common
from jaxpaged.models.families.family import Family
from jaxpaged.models.families.gpt2 import LAYER
from jaxpaged.models.families.llama import PAIRS
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

NAMES = Names(
    prefix="transformer.",
    table={
        "embedding": "transformer.wte",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
        "attention_norm": f"{LAYER}.ln_1",
        "qkv": tuple(f"{LAYER}.attn.{x}_proj" for x in "qkv"),
        "o": f"{LAYER}.attn.out_proj",
        "up": f"{LAYER}.mlp.fc_in",
        "down": f"{LAYER}.mlp.fc_out",
    },
    forms=PAIRS,
    spare=("attn.bias", "attn.masked_bias"),
)


def read_gptj(f: Fields) -> ModelConfig:
    same = common(f, heads="n_head", hidden="n_embd")
    turned = same["head_dim"] if f.is_null("rotary_dim") else f.size("rotary_dim", 64)
    rope = f.rope(same["head_dim"], part=turned / same["head_dim"])
    return ModelConfig(
        **same,
        intermediate_size=f.size("n_inner", 4 * same["hidden_size"]),
        max_model_len=f.size("n_positions", 2048),
        parallel=True,
        shared_norm=True,
        mlp_bias=True,
        lm_head_bias=True,
        norm_eps=f.positive("layer_norm_epsilon", 1e-5),
        activation=f.activation("activation_function", "gelu_new"),
        layers=uniform(f.size("n_layer"), rope=rope),
    )


GPTJ = Family(
    model_type="gptj",
    models="GPT-J 6B",
    read=read_gptj,
    names=lambda config: NAMES,
    defaults={"tie_word_embeddings": False},
)
