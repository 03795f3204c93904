"""Nemotron-H: layers of one part each, which is Mamba-2, attention, a feed-forward part or experts."""

from jaxpaged.checks import check
from jaxpaged.models.config import Experts, LayerKind, ModelConfig
from jaxpaged.models.families import llama, mamba_fields
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.mixers.mamba2 import Mamba2
from jaxpaged.models.names import BY_CHANNEL, Names

MIXER = f"{llama.LAYER}.mixer"
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
KINDS = {
    "linear_attention": LayerKind(attends=False, has_state=True, feeds=False),
    "full_attention": LayerKind(feeds=False),
    "mlp": LayerKind(attends=False),
    "moe": LayerKind(attends=False),
}


def read_nemotron_h(f: Fields) -> ModelConfig:
    """Read Nemotron-H. Its attention has no RoPE, whatever a file says of one.

    Time steps are limited by `time_step_limit` alone, as the authors' kernels do it. transformers also takes
    `time_step_min` for a lower limit, in prompts and not in answers.
    """
    types = _types(f)
    f.alias(layer_norm_epsilon="rms_norm_eps", head_dim="attention_head_dim")
    same = llama.common(f) | {
        "norm_eps": f.positive("layer_norm_epsilon", 1e-5),
        "activation": f.activation("mlp_hidden_act", "relu2"),
    }
    f.only("attention_bias", False)
    f.only("residual_in_fp32", False)
    f.only("mamba_hidden_act", "silu")
    f.only("sliding_window", None)
    for name in ("partial_rotary_factor", "num_nextn_predict_layers"):
        f.get(name)
    for name in ("n_routed_experts", "n_shared_experts", "routed_scaling_factor", "n_group"):
        f.get(name)  # files without experts have them, too
    experts, width = None, same["intermediate_size"]
    if "moe" in types:
        dense = tuple(i for i, kind in enumerate(types) if kind == "mlp")
        experts = _experts(f, dense, width)
        width = f.size("moe_intermediate_size")
    return ModelConfig(
        **same | {"intermediate_size": width},
        layers=tuple(KINDS[kind] for kind in types),
        mixer=_mixer(f) if "linear_attention" in types else None,
        gated=False,
        mlp_bias=f.flag("mlp_bias"),
        experts=experts,
    )


def _types(f: Fields) -> list[str]:
    """Read the types of layers: a letter each in `hybrid_override_pattern`, or a list of words."""
    f.alias(layers_block_type="layer_types")
    pattern, words = f.get("hybrid_override_pattern"), f.get("layers_block_type")
    if words is not None:
        is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
        types = [OLD_TYPES.get(word, word) for word in words] if is_list else []
        rule = f"a list of {', '.join(map(repr, KINDS))}"
        check("model config: layers_block_type", words, rule, bool(types) and {*types} <= {*KINDS})
        return types
    rule = f"letters of {''.join(LETTERS)!r}, one for each layer"
    ok = isinstance(pattern, str) and bool(pattern) and {*pattern} <= {*LETTERS}
    check("model config: hybrid_override_pattern", pattern, rule, ok)
    return [LETTERS[letter] for letter in str(pattern)]


def _mixer(f: Fields) -> Mamba2:
    return mamba_fields.read_plain(
        f,
        num_heads=f.size("mamba_num_heads", 128),
        head_dim=f.size("mamba_head_dim", 64),
        state_size=f.size("ssm_state_size", 128),
        num_groups=f.size("n_groups", 8),
    )


def _experts(f: Fields, dense: tuple[int, ...], width: int) -> Experts:
    f.only("n_shared_experts", 1)
    return Experts(
        num_experts=f.size("n_routed_experts", 8),
        num_chosen=f.size("num_experts_per_tok", 2),
        renormalise=f.flag("norm_topk_prob", True),
        scoring="sigmoid",
        correction=True,
        num_groups=f.size("n_group", 1),
        num_chosen_groups=f.size("topk_group", 1),
        scale=f.positive("routed_scaling_factor", 1.0),
        shared_size=f.size("moe_shared_expert_intermediate_size", 7688),
        latent_size=f.count("moe_latent_size", 0),
        dense_layers=dense,
        dense_size=width if dense else 0,
    )


NAMES = Names(
    table={
        "embedding": "model.embeddings",
        "norm": "model.norm_f",
        "lm_head": "lm_head",
        "attention_norm": f"{llama.LAYER}.norm",
        "mlp_norm": f"{llama.LAYER}.norm",
        "qkv": tuple(f"{MIXER}.{x}_proj" for x in "qkv"),
        "o": f"{MIXER}.o_proj",
        **mamba_fields.table(MIXER),
        "up": f"{MIXER}.up_proj",
        "down": f"{MIXER}.down_proj",
        "router": f"{MIXER}.gate",
        "correction": f"{MIXER}.gate.e_score_correction_bias",
        "experts.up": f"{MIXER}.experts.{{expert}}.up_proj",
        "experts.down": f"{MIXER}.experts.{{expert}}.down_proj",
        "shared.up": f"{MIXER}.shared_experts.up_proj",
        "shared.down": f"{MIXER}.shared_experts.down_proj",
        "experts_in": f"{MIXER}.fc1_latent_proj",
        "experts_out": f"{MIXER}.fc2_latent_proj",
    },
    forms={"mixer.conv.weight": BY_CHANNEL},
    inside=(("backbone.", "model."),),
    ignored=("mtp.",),
)
NEMOTRON_H = Family(
    model_type="nemotron_h",
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3",
    read=read_nemotron_h,
    names=lambda config: NAMES,
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "moe_intermediate_size": 7688,
    },
)
