"""GPT-NeoX and Pythia: RoPE on a part of each head, feed-forward beside attention."""

from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families.early import GROUPED, common
from jaxpaged.models.families.family import FUSED, Family, Gguf, rotated_part
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

LAYER = "gpt_neox.layers.{layer}"
NAMES = Names(
    table={
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
        "attention_norm": f"{LAYER}.input_layernorm",
        "qkv": f"{LAYER}.attention.query_key_value",
        "o": f"{LAYER}.attention.dense",
        "mlp_norm": f"{LAYER}.post_attention_layernorm",
        "up": f"{LAYER}.mlp.dense_h_to_4h",
        "down": f"{LAYER}.mlp.dense_4h_to_h",
    },
    forms=GROUPED,
    spare=("attention.bias", "attention.masked_bias"),
)


def read_gpt_neox(f: Fields) -> ModelConfig:
    same = common(f, heads="num_attention_heads", hidden="hidden_size") | {
        "tie_word_embeddings": f.flag("tie_word_embeddings")
    }
    bias = f.flag("attention_bias", True)
    rope = f.rope(
        same["head_dim"],
        theta=f.get("rotary_emb_base", 10000.0),
        part=f.positive("rotary_pct", 0.25),
    )
    return ModelConfig(
        **same,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        parallel=f.flag("use_parallel_residual", True),
        intermediate_size=f.size("intermediate_size"),
        max_model_len=f.size("max_position_embeddings", 2048),
        norm_eps=f.positive("layer_norm_eps", 1e-5),
        activation=f.activation("hidden_act", "gelu"),
        layers=uniform(f.size("num_hidden_layers"), rope=rope),
    )


GPT_NEOX = Family(
    model_type="gpt_neox",
    models="Pythia, GPT-NeoX 20B",
    read=read_gpt_neox,
    names=lambda config: NAMES,
    gguf=(
        Gguf(
            architecture="gptneox",
            metadata={
                "layer_norm_eps": "attention.layer_norm_epsilon",
                "use_parallel_residual": "use_parallel_residual",
            },
            fields=rotated_part,
            names=FUSED,
        ),
    ),
)
