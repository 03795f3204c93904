"""Llama but for a flag or a kind of layer, such as Seed-OSS, Helium, Ministral, Hunyuan and ERNIE 4.5."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpaged.checks import check, checked_number
from jaxpaged.models.config import LayerKind, ModelConfig, uniform
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names
from jaxpaged.models.ropes import Rope, Temperature

PAIRED = Names(table=llama.TABLE, forms=llama.PAIRS | llama.PAIRED_NORMS)  # whose RoPE turns neighbours
UNGATED = Names(table=llama.TABLE | {"up": f"{llama.LAYER}.mlp.up_proj"})
HUNYUAN_NAMES = Names(
    table=llama.TABLE
    | {
        "q_norm": f"{llama.LAYER}.self_attn.query_layernorm",
        "k_norm": f"{llama.LAYER}.self_attn.key_layernorm",
    }
)
MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def read_seed_oss(f: Fields) -> ModelConfig:
    """Read Llama with biases of queries, keys and values, and others of the output."""
    same = llama.common(f)
    return ModelConfig(
        **same,
        qkv_bias=f.flag("attention_bias", True),
        o_bias=f.flag("attention_out_bias"),
        mlp_bias=f.flag("mlp_bias"),
        layers=uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"])),
    )


def read_helium(f: Fields) -> ModelConfig:
    """Read Llama whose RoPE turns neighbouring coordinates; its attention has no bias of the output."""
    config = _uniform(f)
    return dataclasses.replace(config, o_bias=False)


def read_ernie(f: Fields) -> ModelConfig:
    """Read Llama whose RoPE turns neighbouring coordinates, with one flag for all biases."""
    same, bias = llama.common(f), f.flag("use_bias")
    layers = uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"]))
    return ModelConfig(**same, qkv_bias=bias, o_bias=bias, mlp_bias=bias, layers=layers)


def _uniform(f: Fields, **more: Any) -> ModelConfig:
    same = llama.common(f)
    layers = uniform(f.size("num_hidden_layers"), rope=f.rope(same["head_dim"]))
    return ModelConfig(**same, **llama.biases(f), **more, layers=layers)


def read_ministral(f: Fields) -> ModelConfig:
    """Read Mistral with a window in some layers."""
    same = llama.common(f)
    window = None if f.is_null("sliding_window") else f.get("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = _windowed(f, f.rope(same["head_dim"]), window, [kind] * f.size("num_hidden_layers"))
    return ModelConfig(**same, layers=kinds)


def read_ministral3(f: Fields) -> ModelConfig:
    """Read Mistral whose queries grow with the position, and whose RoPE is scaled."""
    same, parameters = llama.common(f), f.get("rope_parameters")
    rope = f.rope(same["head_dim"])
    said = parameters if isinstance(parameters, Mapping) else {}
    given = Fields(said)
    every = given.size("original_max_position_embeddings", same["max_model_len"])
    beta = checked_number(
        "model config: llama_4_scaling_beta", given.get("llama_4_scaling_beta", 0.0), "a number >= 0", 0
    )
    temperature = Temperature(every=every, scale=beta, offset=0) if beta else None
    kind = LayerKind(rope=rope, sliding_window=f.get("sliding_window"), temperature=temperature)
    return ModelConfig(**same, layers=(kind,) * f.size("num_hidden_layers"))


def read_internlm3(f: Fields) -> ModelConfig:
    """Read Llama with flags of biases by other names."""
    f.alias(attention_bias="qkv_bias", mlp_bias="bias")
    biases = f.flag("attention_bias"), f.flag("mlp_bias")
    check("model config: qkv_bias", biases[0], f"{biases[1]}, as bias is", biases[0] == biases[1])
    return _uniform(f)


def read_iquest(f: Fields) -> ModelConfig:
    f.only("use_sliding_window", False)
    f.only("clip_qkv")
    return _uniform(f)


def read_cwm(f: Fields) -> ModelConfig:
    """Read Llama with a window in three of four layers."""
    same, num_layers = llama.common(f), f.size("num_hidden_layers")
    types = ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers)]
    kinds = _windowed(f, f.rope(same["head_dim"]), f.size("sliding_window", 8192), types)
    return ModelConfig(**same, mlp_bias=f.flag("mlp_bias"), layers=kinds)


def _windowed(f: Fields, rope: Rope, window: Any, types: list[str]) -> tuple[LayerKind, ...]:
    """Return layers with the same RoPE, a window in some."""
    return f.layer_kinds(
        types, sliding=LayerKind(rope=rope, sliding_window=window), full=LayerKind(rope=rope)
    )


def read_arcee(f: Fields) -> ModelConfig:
    """Read Llama without a gate."""
    return _uniform(f, gated=False)


def read_hunyuan(f: Fields) -> ModelConfig:
    """Read Llama with norms of each head's queries and keys, after RoPE.

    A "dynamic" RoPE with an alpha is one of another base, the same at all lengths.
    """
    same = llama.common(f)
    head_dim = same["head_dim"]
    name = "rope_parameters" if f.get("rope_parameters") else "rope_scaling"
    said = f.get(name) or {}
    alpha = None
    if isinstance(said, Mapping) and said.get("alpha") is not None:
        kind = said.get("rope_type", said.get("type"))
        check("model config: rope_type", kind, "'dynamic' with an alpha", kind == "dynamic")
        given = Fields(said)
        alpha = given.positive("alpha")
        given.only("factor", 1)
        for each in ("mscale", "mscale_all_dim"):
            given.only(each, 0, 1)
        said = {key: value for key, value in said.items() if key not in ("rope_type", "type")}
    rope = f.rope_of(name, said, {"rope_theta": f.get("rope_theta", 10000.0)}, head_dim)
    if alpha is not None:
        rope = dataclasses.replace(rope, theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))
    bias = f.flag("attention_bias")
    f.only("use_qk_norm", True)
    f.only("use_cla", False)
    return ModelConfig(
        **same,
        qk_norm="head",
        norm_after_rope=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=f.flag("mlp_bias"),
        layers=uniform(f.size("num_hidden_layers"), rope=rope),
    )


SEED_OSS = Family(
    model_type="seed_oss",
    models="Seed-OSS 36B",
    read=read_seed_oss,
    names=llama.names,
    defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128},
    gguf=(Gguf(architecture="seed_oss", names={"mlp_norm": "blk.{layer}.post_attention_norm"}),),
)
HELIUM = Family(
    model_type="helium",
    models="Helium 1",
    read=read_helium,
    names=lambda config: PAIRED,
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
    },
)
ERNIE4_5 = Family(
    model_type="ernie4_5",
    models="ERNIE 4.5 dense",
    read=read_ernie,
    names=lambda config: PAIRED,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    gguf=(Gguf(architecture="ernie4_5", forms=llama.PAIRS),),
)
MINISTRAL = Family(
    model_type="ministral",
    models="Ministral 8B",
    read=read_ministral,
    names=llama.names,
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
)
MINISTRAL3 = Family(
    model_type="ministral3",
    models="Ministral 3 3B, 8B, 14B",
    read=read_ministral3,
    names=llama.names,
    defaults={
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_parameters": MINISTRAL3_ROPE,
    },
)
INTERNLM3 = Family(
    model_type="internlm3",
    models="InternLM 3 8B",
    read=read_internlm3,
    names=llama.names,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
)
IQUESTCODER = Family(
    model_type="iquestcoder",
    models="IQuest-Coder 40B",
    read=read_iquest,
    names=llama.names,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
)
CWM = Family(
    model_type="cwm",
    models="CWM 32B",
    read=read_cwm,
    names=llama.names,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "rope_parameters": CWM_ROPE,
    },
)
ARCEE = Family(
    model_type="arcee",
    models="Arcee AFM 4.5B",
    read=read_arcee,
    names=lambda config: UNGATED,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    gguf=(Gguf(architecture="arcee", forms=llama.PAIRS, fields=lambda read: {"hidden_act": "relu2"}),),
)
HUNYUAN = Family(
    model_type="hunyuan_v1_dense",
    models="Hunyuan dense, 0.5B to 7B",
    read=read_hunyuan,
    names=lambda config: HUNYUAN_NAMES,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    gguf=(Gguf(architecture="hunyuan-dense"),),
)
