"""Granite with windows and sinks, dense and of experts, and Granite 4 with and without states."""

import dataclasses
from typing import Any

from jaxpaged.checks import check, checked_number
from jaxpaged.models.config import STATE, LayerKind, ModelConfig
from jaxpaged.models.families import granite_moe, llama, mamba_fields
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import BY_CHANNEL, Names

SINKS: dict[str, str | tuple[str, ...]] = {"sinks": f"{llama.LAYER}.self_attn.sinks"}
SHARED = f"{llama.LAYER}.shared_mlp"
DENSE = Names(table=llama.TABLE | {"gate_up": f"{SHARED}.input_linear", "down": f"{SHARED}.output_linear"})

MOE = f"{llama.LAYER}.block_sparse_moe"
MOE_TABLE = {
    **granite_moe.NAMES.table,
    **SINKS,
    "router": f"{MOE}.router",
    "experts.gate_up.weight": f"{MOE}.experts.gate_up_proj",
    "experts.down.weight": f"{MOE}.experts.down_proj",
}


def read_granite_swa(f: Fields) -> ModelConfig:
    """Read Granite with sinks, and a window in three of four layers; each may have a RoPE of its own."""
    return _windowed(f, llama.read_granite(f))


def read_granitemoe_swa(f: Fields) -> ModelConfig:
    return _windowed(f, granite_moe.read_granitemoeshared(f))


def _windowed(f: Fields, config: ModelConfig) -> ModelConfig:
    num_layers, rope = config.num_layers, config.layers[0].rope
    assert rope is not None
    types = ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers)]
    sliding = LayerKind(rope=rope, sliding_window=f.size("sliding_window", 128))
    layers = f.layer_kinds(types, sliding=sliding, full=LayerKind(rope=rope))
    thetas = f.get("layer_rope_theta") or [rope.theta] * num_layers
    rule = "a list of numbers >= 0, one for each layer; 0: without RoPE"
    ok = isinstance(thetas, list) and len(thetas) == num_layers
    check("model config: layer_rope_theta", thetas, rule, ok)
    thetas = [checked_number("model config: layer_rope_theta", theta, rule, 0) for theta in thetas]
    layers = tuple(
        dataclasses.replace(kind, rope=dataclasses.replace(rope, theta=theta) if theta else None)
        for kind, theta in zip(layers, thetas, strict=True)
    )
    return dataclasses.replace(config, sinks=True, layers=layers)


def read_granitemoehybrid(f: Fields) -> ModelConfig:
    """Read Granite 4: Mamba-2 in most layers, or attention alone."""
    num_layers = f.size("num_hidden_layers")
    f.alias(layer_types="layers_block_type")
    types = f.get("layer_types", ["mamba"] * num_layers)
    states = ("mamba", "linear_attention")
    known = ("attention", "full_attention", *states)
    ok = isinstance(types, list) and len(types) == num_layers and all(each in known for each in types)
    check("model config: layer_types", types, "'mamba' or 'attention' for each layer", ok)
    position = f.get("position_embedding_type", "nope")
    check("model config: position_embedding_type", position, "'rope' or 'nope'", position in ("rope", "nope"))
    width = f.size("shared_intermediate_size", 1024)
    if f.count("num_local_experts", 8):
        config = granite_moe.read_granitemoeshared(f)
    else:
        config = dataclasses.replace(llama.read_granite(f), intermediate_size=width)
    full = config.layers[0] if position == "rope" else LayerKind()
    layers = tuple(STATE if each in states else full for each in types)
    has_states = STATE in layers
    return dataclasses.replace(config, layers=layers, mixer=mamba_fields.read(f) if has_states else None)


MAMBA = f"{llama.LAYER}.mamba"


def _hybrid_names(config: ModelConfig) -> Names:
    names = DENSE if config.experts is None else granite_moe.NAMES
    forms = {**names.forms, "mixer.conv.weight": BY_CHANNEL}
    return dataclasses.replace(names, table={**names.table, **mamba_fields.table(MAMBA)}, forms=forms)


_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
GRANITE_SWA = Family(
    model_type="granite_swa",
    models="Granite with windows and sinks",
    read=read_granite_swa,
    names=lambda config: Names(table=llama.TABLE | SINKS),
    defaults=_DEFAULTS,
)
GRANITEMOE_SWA = Family(
    model_type="granitemoe_swa",
    models="Granite of experts with windows and sinks",
    read=read_granitemoe_swa,
    names=lambda config: Names(table=MOE_TABLE),
    defaults={"max_position_embeddings": 2048},
)
GRANITEMOEHYBRID = Family(
    model_type="granitemoehybrid",
    models="Granite 4.0, with states and of attention alone",
    read=read_granitemoehybrid,
    names=_hybrid_names,
    defaults={"max_position_embeddings": 2048},
)
