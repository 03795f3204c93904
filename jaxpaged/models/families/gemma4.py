"""Gemma 4, the text part: heads of two widths, inputs of each layer, and last layers that share K and V.

Layers that see all tokens have wider heads, and maybe fewer of them for keys and values. The decoder has one
width for all: that of the widest layer. Weights of the others are padded when they are read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, check, checked_int, shown
from jaxpaged.models.config import Experts, InputTable, LayerKind, ModelConfig
from jaxpaged.models.families import gemma, gemma3n, llama
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import FormOfLayers, Names, Pieces, Stored
from jaxpaged.models.ropes import ProportionalScaling, Rope

LAYER = llama.LAYER
TABLE = gemma3n.TABLE | {"layer_scale": f"{LAYER}.layer_scalar"}
# Experts stand beside a dense part. Each tensor has those of a layer side by side.
MOE = TABLE | {
    "shared.gate_up": TABLE["gate_up"],
    "shared.down": TABLE["down"],
    "router": f"{LAYER}.router.proj",
    "router_norm.weight": f"{LAYER}.router.scale",
    "expert_scale": f"{LAYER}.router.per_expert_scale",
    "experts.gate_up.weight": f"{LAYER}.experts.gate_up_proj",
    "experts.down.weight": f"{LAYER}.experts.down_proj",
    "experts_norm": f"{LAYER}.pre_feedforward_layernorm_2",
    "experts_out_norm": f"{LAYER}.post_feedforward_layernorm_2",
    "shared_out_norm": f"{LAYER}.post_feedforward_layernorm_1",
}
FULL, SLIDING = "full_attention", "sliding_attention"
PATTERN = 6  # the last of so many layers sees all tokens
MOST_DIGITS = 10  # of a layer's number
GLOBAL_PART = 0.25  # share of coordinates that turn where all tokens are seen


def names(config: ModelConfig) -> Names:
    """Return the names. K and V of layers that share them are ignored."""
    return Names(table=MOE if config.experts else TABLE, ignored=gemma3n.unused(config), of_layers=PADDED)


def read_gemma4(f: Fields) -> ModelConfig:
    f.only("attention_bias", False)
    f.only("use_bidirectional_attention", "vision")  # of images; text is causal
    types = _types(f)
    same, wide = gemma.common(f), _wide(f, types)
    shared = f.count("num_kv_shared_layers", 0)
    doubled = f.flag("use_double_wide_mlp") and shared > 0
    experts = _experts(f, same["intermediate_size"]) if f.flag("enable_moe_block") else None
    if experts is not None:
        f.only("use_double_wide_mlp", False)
        same["intermediate_size"] = f.size("moe_intermediate_size")
    width, width_of_inputs = same["intermediate_size"], f.count("hidden_size_per_layer_input", 256)
    vocab_of_inputs = f.count("vocab_size_per_layer_input", 262144) or 1  # none where there are no inputs
    sizes = {"head_dim": same["head_dim"], "num_kv_heads": same["num_kv_heads"]}
    largest = {name: max(sizes[name], wide[name]) for name in sizes}
    kinds = {
        SLIDING: _kind(sizes, largest, rope=_rope(f, SLIDING, sizes["head_dim"])),
        FULL: _kind(wide, largest, rope=_rope(f, FULL, wide["head_dim"])),
    }
    sliding = dataclasses.replace(kinds[SLIDING], sliding_window=f.size("sliding_window", 512))
    full = dataclasses.replace(kinds[FULL], v_is_k=f.flag("attention_k_eq_v"))
    layers = gemma3n.sharing(f.layer_kinds(types, sliding=sliding, full=full), shared)
    if doubled:
        layers = tuple(
            dataclasses.replace(kind, intermediate_size=width) if kind.shares_kv is None else kind
            for kind in layers
        )
    return ModelConfig(
        **same | largest | {"norm_offset": 0.0, "intermediate_size": width * (2 if doubled else 1)},
        norm_place="both",
        qk_norm="head",
        v_norm=True,
        attention_scale=1.0,
        logit_soft_cap=f.get("final_logit_softcapping"),
        layer_inputs=InputTable(width=width_of_inputs, vocab_size=vocab_of_inputs)
        if width_of_inputs
        else None,
        layer_scale=True,
        experts=experts,
        layers=layers,
    )


def _experts(f: Fields, dense_size: int) -> Experts:
    return Experts(
        num_experts=f.size("num_experts"),
        num_chosen=f.size("top_k_experts"),
        renormalise=True,
        shared_size=dense_size,
        beside=True,
    )


def _types(f: Fields) -> list[Any]:
    """Return the layers' types as the file says them, or by default; the last layer sees all tokens."""
    num_layers = f.size("num_hidden_layers")
    types = [SLIDING if (i + 1) % PATTERN else FULL for i in range(num_layers)]
    given = f.get("layer_types", types)
    check("model config: layer_types", given, f"a list of {num_layers}", isinstance(given, list))
    last = given[-1] if given else None
    check("model config: layer_types", last, f"{FULL!r} for the last layer", last == FULL or given is types)
    return [*types[:-1], FULL]


