"""Llama, and what differs from it in a field or two: Mistral, Granite, SmolLM3."""

import dataclasses
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, checked_bool, shown
from jaxpaged.models.config import ModelConfig, uniform
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Form, Names, Pieces, Shape

LAYER = "model.layers.{layer}"
TABLE: dict[str, str | tuple[str, ...]] = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": f"{LAYER}.input_layernorm",
    "qkv": tuple(f"{LAYER}.self_attn.{x}_proj" for x in "qkv"),
    "q_norm": f"{LAYER}.self_attn.q_norm",
    "k_norm": f"{LAYER}.self_attn.k_norm",
    "o": f"{LAYER}.self_attn.o_proj",
    "mlp_norm": f"{LAYER}.post_attention_layernorm",
    "gate_up": (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
    "down": f"{LAYER}.mlp.down_proj",
}
NAMES = Names(table=TABLE)


def names(config: ModelConfig) -> Names:
    return NAMES


def common(f: Fields, intermediate_size: int | None = None) -> dict[str, Any]:
    """Read the fields that most configs name alike, as arguments of `ModelConfig`, without layers.

    intermediate_size: where a family has read it in a form of its own.
    """
    num_q_heads, hidden_size = f.size("num_attention_heads"), f.size("hidden_size")
    return {
        "vocab_size": f.size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or f.size("intermediate_size"),
        "num_q_heads": num_q_heads,
        "num_kv_heads": f.size("num_key_value_heads", num_q_heads),
        "head_dim": f.size("head_dim", hidden_size // num_q_heads),
        "max_model_len": f.size("max_position_embeddings"),
        "norm_eps": f.positive("rms_norm_eps", 1e-6),
        "tie_word_embeddings": f.flag("tie_word_embeddings"),
        "activation": f.activation("hidden_act", "silu"),
        "eos_token_ids": f.token_ids(),
    }


def biases(f: Fields) -> dict[str, Any]:
    """Read Llama's two flags of biases."""
    in_attention = f.flag("attention_bias")
    return {"qkv_bias": in_attention, "o_bias": in_attention, "mlp_bias": f.flag("mlp_bias")}


def read_llama(f: Fields) -> ModelConfig:
    _refuse_window(f)
    return _llama(f, None)


def read_mistral(f: Fields) -> ModelConfig:
    return _llama(f, _window(f))


def _llama(f: Fields, sliding_window: int | None, **more: Any) -> ModelConfig:
    same = common(f)
    layers = uniform(
        f.size("num_hidden_layers"), rope=f.rope(same["head_dim"]), sliding_window=sliding_window
    )
    return ModelConfig(**same, **biases(f), **more, layers=layers)


def _refuse_window(f: Fields) -> None:
    window, is_used = f.get("sliding_window"), f.get("use_sliding_window", True)
    checked_bool("model config: use_sliding_window", is_used)
    if window is not None and is_used:
        raise InputError(f"model config: sliding_window={shown(window)} must be null for model_type 'llama'")
    _refuse_layer_types(f, None)


def _window(f: Fields) -> Any:
    """Read Mistral's window, the same in every layer."""
    window = None if f.is_null("sliding_window") else f.get("sliding_window")
    is_used = f.get("use_sliding_window", True)
    checked_bool("model config: use_sliding_window", is_used)
    if window is not None and not is_used:
        raise InputError(
            f"model config: use_sliding_window={is_used} contradicts sliding_window={shown(window)}: remove "
            "the former, or set the latter to null"
        )
    _refuse_layer_types(f, window)
    return window


def _refuse_layer_types(f: Fields, window: object) -> None:
    """Refuse layers of several kinds in a family that has none. Raises `InputError`."""
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = f.get("layer_types") or []
    if not isinstance(kinds, list) or any(each != kind for each in kinds):
        raise InputError(
            f"model config: layer_types must all be {kind!r} with sliding_window={shown(window)}: "
            "layers of several kinds are not supported"
        )


def read_granite(f: Fields) -> ModelConfig:
    """Read Granite: Llama with four factors."""
    config = _llama(f, None)
    return dataclasses.replace(
        config,
        embedding_scale=f.positive("embedding_multiplier", 1.0),
        residual_scale=f.positive("residual_multiplier", 1.0),
        attention_scale=f.positive("attention_multiplier", 1.0),
        logit_divisor=f.positive("logits_scaling", 1.0),
    )


def read_smollm3(f: Fields) -> ModelConfig:
    """Read SmolLM3: Llama in which every fourth layer has no positions."""
    config = _llama(f, None)
    layers = tuple(
        kind if turn else dataclasses.replace(kind, rope=None)
        for kind, turn in zip(config.layers, turning_layers(f, config.num_layers), strict=True)
    )
    f.only("use_sliding_window", False)
    return dataclasses.replace(config, layers=layers)


def turning_layers(f: Fields, num_layers: int) -> list[Any]:
    """Return for each layer whether it has RoPE: all but every fourth, unless the config says so."""
    every = f.size("no_rope_layer_interval", 4)
    turns = f.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(num_layers)]
    if not isinstance(turns, list) or len(turns) != num_layers:
        raise InputError(f"model config: no_rope_layers={shown(turns)} must be a list, one for each layer")
    return turns


