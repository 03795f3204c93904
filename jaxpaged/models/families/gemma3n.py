"""Gemma 3n, the text part: AltUp's streams, inputs of each layer, and last layers that share K and V."""

import dataclasses
from typing import Any

from jaxpaged.checks import InputError, check, checked_number, shown
from jaxpaged.models.config import AltUp, InputTable, LayerKind, ModelConfig
from jaxpaged.models.families import gemma, llama
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.names import Names

LAYER = llama.LAYER
TABLE: dict[str, str | tuple[str, ...]] = {
    **gemma.FOUR_NORMS.table,
    "q": f"{LAYER}.self_attn.q_proj",
    "altup_router": f"{LAYER}.altup.modality_router",
    "altup_router_norm": f"{LAYER}.altup.router_norm",
    "altup_predict": f"{LAYER}.altup.prediction_coefs",
    "altup_correct": f"{LAYER}.altup.correction_coefs",
    "altup_scale": f"{LAYER}.altup.correct_output_scale",
    "laurel_left": f"{LAYER}.laurel.linear_left",
    "laurel_right": f"{LAYER}.laurel.linear_right",
    "laurel_norm": f"{LAYER}.laurel.post_laurel_norm",
    "layer_input_gate": f"{LAYER}.per_layer_input_gate",
    "layer_input_out": f"{LAYER}.per_layer_projection",
    "layer_input_norm": f"{LAYER}.post_per_layer_input_norm",
    "layer_inputs_table": "model.embed_tokens_per_layer",
    "layer_inputs_product": "model.per_layer_model_projection",
    "layer_inputs_norm": "model.per_layer_projection_norm",
}
WINDOWED = 5  # the last of so many layers sees all tokens


def names(config: ModelConfig) -> Names:
    """Return the names, with a product for each stream but the first. K and V of no layer are ignored."""
    count = config.altup.num_streams - 1 if config.altup is not None else 0
    table = TABLE | {
        f"altup_{ours}": tuple(f"model.{theirs}.{i}" for i in range(count))
        for ours, theirs in (("begin", "altup_projections"), ("end", "altup_unembed_projections"))
    }
    return Names(table=table, ignored=unused(config))


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Return the beginnings of the names of K and V in layers that share another's."""
    names = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    shared = [layer for layer, kind in enumerate(config.layers) if kind.shares_kv is not None]
    return tuple(f"{LAYER.format(layer=layer)}.self_attn.{name}" for layer in shared for name in names)


def read_gemma3n(f: Fields) -> ModelConfig:
    width, num_layers = _width(f), f.size("num_hidden_layers")
    f.only("altup_active_idx", 0)
    f.get("altup_coef_clip")  # of training
    f.only("use_bidirectional_attention", False)
    same = gemma.common(f, intermediate_size=width)
    return ModelConfig(
        **same | {"norm_offset": 0.0},
        norm_place="both",
        qk_norm="head",
        v_norm=True,
        attention_scale=1.0,
        logit_soft_cap=None if f.is_null(CAP) else f.positive(CAP, 30.0),
        altup=AltUp(
            num_streams=f.size("altup_num_inputs", 4),
            scaled=f.flag("altup_correct_scale", True),
            laurel_rank=f.size("laurel_rank", 64),
        ),
        layer_inputs=InputTable(
            width=f.size("hidden_size_per_layer_input", 256),
            vocab_size=f.size("vocab_size_per_layer_input", 262144),
        ),
        layers=_layers(f, same["head_dim"], num_layers),
    )


CAP = "final_logit_softcapping"


def _width(f: Fields) -> int:
    """Read the width of feed-forward parts: one for all layers, which a list may repeat."""
    value = f.required("intermediate_size")
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        rule = "an int, or the same int for each layer"
        check("model config: intermediate_size", value, rule, len(value) == f.size("num_hidden_layers"))
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(
            f"model config: intermediate_size={shown(value)} must be an int >= 1, or the same for each layer"
        )
    return value


def _layers(f: Fields, head_dim: int, num_layers: int) -> tuple[LayerKind, ...]:
    """Read the layers: windows and RoPEs by type, sparse parts, and whose K and V the last ones share."""
    local, everywhere = gemma.ropes(f, head_dim)
    types = ["sliding_attention" if (i + 1) % WINDOWED else "full_attention" for i in range(num_layers)]
    sliding = LayerKind(rope=local, sliding_window=f.size("sliding_window", 512))
    kinds = f.layer_kinds(types, sliding=sliding, full=LayerKind(rope=everywhere))
    kinds, sparsity = sharing(kinds, f.count("num_kv_shared_layers", 15)), _sparsity(f, num_layers)
    return tuple(dataclasses.replace(kind, sparsity=sparsity[layer]) for layer, kind in enumerate(kinds))


def sharing(kinds: tuple[LayerKind, ...], num_shared: int) -> tuple[LayerKind, ...]:
    """Return layers whose last `num_shared` read K and V of the last earlier layer of their kind."""
    first = len(kinds) - num_shared

    def source(layer: int) -> int | None:
        if not 0 < first <= layer:
            return None
        same = [i for i in range(first) if kinds[i] == kinds[layer]]
        rule = f"so few that a layer like layer {layer} is left with K and V of its own"
        check("model config: num_kv_shared_layers", num_shared, rule, len(same) > 0)
        return same[-1]

    return tuple(dataclasses.replace(kind, shares_kv=source(layer)) for layer, kind in enumerate(kinds))


def _sparsity(f: Fields, num_layers: int) -> list[float]:
    """Read the share of each layer's numbers that are zero: of the first ten of many layers, 95%."""
    sparse = 10 if num_layers > 10 else 0
    value: Any = f.get("activation_sparsity_pattern")
    value = [0.95] * sparse + [0.0] * (num_layers - sparse) if value is None else value
    value = value if isinstance(value, list) else [value] * num_layers
    name, rule = "model config: activation_sparsity_pattern", f"a number in [0, 1) or {num_layers} of them"
    check(name, value, rule, len(value) == num_layers)
    for each in value:
        check(name, value, rule, checked_number(name, each, rule, 0) < 1)
    return [float(each) for each in value]


GEMMA3N = Family(
    model_type="gemma3n_text",
    models="Gemma 3n, text only",
    has_final_length=True,
    read=read_gemma3n,
    names=names,
    defaults={
        "tie_word_embeddings": True,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
    },
)