def _wide(f: Fields, types: Sequence[Any]) -> dict[str, int]:
    """Read `head_dim` and `num_kv_heads` of the layers that see all tokens: by name, or layer by layer."""
    types, kv_heads = f.get("layer_types", types), f.size("num_key_value_heads")
    its_own = f.get("num_global_key_value_heads") if f.flag("attention_k_eq_v") else None
    default = {"head_dim": f.size("global_head_dim", 512), "num_key_value_heads": its_own or kv_heads}
    given = f.get("per_layer_config")
    if given is not None:
        same = {"head_dim": f.size("head_dim", 256), "num_key_value_heads": kv_heads}
        rule = f"a JSON object with the same head_dim and num_key_value_heads for each {FULL} layer"
        by_layer = _by_layer(given, len(types))
        ok = by_layer is not None and all(set(given_sizes) <= set(same) for given_sizes in by_layer.values())
        sizes_of_layers = (
            [(kind, {**same, **by_layer.get(i, {})}) for i, kind in enumerate(types)] if by_layer else []
        )
        full = [sizes for kind, sizes in sizes_of_layers if kind == FULL] or [same]
        ok = ok and all(sizes == (full[0] if kind == FULL else same) for kind, sizes in sizes_of_layers)
        check("model config: per_layer_config", given, rule, ok)
        default = full[0]
    sizes = {
        name: checked_int(f"model config: {name} of {FULL} layers", value, "an int >= 1", 1)
        for name, value in default.items()
    }
    return {"head_dim": sizes["head_dim"], "num_kv_heads": sizes["num_key_value_heads"]}


def _by_layer(given: object, num_layers: int) -> dict[int, Mapping[str, Any]] | None:
    """Return what `per_layer_config` says of each layer; None if it is of another form.

    Keys are numbers of layers, which transformers fills with zeros to the same width.
    """
    if not isinstance(given, Mapping) or not all(
        isinstance(given_sizes, Mapping) for given_sizes in given.values()
    ):
        return None
    sizes_of_layer = {
        int(key): given_sizes
        for key, given_sizes in given.items()
        if key.isdecimal() and len(key) < MOST_DIGITS
    }
    return (
        sizes_of_layer
        if len(sizes_of_layer) == len(given) and all(i < num_layers for i in sizes_of_layer)
        else None
    )


def _kind(sizes: Mapping[str, int], largest: Mapping[str, int], *, rope: Rope) -> LayerKind:
    """Return a kind of layer, with the sizes in which it has less than others."""
    less = {name: size if size < largest[name] else None for name, size in sizes.items()}
    return LayerKind(rope=rope, head_dim=less["head_dim"], num_kv_heads=less["num_kv_heads"])


