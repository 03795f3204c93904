"""RoPE by kinds of layers, as newer configs have it: a JSON object with one for each."""

from collections.abc import Mapping
from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.models.fields import Fields
from jaxpaged.models.ropes import Rope

SLIDING, FULL = "sliding_attention", "full_attention"


def read(f: Fields, head_dim: int, **defaults: Mapping[str, Any]) -> list[Rope]:
    """Return RoPE of layers with a window, and of those that see all.

    defaults: by kind, what holds where the file has none of its own.
    """
    given = f.get("rope_parameters") or defaults
    ropes = []
    for kind in (SLIDING, FULL):
        parameters = given.get(kind, defaults[kind]) if isinstance(given, Mapping) else None
        name = f"rope_parameters.{kind}"
        if not isinstance(parameters, Mapping):
            raise InputError(f"model config: {name}={shown(parameters)} must be a JSON object")
        ropes.append(f.rope_of(name, parameters, defaults[kind], head_dim, is_partial=True))
    return ropes
