"""Falcon: one or few kv heads, feed-forward beside attention."""

from typing import Any

from jaxpaged.models.alibi import alibi_slopes
from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families.bloom import LAYERS, TABLE
from jaxpaged.models.families.early import GROUPED, common
from jaxpaged.models.families.family import FUSED, Family, Gguf, Metadata
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names


def read_falcon(f: Fields) -> ModelConfig:
    """Read Falcon. 7B has one norm for attention and feed-forward side by side, 40B and 180B have two."""
    hidden = "n_embed" if f.get("n_embed") else "hidden_size"
    heads = "n_head" if f.get("n_head") else "num_attention_heads"
    same = common(f, heads=heads, hidden=hidden)
    num_heads, head_dim = same["num_q_heads"], same["head_dim"]
    is_new, parallel = f.flag("new_decoder_architecture"), f.flag("parallel_attn", True)
    norms = f.size("num_ln_in_parallel_attn", 2 if is_new else 1)
    kv_heads = f.get("num_kv_heads") or f.get("n_head_kv") or num_heads
    if not is_new and f.flag("multi_query", True):
        kv_heads = 1
    has_alibi, bias = f.flag("alibi"), f.flag("bias")
    layers = f.size("n_layer" if f.get("n_layer") else "num_hidden_layers")
    return ModelConfig(
        **same | {"num_kv_heads": kv_heads},
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        parallel=is_new or parallel,
        shared_norm=parallel and norms == 1,
        alibi_slopes=alibi_slopes(num_heads, factor=head_dim**-0.5) if has_alibi else None,
        intermediate_size=f.size("ffn_hidden_size", 4 * same["hidden_size"]),
        max_model_len=f.size("max_position_embeddings", 2048),
        norm_eps=f.positive("layer_norm_epsilon", 1e-5),
        activation=f.activation("activation", "gelu"),
        layers=uniform(layers, rope=None if has_alibi else f.rope(head_dim)),
    )


def names(config: ModelConfig) -> Names:
    table = dict(TABLE)
    if config.parallel and not config.shared_norm:
        table |= {"attention_norm": f"{LAYERS}.ln_attn", "mlp_norm": f"{LAYERS}.ln_mlp"}
    return Names(prefix="transformer.", table=table, forms=GROUPED)


_METADATA = {
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "num_kv_heads": "attention.head_count_kv",
    "ffn_hidden_size": "feed_forward_length",
}
# llama.cpp's first norm is that of the feed-forward part, where there are two.
_TWO_NORMS = FUSED | {"attention_norm": "blk.{layer}.attn_norm_2", "mlp_norm": "blk.{layer}.attn_norm"}


def _gguf(num_norms: int, **more: Any) -> Gguf:
    def fields(read: Metadata) -> dict[str, Any]:
        return {"new_decoder_architecture": True, "num_ln_in_parallel_attn": num_norms}

    return Gguf(architecture="falcon", metadata=_METADATA, fields=fields, **more)


FALCON = Family(
    model_type="falcon",
    models="Falcon 1B to 180B",
    read=read_falcon,
    names=names,
    gguf=(
        _gguf(2, names=_TWO_NORMS, marker="blk.0.attn_norm_2.weight"),
        _gguf(1, names=FUSED),
    ),
)