def _rope(f: Fields, kind: str, head_dim: int) -> Rope:
    """Read the RoPE of layers of a type. A proportional one turns some pairs of all coordinates."""
    given = f.get("rope_parameters") or {}
    said = given.get(kind) if isinstance(given, Mapping) else None
    name = f"rope_parameters.{kind}"
    if given and not isinstance(said, Mapping):
        raise InputError(f"model config: {name}={shown(said)} must be a JSON object")
    default: dict[str, Any] = {"rope_theta": gemma.LOCAL_THETA}
    if kind == FULL:
        proportional = {"rope_type": "proportional", "partial_rotary_factor": GLOBAL_PART}
        default = {"rope_theta": gemma.GLOBAL_THETA, **({} if said else proportional)}
    rope_fields = Fields(said or {}, default)
    if rope_fields.get("rope_type", "default") != "proportional":
        return f.rope_of(name, said or {}, default, head_dim)
    part, factor = rope_fields.positive("partial_rotary_factor", 1.0), rope_fields.positive("factor", 1.0)
    check(f"model config: {name}.partial_rotary_factor", part, "a number in (0, 1]", part <= 1)
    pairs = int(part * head_dim // 2)
    return Rope(
        theta=rope_fields.positive("rope_theta"),
        dim=head_dim,
        scaling=ProportionalScaling(num_pairs=pairs, factor=factor),
    )


def _axes(config: ModelConfig, role: str, layer: int) -> list[list[tuple[int, int, int, int]]]:
    """Return how a role's tensors differ in a layer: for each of them (axis, units, size, full size).

    Along the axis lie so many units, such as heads, each of a size in the file and a full size in the
    decoder.
    """
    c, kind = config, config.layers[layer]
    kv_heads, head_dim = c.heads_of(layer)
    stem, _, ending = role.rpartition(".")
    mlp = (1, kind.intermediate_size or c.intermediate_size, c.intermediate_size)
    q, kv = (c.num_q_heads, head_dim, c.head_dim), (kv_heads, head_dim, c.head_dim)
    if ending != "weight":
        return []
    return {
        "qkv": [[(0, *q)], [(0, *kv)], [(0, *kv)]],
        "q": [[(0, *q)]],
        "o": [[(1, *q)]],
        "q_norm": [[(0, 1, head_dim, c.head_dim)]],
        "k_norm": [[(0, 1, head_dim, c.head_dim)]],
        "gate_up": [[(0, *mlp)]] * 2,
        "down": [[(1, *mlp)]],
    }.get(stem, [])


def _stored(config: ModelConfig, role: str, layer: int, tensors: Stored) -> Stored:
    """Return a layer's tensors as they are in the file. Values may be the keys' product."""
    stored = list(tensors)
    for i, axes in enumerate(_axes(config, role, layer)):
        name, shape = stored[i]
        for axis, units, size, _ in axes:
            shape = (*shape[:axis], units * size, *shape[axis + 1 :])
        stored[i] = name, shape
    if role == "qkv.weight" and config.layers[layer].v_is_k:
        stored[2] = stored[1]
    return stored


def _restored(config: ModelConfig, role: str, layer: int, pieces: Pieces) -> Pieces:
    """Return a layer's pieces as wide as the widest layer's: padded with zeros, KV heads repeated."""
    restored = list(pieces)
    for i, axes in enumerate(_axes(config, role, layer)):
        for axis, units, size, full in axes:
            restored[i] = _padded(restored[i], axis, units, size, full)
    times = config.num_kv_heads // config.heads_of(layer)[0]
    if role == "qkv.weight" and times > 1:
        restored[1:] = [_repeated(piece, config.head_dim, times) for piece in restored[1:]]
    return restored


def _padded(x: np.ndarray, axis: int, units: int, size: int, full: int) -> np.ndarray:
    if size == full:
        return x
    before, behind = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, units, size, *behind)
    pad = [(0, 0)] * x.ndim
    pad[axis + 1] = (0, full - size)
    return np.pad(x, pad).reshape(*before, units * full, *behind)


def _repeated(x: np.ndarray, head_dim: int, times: int) -> np.ndarray:
    rest = x.shape[1:]
    return np.repeat(x.reshape(-1, head_dim, *rest), times, axis=0).reshape(-1, *rest)


PADDED = FormOfLayers(_stored, _restored)
GEMMA4 = Family(
    model_type="gemma4_text",
    models="Gemma 4 E2B, E4B, 26B-A4B and 31B, text only",
    read=read_gemma4,
    names=names,
    defaults={"tie_word_embeddings": True, "head_dim": 256, "max_position_embeddings": 131072},
)
