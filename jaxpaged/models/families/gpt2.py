"""GPT-2: learned positions, weights stored the other way round."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families.early import ALL_BIASES, common
from jaxpaged.models.families.family import FUSED, Family, Gguf
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import TRANSPOSED, Names

LAYER = "transformer.h.{layer}"
NAMES = Names(
    prefix="transformer.",
    table={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
        "attention_norm": f"{LAYER}.ln_1",
        "qkv": f"{LAYER}.attn.c_attn",
        "o": f"{LAYER}.attn.c_proj",
        "mlp_norm": f"{LAYER}.ln_2",
        "up": f"{LAYER}.mlp.c_fc",
        "down": f"{LAYER}.mlp.c_proj",
    },
    forms={f"{role}.weight": TRANSPOSED for role in ("qkv", "o", "up", "down")},
    spare=("attn.bias", "attn.masked_bias"),
)


def read_gpt2(f: Fields) -> ModelConfig:
    same = common(f, heads="n_head", hidden="n_embd")
    f.only("scale_attn_weights", True)
    f.only("scale_attn_by_inverse_layer_idx", False)
    f.only("add_cross_attention", False)
    num_positions = f.size("n_positions", 1024)
    return ModelConfig(
        **same,
        **ALL_BIASES,
        intermediate_size=f.size("n_inner", 4 * same["hidden_size"]),
        max_model_len=num_positions,
        num_positions=num_positions,
        norm_eps=f.positive("layer_norm_epsilon", 1e-5),
        activation=f.activation("activation_function", "gelu_new"),
        layers=uniform(f.size("n_layer"), rope=None),
    )


_METADATA = {
    "n_embd": "embedding_length",
    "n_head": "attention.head_count",
    "n_inner": "feed_forward_length",
    "n_layer": "block_count",
    "n_positions": "context_length",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
}

GPT2 = Family(
    model_type="gpt2",
    models="GPT-2",
    read=read_gpt2,
    names=lambda config: NAMES,
    gguf=(Gguf(architecture="gpt2", metadata=_METADATA, names=FUSED),),
)
