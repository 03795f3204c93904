"""DeepSeek V2 and V3, and what has their attention: one latent a token, which all heads read."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpaged.checks import check, checked_number
from jaxpaged.models.config import Experts, LayerKind, ModelConfig
from jaxpaged.models.families import llama, routing
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.latents import Latent
from jaxpaged.models.names import Form, Names, Pieces, Shape
from jaxpaged.models.ropes import Rope, Temperature, YarnScaling


def common(f: Fields, intermediate_size: int | None = None, *, part: bool = False) -> dict[str, Any]:
    """Read what these families have in common, as arguments of `ModelConfig`, but for experts.

    part: whether RoPE's numbers say what part of a head it turns.
    """
    num_heads, hidden_size = f.size("num_attention_heads"), f.size("hidden_size")
    f.only("num_key_value_heads", num_heads)
    f.only("rope_interleave", True)
    latent = Latent(
        q_rank=None if f.is_null("q_lora_rank") else f.size("q_lora_rank"),
        rank=f.size("kv_lora_rank"),
        k_dim=f.size("qk_nope_head_dim"),
        rope_dim=f.size("qk_rope_head_dim"),
        v_dim=f.size("v_head_dim", hidden_size // num_heads),
        bias=f.flag("attention_bias"),
    )
    if part:
        rope = f.rope(latent.head_dim, part=latent.rope_dim / latent.head_dim)
        rule = f"{latent.rope_dim}, qk_rope_head_dim"
        check("model config: the rotated part of a head", rope.dim, rule, rope.dim == latent.rope_dim)
    else:
        rope = f.rope(latent.rope_dim)
    same = llama.common(f, intermediate_size)
    return same | {
        "num_kv_heads": 1,
        "head_dim": latent.width,
        "attention_scale": latent.head_dim**-0.5 * score_factor(rope),
        "o_bias": latent.bias,
        "latent": latent,
        "layers": (LayerKind(rope=rope),) * f.size("num_hidden_layers"),
    }


def score_factor(rope: Rope) -> float:
    """Return what YaRN with `mscale_all_dim` multiplies the scores by."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling) or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


def read_deepseek_v2(f: Fields) -> ModelConfig:
    """Read softmax routing, among all experts or those of the groups with the best expert."""
    same = common(f)
    f.only("scoring_func", "softmax")
    f.only("moe_layer_freq", 1)
    f.only("norm_topk_prob", False)
    method = f.get("topk_method", "greedy")
    names = ("greedy", "group_limited_greedy")
    check("model config: topk_method", method, " or ".join(map(repr, names)), method in names)
    groups, chosen = f.get("n_group"), f.get("topk_group")  # of no account to the greedy choice
    width, first = f.size("moe_intermediate_size"), f.count("first_k_dense_replace", 0)
    limited = method == "group_limited_greedy"
    experts = Experts(
        num_experts=f.size("n_routed_experts"),
        num_chosen=f.size("num_experts_per_tok"),
        renormalise=False,
        num_groups=groups if limited else 1,
        num_chosen_groups=chosen if limited else 1,
        group_best=1,
        scale=f.positive("routed_scaling_factor", 1.0),
        shared_size=width * f.count("n_shared_experts", 0),
        dense_layers=tuple(range(first)),
        dense_size=same["intermediate_size"] if first else 0,
    )
    f.only("mlp_bias", False)
    return ModelConfig(**same | {"intermediate_size": width}, experts=experts)


def read_deepseek_v3(f: Fields) -> ModelConfig:
    """Read sigmoid routing with a correction. Layers that predict further tokens are not read."""
    same = common(f)
    experts, width = routing.read(f, same["intermediate_size"], dense_layers=3)
    f.get("num_nextn_predict_layers")
    return ModelConfig(**same | {"intermediate_size": width}, experts=experts)


def read_glm4_moe_lite(f: Fields) -> ModelConfig:
    """Read V3's form, in which a list says which layers are dense."""
    config = read_deepseek_v3(f)
    assert config.experts is not None
    dense = routing.dense_layers(f, len(config.experts.dense_layers))
    size = f.size("intermediate_size") if dense else 0
    experts = dataclasses.replace(config.experts, dense_layers=dense, dense_size=size)
    return dataclasses.replace(config, experts=experts)


def read_mistral4(f: Fields) -> ModelConfig:
    """Read softmax routing in V3's groups, and queries that grow with the position."""
    f.only("scoring_func", "softmax")
    f.get("topk_method")
    same = common(f, part=True)
    parameters = f.get("rope_parameters")
    given = Fields(parameters if isinstance(parameters, Mapping) else {})
    name = "llama_4_scaling_beta"
    beta = checked_number(f"model config: {name}", given.get(name, 0.0), "a number >= 0", 0)
    every = given.size("original_max_position_embeddings", same["max_model_len"])
    temperature = Temperature(every=every, scale=beta, offset=0) if beta else None
    layers = tuple(dataclasses.replace(kind, temperature=temperature) for kind in same["layers"])
    width, first = f.size("moe_intermediate_size"), f.count("first_k_dense_replace", 0)
    experts = Experts(
        num_experts=f.size("n_routed_experts"),
        num_chosen=f.size("num_experts_per_tok"),
        renormalise=f.flag("norm_topk_prob", True),
        num_groups=f.size("n_group", 1),
        num_chosen_groups=f.size("topk_group", 1),
        scale=f.positive("routed_scaling_factor", 1.0),
        shared_size=width * f.count("n_shared_experts", 0),
        dense_layers=tuple(range(first)),
        dense_size=same["intermediate_size"] if first else 0,
    )
    return ModelConfig(**same | {"intermediate_size": width, "layers": layers}, experts=experts)


