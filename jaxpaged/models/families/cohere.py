"""Command R and Command A: layer norms without biases, feed-forward beside attention on the same norm."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxpaged.checks import check
from jaxpaged.models.config import Experts, LayerKind, ModelConfig, uniform
from jaxpaged.models.families import llama, routing
from jaxpaged.models.families.family import Family, Gguf, Metadata
from jaxpaged.models.families.near_llama import PAIRED
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

SLIDING, FULL = "sliding_attention", "full_attention"
MOE_NAMES = Names(table=routing.TABLE, forms=llama.PAIRS)


def _common(f: Fields) -> dict[str, Any]:
    same = llama.common(f) | {"norm_eps": f.positive("layer_norm_eps", 1e-5)}
    bias = f.flag("attention_bias")
    f.only("position_embedding_type", "rope", "rope_gptj")
    f.only("rotary_pct", 1)
    f.only("use_gated_activation", True)
    f.only("use_parallel_block", True)
    return same | {
        "norm": "layer",
        "parallel": True,
        "shared_norm": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "logit_divisor": 1 / f.positive("logit_scale", 0.0625),
    }


def read_cohere(f: Fields) -> ModelConfig:
    """Read Command R. R+ has norms of queries and keys, with weights for each head."""
    same = _common(f)
    layers = uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"]))
    return ModelConfig(**same, qk_norm="each" if f.flag("use_qk_norm") else None, layers=layers)


def read_cohere2(f: Fields) -> ModelConfig:
    """Read Command R7B and A, where three of four layers have a window and RoPE, the others neither."""
    same, every = _common(f), f.size("sliding_window_pattern", 4)
    rope, num_layers = f.rope(same["head_dim"]), f.size("num_hidden_layers")
    types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    sliding = LayerKind(rope=rope, sliding_window=f.size("sliding_window", 4096))
    return ModelConfig(**same, layers=f.layer_kinds(types, sliding=sliding, full=LayerKind()))


def read_cohere2_moe(f: Fields) -> ModelConfig:
    """Read Command A Plus: Command A with experts, and perhaps some dense layers at first."""
    same, num_layers = _common(f), f.size("num_hidden_layers")
    if f.get("rms_norm_eps") is not None:
        same |= {"norm": "rms", "norm_eps": f.positive("rms_norm_eps")}
    first, every = f.count("first_k_dense_replace", 0), f.size("sliding_window_pattern", 4)
    every_first = f.size("prefix_dense_sliding_window_pattern", 1)
    types = [SLIDING if (i + 1) % every_first else FULL for i in range(first)]
    types += [SLIDING if (i + 1) % every else FULL for i in range(num_layers - first)]
    rope, window = f.rope(same["head_dim"]), f.size("sliding_window", 4096)
    layers = f.layer_kinds(types, sliding=LayerKind(rope=rope, sliding_window=window), full=LayerKind())
    dense = routing.dense_layers(f, first)
    if every_first == 1:  # dense layers have RoPE, whatever they see
        layers = tuple(
            dataclasses.replace(kind, rope=rope) if i in dense else kind for i, kind in enumerate(layers)
        )
    strategy = f.get("shared_expert_combination_strategy", "average")
    rule = "'sum' or 'average'"
    check("model config: shared_expert_combination_strategy", strategy, rule, strategy in ("sum", "average"))
    scoring = f.get("expert_selection_fn", "softmax")
    check(
        "model config: expert_selection_fn",
        scoring,
        "'softmax' or 'sigmoid'",
        scoring in ("softmax", "sigmoid"),
    )
    shared = same["intermediate_size"] * f.count("num_shared_experts", 0)
    half = 0.5 if shared and strategy == "average" else 1.0
    experts = Experts(
        num_experts=f.size("num_experts", 8),
        num_chosen=f.size("num_experts_per_tok", 2),
        renormalise=f.flag("norm_topk_prob", True) or scoring == "softmax",
        scoring=scoring,
        scale=half,
        shared_size=shared,
        shared_scale=half,
        dense_layers=dense,
        dense_size=f.size("prefix_dense_intermediate_size", same["intermediate_size"]) if dense else 0,
    )
    return ModelConfig(**same, experts=experts, layers=layers)


_METADATA = {"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"}


def _gguf_fields(read: Metadata) -> dict[str, Any]:
    return {"tie_word_embeddings": True}


def _gguf_fields_of_r_plus(read: Metadata) -> dict[str, Any]:
    return _gguf_fields(read) | {"use_qk_norm": True}


def _gguf(architecture: str, fields: Callable[[Metadata], dict[str, Any]], **more: Any) -> Gguf:
    forms = llama.PAIRS | llama.PAIRED_NORMS
    return Gguf(architecture=architecture, metadata=_METADATA, fields=fields, forms=forms, **more)


_DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
COHERE = Family(
    model_type="cohere",
    models="Command R, R+, Aya 23 and Expanse",
    read=read_cohere,
    names=lambda config: PAIRED,
    defaults=_DEFAULTS | {"rope_theta": 500000.0},
    gguf=(
        _gguf("command-r", _gguf_fields),
        _gguf("command-r", _gguf_fields_of_r_plus, marker="blk.0.attn_q_norm.weight"),
    ),
)
COHERE2 = Family(
    model_type="cohere2",
    models="Command R7B, Command A",
    read=read_cohere2,
    names=lambda config: PAIRED,
    defaults=_DEFAULTS,
    gguf=(_gguf("cohere2", _gguf_fields),),
)
COHERE2_MOE = Family(
    model_type="cohere2_moe",
    models="Command A Plus",
    read=read_cohere2_moe,
    names=lambda config: MOE_NAMES,
    defaults={**_DEFAULTS, "head_dim": 128},
)
