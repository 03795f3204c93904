"""Falcon-H1: attention and Mamba-2 side by side in each layer, with factors of all parts."""

import dataclasses

from jaxpaged.checks import check, checked_number
from jaxpaged.models.config import Factors, LayerKind, ModelConfig
from jaxpaged.models.families import llama, mamba_fields
from jaxpaged.models.families.bamba import NAMES
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.mixers.mamba2 import Mamba2

SECTIONS = ("z", "x", "B", "C", "dt")


def read_falcon_h1(f: Fields) -> ModelConfig:
    """Read Falcon-H1. The factor of keys is one of attention's scores."""
    same = llama.common(f)
    gate, down = _several(f, "mlp_multipliers", ("gate", "down"))
    scale = same["head_dim"] ** -0.5 * f.positive("key_multiplier", 1.0)
    layer = LayerKind(rope=f.rope(same["head_dim"]), has_state=True)
    return ModelConfig(
        **same,
        **llama.biases(f),
        layers=(layer,) * f.size("num_hidden_layers"),
        mixer=_mixer(f),
        attention_scale=scale,
        embedding_scale=f.positive("embedding_multiplier", 1.0),
        logit_divisor=1 / f.positive("lm_head_multiplier", 1.0),
        factors=Factors(
            attention_in=f.positive("attention_in_multiplier", 1.0),
            attention_out=f.positive("attention_out_multiplier", 1.0),
            gate=gate,
            down=down,
        ),
    )


def _mixer(f: Fields) -> Mamba2:
    width = f.get("mamba_d_ssm")
    width = f.size("mamba_expand", 2) * f.size("hidden_size") if width is None else f.size("mamba_d_ssm")
    is_normed, is_first = f.flag("mamba_rms_norm"), f.flag("mamba_norm_before_gate", True)
    return dataclasses.replace(
        mamba_fields.read(f, width),
        out_bias=f.flag("projectors_bias"),
        norm="none" if not is_normed else "before_gate" if is_first else "after_gate",
        norm_in_float32=True,
        in_scale=f.positive("ssm_in_multiplier", 1.0),
        section_scales=_several(f, "ssm_multipliers", SECTIONS),
        out_scale=f.positive("ssm_out_multiplier", 1.0),
    )


def _several(f: Fields, name: str, of: tuple[str, ...]) -> tuple[float, ...]:
    """Read a factor for each of several things."""
    said = f.get(name, [1.0] * len(of))
    rule = f"a list of numbers > 0, for {', '.join(of)}"
    check(f"model config: {name}", said, rule, isinstance(said, list | tuple) and len(said) == len(of))
    return tuple(checked_number(f"model config: {name}", each, rule, 0, above=True) for each in said)


FALCON_H1 = Family(
    model_type="falcon_h1",
    models="Falcon-H1 0.5B to 34B",
    read=read_falcon_h1,
    names=lambda config: NAMES,
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "mamba_d_ssm": 1024,
    },
)
