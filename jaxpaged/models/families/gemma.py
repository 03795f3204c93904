"""Gemma 1, 2 and 3 (text) and VaultGemma: scaled embeddings, and norms whose weights are stored less one."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.models.config import LayerKind, ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf, Metadata
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Form, Names

FOUR_NORMS = Names(
    table=llama.TABLE
    | {
        "attention_out_norm": f"{llama.LAYER}.post_attention_layernorm",
        "mlp_norm": f"{llama.LAYER}.pre_feedforward_layernorm",
        "mlp_out_norm": f"{llama.LAYER}.post_feedforward_layernorm",
    }
)
TWO_NORMS = Names(table=llama.TABLE | {"mlp_norm": f"{llama.LAYER}.pre_feedforward_layernorm"})
LARGEST = (46, 62)  # layers of Gemma 2 27B and 3 27B, whose scale llama.cpp knows by that
LOCAL_THETA, GLOBAL_THETA = 10000.0, 1000000.0


def common(f: Fields, intermediate_size: int | None = None) -> dict[str, Any]:
    same = llama.common(f, intermediate_size)
    activation = f.activation("hidden_activation", "gelu_pytorch_tanh")
    bias = f.flag("attention_bias")
    return same | {
        "activation": activation,
        "embedding_scale": float(same["hidden_size"]) ** 0.5,
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def read_gemma(f: Fields) -> ModelConfig:
    same = common(f)
    layers = uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"]))
    return ModelConfig(**same, layers=layers)


def _capped(f: Fields) -> dict[str, Any]:
    """Read the fields that Gemma 2 and 3 have in common."""
    f.only("use_bidirectional_attention", False)
    return common(f) | {
        "norm_place": "both",
        "attention_scale": f.positive("query_pre_attn_scalar", 256) ** -0.5,
        "logit_soft_cap": f.get("final_logit_softcapping"),
    }


def read_gemma2(f: Fields) -> ModelConfig:
    return ModelConfig(**_gemma2(f))


def read_vaultgemma(f: Fields) -> ModelConfig:
    """Read Gemma 2 with norms of the parts' inputs only."""
    return ModelConfig(**_gemma2(f) | {"norm_place": "before"})


def _gemma2(f: Fields) -> dict[str, Any]:
    same = _capped(f)
    for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        ours = "attention_soft_cap" if name.startswith("attn") else "logit_soft_cap"
        same[ours] = None if f.is_null(name) else f.get(name, default)
    rope = f.rope(same["head_dim"])
    full, sliding = LayerKind(rope=rope), LayerKind(rope=rope, sliding_window=f.size("sliding_window", 4096))
    return same | {"layers": f.layer_kinds(_every(f, 2), sliding=sliding, full=full)}


def read_gemma3(f: Fields) -> ModelConfig:
    f.get("attn_logit_softcapping")  # transformers and llama.cpp have it, and leave it unused in this family
    same = _capped(f) | {"qk_norm": "head"}
    local, everywhere = ropes(f, same["head_dim"])
    sliding = LayerKind(rope=local, sliding_window=f.size("sliding_window", 4096))
    types = _every(f, f.size("sliding_window_pattern", f.size("_sliding_window_pattern", 6)))
    return ModelConfig(**same, layers=f.layer_kinds(types, sliding=sliding, full=LayerKind(rope=everywhere)))


def ropes(f: Fields, head_dim: int) -> Any:
    """Return the RoPE of layers with a window, and that of the others, which alone is scaled."""
    given = f.get("rope_parameters") or {"full_attention": f.get("rope_scaling")}
    if not isinstance(given, Mapping):
        raise InputError(f"model config: rope_parameters={shown(given)} must be a JSON object or null")
    thetas = f.get("rope_local_base_freq", LOCAL_THETA), f.get("rope_theta", GLOBAL_THETA)
    kinds = "sliding_attention", "full_attention"
    return [
        f.rope_of(f"rope_parameters.{kind}", given.get(kind) or {}, {"rope_theta": theta}, head_dim)
        for kind, theta in zip(kinds, thetas, strict=True)
    ]


def _every(f: Fields, pattern: int) -> list[str]:
    """Return the types of layers of which the last of each `pattern` sees all tokens."""
    num_layers = f.size("num_hidden_layers")
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]


def _gguf_fields(read: Metadata) -> dict[str, Any]:
    """Return the fields that llama.cpp knows by itself, and those that the file stores."""
    scalar = read("attention.key_length")
    if read("block_count") in LARGEST:
        scalar = read("embedding_length") / read("attention.head_count")
    return {
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": read("attn_logit_softcapping"),
        "final_logit_softcapping": read("final_logit_softcapping"),
        "sliding_window": read("attention.sliding_window"),
    }


def _gguf_fields3(read: Metadata) -> dict[str, Any]:
    return _gguf_fields(read) | {
        "rope_theta": read("rope.freq_base") or GLOBAL_THETA,
        "rope_local_base_freq": read("rope.freq_base_swa") or LOCAL_THETA,
    }


LESS_ONE = Form(lambda config, shape: shape, lambda config, pieces: [piece - 1 for piece in pieces])
_NORMS = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm", "q_norm", "k_norm", "norm")
GGUF_FORMS = {f"{name}.weight": LESS_ONE for name in _NORMS}


def _gguf(architecture: str, fields: Callable[[Metadata], dict[str, Any]]) -> tuple[Gguf]:
    return (Gguf(architecture=architecture, fields=fields, forms=GGUF_FORMS),)


_TIED = {"tie_word_embeddings": True, "head_dim": 256}
GEMMA = Family(
    model_type="gemma",
    models="Gemma 1",
    read=read_gemma,
    names=llama.names,
    defaults=_TIED | {"max_position_embeddings": 8192},
    gguf=_gguf("gemma", _gguf_fields),
)
GEMMA2 = Family(
    model_type="gemma2",
    models="Gemma 2",
    read=read_gemma2,
    names=lambda config: FOUR_NORMS,
    defaults=_TIED | {"max_position_embeddings": 8192},
    gguf=_gguf("gemma2", _gguf_fields),
)
VAULTGEMMA = Family(
    model_type="vaultgemma",
    models="VaultGemma 1B",
    read=read_vaultgemma,
    names=lambda config: TWO_NORMS,
    defaults=_TIED | {"max_position_embeddings": 8192, "num_key_value_heads": 4},
)
GEMMA3 = Family(
    model_type="gemma3_text",
    models="Gemma 3, text only",
    read=read_gemma3,
    names=lambda config: FOUR_NORMS,
    defaults=_TIED | {"max_position_embeddings": 131072},
    has_final_length=True,
    gguf=_gguf("gemma3", _gguf_fields3),
)