def half_apart(config: ModelConfig, pieces: Pieces) -> Pieces:
    """Return queries and keys with RoPE's pairs half of what is turned apart; in files that turn neighbours,
    (0, 1), (2, 3), ..., they lie side by side.
    """
    q, k, v = pieces
    return [_apart(config, q), _apart(config, k), v]


def _apart(config: ModelConfig, values: np.ndarray) -> np.ndarray:
    """Return the values of all coordinates of some heads, [heads * head_dim, ...], in the other order."""
    turned = next((kind.rope.dim for kind in config.layers if kind.rope is not None), config.head_dim)
    rest = values.shape[1:]
    heads = values.reshape(-1, config.head_dim, *rest)
    first = heads[:, :turned].reshape(-1, turned // 2, 2, *rest).swapaxes(1, 2).reshape(-1, turned, *rest)
    return np.concatenate([first, heads[:, turned:]], axis=1).reshape(values.shape)


def _norm_half_apart(config: ModelConfig, pieces: Pieces) -> Pieces:
    """Return the weights of norms of each head, in the order of what they norm."""
    return [_apart(config, piece.reshape(-1)).reshape(piece.shape) for piece in pieces]


def _same_shape(config: ModelConfig, shape: Shape) -> Shape:
    return shape


_PAIRS = Form(_same_shape, half_apart)
PAIRS = {"qkv.weight": _PAIRS, "qkv.bias": _PAIRS}
_PAIRED_NORM = Form(_same_shape, _norm_half_apart)
PAIRED_NORMS = {"q_norm.weight": _PAIRED_NORM, "k_norm.weight": _PAIRED_NORM}

# llama.cpp has one architecture for both.
_GGUF = (Gguf(architecture="llama", read=read_mistral, forms=PAIRS),)
FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}

LLAMA = Family(
    model_type="llama",
    models="Llama 2, 3 and 3.1 to 3.3, SmolLM2, TinyLlama, Yi, ...",
    read=read_llama,
    names=names,
    defaults={"max_position_embeddings": 2048},
    gguf=_GGUF,
)
MISTRAL = Family(
    model_type="mistral",
    models="Mistral 7B, Mistral NeMo",
    read=read_mistral,
    names=names,
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    gguf=_GGUF,
)
GRANITE = Family(
    model_type="granite",
    models="Granite 3.x dense",
    read=read_granite,
    names=names,
    defaults={"max_position_embeddings": 2048},
    gguf=(Gguf(architecture="granite", metadata=FACTORS, forms=PAIRS),),
)
SMOLLM3 = Family(
    model_type="smollm3",
    models="SmolLM3 3B",
    read=read_smollm3,
    names=names,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    gguf=(Gguf(architecture="smollm3", forms=PAIRS),),
)
