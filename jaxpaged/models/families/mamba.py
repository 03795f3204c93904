"""Mamba, Falcon Mamba and Mamba-2: layers of one mixer each, and no attention."""

from typing import Any

from jaxpaged.checks import check
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.families import mamba_fields
from jaxpaged.models.families.family import Family
from jaxpaged.models.fields import Fields
from jaxpaged.models.mixers.mamba1 import Mamba1
from jaxpaged.models.mixers.mamba2 import Mamba2
from jaxpaged.models.names import BY_CHANNEL, Names

LAYER = "backbone.layers.{layer}"
ALONE = LayerKind(attends=False, has_state=True, feeds=False)


def read_mamba(f: Fields) -> ModelConfig:
    """Read Mamba: of the mixer nothing is normed."""
    return _config(f, _mamba1(f))


def read_falcon_mamba(f: Fields) -> ModelConfig:
    """Read Falcon Mamba: time steps, B and C are normed, without weights."""
    return _config(f, _mamba1(f, norms="plain", norm_eps=f.positive("mixer_rms_eps", 1e-6)))


def read_mamba2(f: Fields) -> ModelConfig:
    """Read Mamba-2."""
    num_heads = f.size("num_heads")
    width, head_dim = f.size("expand", 2) * f.size("hidden_size"), f.size("head_dim")
    rule = f"{width} / num_heads={num_heads}"
    check("model config: head_dim", head_dim, rule, head_dim * num_heads == width)
    mixer = mamba_fields.read_plain(
        f,
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=f.size("state_size"),
        num_groups=f.size("n_groups"),
    )
    return _config(f, mixer)


def _mamba1(f: Fields, **more: Any) -> Mamba1:
    return Mamba1(
        width=f.size("intermediate_size", f.size("expand", 2) * f.size("hidden_size")),
        state_size=f.size("state_size", 16),
        dt_rank=mamba_fields.dt_rank(f, "time_step_rank"),
        kernel_size=f.size("conv_kernel", 4),
        conv_bias=f.flag("use_conv_bias", True),
        bias=f.flag("use_bias"),
        **more,
    )


def _config(f: Fields, mixer: Mamba1 | Mamba2) -> ModelConfig:
    """Return a model of such layers alone. There are no heads: a cache has none of their blocks."""
    f.only("hidden_act", "silu")
    f.flag("residual_in_fp32")  # residuals have the model's dtype, as in vLLM
    return ModelConfig(
        vocab_size=f.size("vocab_size"),
        hidden_size=f.size("hidden_size"),
        intermediate_size=0,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_model_len=f.size("max_position_embeddings"),
        norm_eps=f.positive("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=f.flag("tie_word_embeddings"),
        eos_token_ids=f.token_ids(),
        layers=(ALONE,) * f.size("num_hidden_layers"),
        mixer=mixer,
    )


def _names(table: dict[str, str | tuple[str, ...]]) -> Names:
    outside = {"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "lm_head": "lm_head"}
    return Names(
        table={**outside, "attention_norm": f"{LAYER}.norm", **table},
        forms={"mixer.conv.weight": BY_CHANNEL},
        inside=(("backbone.embedding.", "backbone.embeddings."), ("backbone.", "backbone.")),
    )


NAMES = _names(mamba_fields.mamba1_table(f"{LAYER}.mixer"))
NAMES_2 = _names(mamba_fields.table(f"{LAYER}.mixer"))
# Nothing bounds positions: the length is that of training, as far as papers tell it.
_DEFAULTS = {"max_position_embeddings": 2048, "tie_word_embeddings": True}
MAMBA = Family(
    model_type="mamba",
    models="Mamba 130M to 2.8B, in transformers' form",
    read=read_mamba,
    names=lambda config: NAMES,
    defaults=_DEFAULTS | {"eos_token_id": 0},
)
FALCON_MAMBA = Family(
    model_type="falcon_mamba",
    models="Falcon Mamba 7B",
    read=read_falcon_mamba,
    names=lambda config: NAMES,
    defaults=_DEFAULTS | {"max_position_embeddings": 8192, "eos_token_id": 0},
)
MAMBA2 = Family(
    model_type="mamba2",
    models="Mamba-2, Codestral Mamba 7B, in transformers' form",
    read=read_mamba2,
    names=lambda config: NAMES_2,
    defaults=_DEFAULTS
    | {
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    },
)
