"""Keys of a GGUF header that change a model's arithmetic: used, as the description says, or refused.

llama.cpp reads the keys of all architectures by one table of names. A file may have one of them that the
family does not read; whatever it says then must hold for the model all the same.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.models.config import ModelConfig

# Beginnings of names that change arithmetic, and whole names beside them.
GROUPS = (
    *("attention.", "rope.", "expert", "ssm.", "hyper_connection.", "kda.", "wkv.", "shortconv.", "moe_"),
    *("swiglu_", "altup", "laurel", "activation_sparsity"),
)
OF_NO_ROPE = tuple(group for group in GROUPS if group != "rope.")
NAMES = {
    *("attn_logit_softcapping", "router_logit_softcapping", "final_logit_softcapping", "logit_scale"),
    *("residual_scale", "embedding_scale", "hidden_activation", "use_parallel_residual", "swin_norm"),
    *("leading_dense_block_count", "interleave_moe_layer_step", "full_attention_interval"),
    *("embedding_length_out", "embedding_length_per_layer_input", "nextn_predict_layers", "hash_layer_count"),
    *("token_shift_count", "rescale_every_n_layers"),
}
# Names of these groups that change nothing by themselves: sizes that are always read, one of two epsilons,
# axes of images, and what matters beside a scaling alone.
HARMLESS = {
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_epsilon"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_sections", "rope.scaling.finetuned"),
    *("rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}


def check_keys(
    header: Mapping[str, Any], path: Path, architecture: str, used: Collection[str], config: ModelConfig
) -> None:
    """Refuse a file with a key that changes the arithmetic, and that the description does not agree with.

    header, used: names less the architecture's in front; `used` are those that the family has read.
    """
    turns = any(kind.rope is not None for kind in config.layers)
    for name, value in header.items():
        matters = name in NAMES or name.startswith(GROUPS if turns else OF_NO_ROPE)
        if not matters or name in HARMLESS or name in used:
            continue
        allowed = _values(config, name)
        if not _is_neutral(name, value) and not any(_same(value, each) for each in allowed):
            rule = " or ".join([*(shown(each) for each in sorted(set(allowed), key=str)), "left out"])
            rule += ": anything else is another arithmetic, which is not supported here"
            raise InputError(f"model={str(path)!r}: {architecture}.{name}={shown(value)} must be {rule}")


def _is_neutral(name: str, value: Any) -> bool:
    return name != "attention.causal" and not (any(value) if isinstance(value, list) else value)


def _same(value: Any, allowed: Any) -> bool:
    if isinstance(value, list):
        return all(_same(each, allowed) for each in value)
    if isinstance(value, int | float) and isinstance(allowed, int | float):
        return math.isclose(value, allowed, rel_tol=1e-6)
    return bool(value == allowed)


def _values(config: ModelConfig, name: str) -> list[Any]:
    """Return the values of a key that say what the description does."""
    c, e = config, config.experts
    ropes = [kind.rope for kind in c.layers if kind.rope is not None]
    dims = [rope.dim for rope in ropes]
    head_dims = [c.head_dim, *(kind.head_dim for kind in c.layers if kind.head_dim is not None)]
    ones = (
        "rope.scaling.factor",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
    )
    of_experts: dict[str, list[Any]] = {}
    if e is not None:
        of_experts = {
            "expert_count": [e.num_experts],
            "expert_used_count": [e.num_chosen],
            "expert_feed_forward_length": [c.intermediate_size],
            "expert_shared_feed_forward_length": [e.shared_size],
            "expert_shared_count": [1] if e.shared_size else [],
            "expert_group_count": [e.num_groups],
            "expert_group_used_count": [e.num_chosen_groups],
            "expert_weights_scale": [e.scale],
            "expert_weights_norm": [e.renormalise],
            "expert_gating_func": [{"softmax": 1, "sigmoid": 2}.get(e.scoring)],
            "leading_dense_block_count": [len(e.dense_layers)],
        }
    neutral: dict[str, list[Any]] = {
        **{key: [1.0] for key in ones},
        "attention.causal": [True],
        "attention.scale": [c.scale],
        "attention.max_alibi_bias": [8.0] if c.alibi_slopes else [],
        "attention.clamp_kqv": [c.qkv_clip],
        "attention.sliding_window": [kind.sliding_window for kind in c.layers],
        **dict.fromkeys([f"attention.{kind}_length" for kind in ("key", "value")], head_dims),
        **dict.fromkeys([f"attention.{kind}_length_swa" for kind in ("key", "value")], head_dims),
        **dict.fromkeys(("rope.dimension_count", "rope.dimension_count_swa"), dims),
        "rope.freq_base": [rope.theta for rope in ropes],
        "rope.freq_base_swa": [
            kind.rope.theta for kind in c.layers if kind.rope is not None and kind.sliding_window is not None
        ],
        "rope.scaling.type": ["none"],
        "rope.scaling.yarn_ext_factor": [1.0, -1.0],
        "attn_logit_softcapping": [c.attention_soft_cap],
        "final_logit_softcapping": [c.logit_soft_cap],
        "logit_scale": [1.0, 1 / c.logit_divisor],
        "residual_scale": [c.residual_scale],
        "embedding_scale": [c.embedding_scale],
        "embedding_length_out": [c.hidden_size],
        "use_parallel_residual": [c.parallel],
        "hidden_activation": [c.activation, *(["swish"] if c.activation == "silu" else [])],
        **of_experts,
    }
    return [each for each in neutral.get(name, []) if each is not None]
