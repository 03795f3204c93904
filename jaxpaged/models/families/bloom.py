"""BLOOM: ALiBi, and a norm of the embeddings."""

from jaxpaged.models.alibi import alibi_slopes
from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families.early import ALL_BIASES, GROUPED, common
from jaxpaged.models.families.family import FUSED, Family, Gguf
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

LAYERS = "transformer.h.{layer}"
TABLE: dict[str, str | tuple[str, ...]] = {
    "embedding": "transformer.word_embeddings",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "attention_norm": f"{LAYERS}.input_layernorm",
    "qkv": f"{LAYERS}.self_attention.query_key_value",
    "o": f"{LAYERS}.self_attention.dense",
    "mlp_norm": f"{LAYERS}.post_attention_layernorm",
    "up": f"{LAYERS}.mlp.dense_h_to_4h",
    "down": f"{LAYERS}.mlp.dense_4h_to_h",
}
NAMES = Names(
    prefix="transformer.",
    table=TABLE | {"embedding_norm": "transformer.word_embeddings_layernorm"},
    forms=GROUPED,
)


def read_bloom(f: Fields) -> ModelConfig:
    f.only("apply_residual_connection_post_layernorm", False)
    heads = "n_head" if f.get("n_head") else "num_attention_heads"
    same = common(f, heads=heads, hidden="n_embed" if f.get("n_embed") else "hidden_size")
    return ModelConfig(
        **same,
        **ALL_BIASES,
        embedding_norm=True,
        alibi_slopes=alibi_slopes(same["num_q_heads"]),
        intermediate_size=4 * same["hidden_size"],
        max_model_len=f.size("seq_length", 2048),
        norm_eps=f.positive("layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        layers=uniform(f.size("n_layer" if f.get("n_layer") else "num_hidden_layers"), rope=None),
    )


_METADATA = {"seq_length": "context_length", "layer_norm_epsilon": "attention.layer_norm_epsilon"}

BLOOM = Family(
    model_type="bloom",
    models="BLOOM, BLOOMZ",
    read=read_bloom,
    names=lambda config: NAMES,
    gguf=(Gguf(architecture="bloom", metadata=_METADATA, names=FUSED),),
)
