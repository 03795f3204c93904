"""EXAONE 4: norms behind attention and feed-forward, and of each head's queries and keys."""

from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.families import llama
from jaxpaged.models.families.family import Family, Gguf, Metadata
from jaxpaged.models.families.olmo import NAMES
from jaxpaged.models.fields import Fields


def read_exaone4(f: Fields) -> ModelConfig:
    """Read EXAONE 4. Where some layers have a window, those that see all know no positions."""
    same = llama.common(f)
    rope = f.rope(same["head_dim"])
    window = None if f.is_null("sliding_window") else f.get("sliding_window", 4096)
    full = LayerKind(rope=rope if window is None else None)
    sliding = LayerKind(rope=rope, sliding_window=window)
    layers = f.layer_kinds(_types(f, window is not None), sliding=sliding, full=full)
    return ModelConfig(**same, norm_place="after", qk_norm="head", layers=layers)


def _types(f: Fields, has_window: bool) -> list[str]:
    """Return the layers' kinds by a pattern: a number, or letters of which L has a window."""
    num_layers, pattern = f.size("num_hidden_layers"), f.get("sliding_window_pattern", 4)
    if not has_window:
        return ["full_attention"] * num_layers
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        letters = [pattern[i % len(pattern)] for i in range(num_layers - 1)] + ["G"]
        return ["sliding_attention" if letter == "L" else "full_attention" for letter in letters]
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise InputError(
            f"model config: sliding_window_pattern={shown(pattern)} must be an int >= 1 or letters L and G"
        )
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]


def _gguf_fields(read: Metadata) -> dict[str, Any]:
    """Return the layers' kinds, of which a file has a list."""
    pattern = read("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {}
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in pattern]}


EXAONE4 = Family(
    model_type="exaone4",
    models="EXAONE 4.0 1.2B, 32B",
    read=read_exaone4,
    names=lambda config: NAMES,
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    gguf=(Gguf(architecture="exaone4", fields=_gguf_fields),),
)
