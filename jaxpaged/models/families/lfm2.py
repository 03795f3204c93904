"""LFM2: short convolutions, and attention in some layers."""

import dataclasses

from jaxpaged.models.config import STATE, Experts, LayerKind, ModelConfig
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.mixers.short_convolution import ShortConvolution
from jaxpaged.models.names import BY_CHANNEL, Names

MIXER, ATTENTION = f"{llama.LAYER}.conv", f"{llama.LAYER}.self_attn"
MLP = f"{llama.LAYER}.feed_forward"


def read_lfm2(f: Fields) -> ModelConfig:
    """Read LFM2. A width of the feed-forward part is two thirds of what is said, rounded up, if asked for."""
    f.alias(intermediate_size="block_ff_dim", tie_word_embeddings="tie_embedding")
    width = f.size("intermediate_size")
    every, factor = f.size("block_multiple_of", 256), f.get("block_ffn_dim_multiplier", 1.0)
    if f.flag("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if factor is not None:
            width = -(-int(factor * width) // every) * every
    return _lfm2(f, width)


def read_lfm2_moe(f: Fields) -> ModelConfig:
    """Read LFM2 with experts, behind some dense layers."""
    f.alias(tie_word_embeddings="tie_embedding")
    config = _lfm2(f, f.size("moe_intermediate_size", 1792))
    num_dense = f.count("num_dense_layers", 2)
    experts = Experts(
        num_experts=f.size("num_experts", 32),
        num_chosen=f.size("num_experts_per_tok", 4),
        renormalise=f.flag("norm_topk_prob", True),
        scoring="sigmoid",
        correction=f.flag("use_expert_bias", True),
        scale=f.positive("routed_scaling_factor", 1.0),
        dense_layers=tuple(range(num_dense)),
        dense_size=f.size("intermediate_size", 7168) if num_dense else 0,
    )
    return dataclasses.replace(config, experts=experts)


def _lfm2(f: Fields, width: int) -> ModelConfig:
    f.alias(rms_norm_eps="norm_eps")
    same = llama.common(f, width)
    num_layers = f.size("num_hidden_layers")
    attends = f.get("full_attn_idxs")
    attends = range(num_layers) if attends is None else attends
    types = ["full_attention" if i in attends else "conv" for i in range(num_layers)]
    full = LayerKind(rope=f.rope(same["head_dim"], theta=1000000.0))
    layers = f.layer_kinds(types, full=full, others={"conv": STATE})
    mixer = ShortConvolution(
        width=same["hidden_size"], kernel_size=f.size("conv_L_cache", 3), bias=f.flag("conv_bias")
    )
    has_states = any(kind.has_state for kind in layers)
    return ModelConfig(**same, qk_norm="head", layers=layers, mixer=mixer if has_states else None)


_TABLE: dict[str, str | tuple[str, ...]] = {
    **llama.TABLE,
    "norm": "model.embedding_norm",
    "attention_norm": f"{llama.LAYER}.operator_norm",
    "q_norm": f"{ATTENTION}.q_layernorm",
    "k_norm": f"{ATTENTION}.k_layernorm",
    "o": f"{ATTENTION}.out_proj",
    "mlp_norm": f"{llama.LAYER}.ffn_norm",
    "gate_up": (f"{MLP}.w1", f"{MLP}.w3"),
    "down": f"{MLP}.w2",
    "mixer.in": f"{MIXER}.in_proj",
    "mixer.conv": f"{MIXER}.conv",
    "mixer.out": f"{MIXER}.out_proj",
}
NAMES = Names(table=_TABLE, forms={"mixer.conv.weight": BY_CHANNEL})
MOE_NAMES = Names(
    table={
        **_TABLE,
        "router": f"{MLP}.gate",
        "correction": f"{MLP}.expert_bias",
        "experts.gate_up": tuple(f"{MLP}.experts.{{expert}}.{name}" for name in ("w1", "w3")),
        "experts.down": f"{MLP}.experts.{{expert}}.w2",
    },
    forms=NAMES.forms,
)

_DEFAULTS = {
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
LFM2 = Family(
    model_type="lfm2",
    models="LFM2 350M to 2.6B",
    read=read_lfm2,
    names=lambda config: NAMES,
    defaults=_DEFAULTS,
)
LFM2_MOE = Family(
    model_type="lfm2_moe",
    models="LFM2 8B-A1B",
    read=read_lfm2_moe,
    names=lambda config: MOE_NAMES,
    defaults=_DEFAULTS,
)