def read_minicpm3(f: Fields) -> ModelConfig:
    """Read a dense model with factors of the embedding, the residual and the logits."""
    same = common(f)
    num_layers, hidden_size = f.size("num_hidden_layers"), same["hidden_size"]
    depth = f.positive("scale_depth", math.sqrt(num_layers))
    return ModelConfig(
        **same,
        mlp_bias=f.flag("mlp_bias"),
        embedding_scale=f.positive("scale_emb", 12.0),
        residual_scale=depth / math.sqrt(num_layers),
        logit_divisor=hidden_size / f.positive("dim_model_base", hidden_size),
    )


def _half_apart(values: np.ndarray, width: int, dim: int) -> np.ndarray:
    """Return outputs of heads of `width` with the pairs of the last `dim` half of these apart: files have
    them side by side.
    """
    heads = values.reshape(-1, width, *values.shape[1:])
    plain, pairs = heads[:, :-dim], heads[:, -dim:]
    return np.concatenate([plain, pairs[:, 0::2], pairs[:, 1::2]], axis=1).reshape(values.shape)


def _latent(config: ModelConfig) -> Latent:
    assert config.latent is not None
    return config.latent


def _same_shape(config: ModelConfig, shape: Shape) -> Shape:
    return shape


def _queries(config: ModelConfig, pieces: Pieces) -> Pieces:
    latent = _latent(config)
    return [_half_apart(piece, latent.head_dim, latent.rope_dim) for piece in pieces]


def _entries(config: ModelConfig, pieces: Pieces) -> Pieces:
    latent = _latent(config)
    return [_half_apart(piece, latent.width, latent.rope_dim) for piece in pieces]


def _ups_shape(config: ModelConfig, shape: Shape) -> Shape:
    """Return the shape of the tensor that makes keys and values of latents, head after head."""
    latent = _latent(config)
    return config.num_q_heads * (latent.k_dim + latent.v_dim), latent.rank


def _ups(config: ModelConfig, pieces: Pieces) -> np.ndarray:
    latent = _latent(config)
    return pieces[0].reshape(config.num_q_heads, latent.k_dim + latent.v_dim, latent.rank)


def _k_up(config: ModelConfig, pieces: Pieces) -> Pieces:
    """Return what makes absorbed queries: the transposed of what makes keys."""
    latent = _latent(config)
    return [_ups(config, pieces)[:, : latent.k_dim].swapaxes(1, 2).reshape(-1, latent.k_dim)]


def _v_up(config: ModelConfig, pieces: Pieces) -> Pieces:
    latent = _latent(config)
    return [_ups(config, pieces)[:, latent.k_dim :].reshape(-1, latent.rank)]


ATTENTION = f"{llama.LAYER}.self_attn"
TABLE: dict[str, str | tuple[str, ...]] = {
    "latent.q_a": f"{ATTENTION}.q_a_proj",
    "latent.q_norm": f"{ATTENTION}.q_a_layernorm",
    "latent.kv_a": f"{ATTENTION}.kv_a_proj_with_mqa",
    "latent.kv_norm": f"{ATTENTION}.kv_a_layernorm",
    "latent.k_up": f"{ATTENTION}.kv_b_proj",
    "latent.v_up": f"{ATTENTION}.kv_b_proj",
}
FORMS = {"latent.k_up.weight": Form(_ups_shape, _k_up), "latent.v_up.weight": Form(_ups_shape, _v_up)}
PAIRS = {
    "latent.q.weight": Form(_same_shape, _queries),
    "latent.kv_a.weight": Form(_same_shape, _entries),
    "latent.kv_a.bias": Form(_same_shape, _entries),
}


def _table(config: ModelConfig) -> dict[str, str | tuple[str, ...]]:
    """Return the names of latent attention's weights."""
    q = "q_proj" if _latent(config).q_rank is None else "q_b_proj"
    return TABLE | {"latent.q": f"{ATTENTION}.{q}"}


def names(config: ModelConfig) -> Names:
    """Return the files' names, of models whose files have RoPE's pairs side by side."""
    return Names(table=routing.TABLE | _table(config), forms=FORMS | PAIRS, ignored=routing.beyond(config))


def names_of_halves(config: ModelConfig) -> Names:
    """Return the files' names of dense models, whose files have RoPE's pairs half apart."""
    return Names(table=llama.TABLE | _table(config), forms=FORMS)


_V3 = {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
}
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    models="DeepSeek V2, V2.5, V2-Lite",
    read=read_deepseek_v2,
    names=names,
    defaults={
        "max_position_embeddings": 2048,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1407,
    },
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    models="DeepSeek V3, V3.1, R1",
    read=read_deepseek_v3,
    names=names,
    defaults=_V3,
)
KIMI_K2 = Family(model_type="kimi_k2", models="Kimi K2", read=read_deepseek_v3, names=names, defaults=_V3)
GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    models="GLM-4.7-Flash",
    read=read_glm4_moe_lite,
    names=names,
    defaults={
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "moe_intermediate_size": 1536,
    },
)
MISTRAL4 = Family(
    model_type="mistral4",
    models="Mistral Small 4",
    read=read_mistral4,
    names=names,
    defaults={
        "max_position_embeddings": 1048576,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
    },
)
MINICPM3 = Family(
    model_type="minicpm3",
    models="MiniCPM3 4B",
    read=read_minicpm3,
    names=names_of_halves,
    defaults={
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
)
