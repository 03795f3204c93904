"""dots.llm1: GLM-4.5's experts, with norms of each head's queries and keys and all of RoPE."""

from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.families import llama, routing
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.fields import Fields


def read_dots(f: Fields) -> ModelConfig:
    same = llama.common(f)
    experts, width = routing.read(f, same["intermediate_size"], dense_layers=0)
    rope, num_layers, bias = f.rope(same["head_dim"]), f.size("num_hidden_layers"), f.flag("attention_bias")
    window = None if f.is_null("sliding_window") else f.get("sliding_window", 4096)
    first = num_layers if window is None else f.count("max_window_layers", 62)
    types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    full, sliding = LayerKind(rope=rope), LayerKind(rope=rope, sliding_window=window)
    return ModelConfig(
        **same | {"intermediate_size": width},
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        experts=experts,
        layers=f.layer_kinds(types, sliding=sliding, full=full),
    )


DOTS1 = Family(
    model_type="dots1",
    models="dots.llm1",
    read=read_dots,
    names=routing.names,
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "norm_topk_prob": False},
    gguf=(Gguf(architecture="dots1", metadata=routing.GGUF_METADATA, fields=routing.gguf_fields),),
)
