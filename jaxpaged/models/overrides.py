"""Overrides of a model's config.json by its user: vLLM's `hf_overrides`, `rope_scaling` and `rope_theta`."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxpaged.checks import InputError, check
from jaxpaged.models.fields import Fields

NAME = "hf_overrides"
ROPES = ("rope_parameters", "rope_scaling")
KEPT = ("rope_theta", "partial_rotary_factor")  # fields of a RoPE that are no scaling
TEXT = "text_config"


def gathered(overrides: object, rope_scaling: object, rope_theta: object) -> dict[str, Any]:
    """Return the overrides that three options of the same meaning ask for. Raises `InputError`."""
    check(NAME, overrides, "None or a mapping", overrides is None or isinstance(overrides, Mapping))
    assert overrides is None or isinstance(overrides, Mapping)
    made = dict(overrides or {})
    made.pop("max_model_len", None)  # an option of the engine's, which vLLM does not read here
    for name, value in (("rope_scaling", rope_scaling), ("rope_theta", rope_theta)):
        if value is not None:
            check(name, value, f"None beside {NAME} with {name}", name not in made)
            made[name] = value
    return made


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with a user's values in place of its own.

    A RoPE stands in place of the config's under either name; what the config says of it beside a scaling is
    kept. Values for `text_config` go into the config's own.
    """
    made = dict(config)
    flat = [name for name in ROPES if _is_flat(config.get(name))]
    kept = {key: config[name][key] for name in flat for key in KEPT if key in config[name]}
    for name, value in overrides.items():
        if name == TEXT and isinstance(value, Mapping) and isinstance(config.get(TEXT), Mapping):
            value = overridden(config[TEXT], value)
        elif name in ROPES and flat:
            for other in flat:
                if other not in overrides:
                    del made[other]
            if value is None or _is_flat(value):
                value = {**kept, **(value or {})} or None
        made[name] = value
    if "rope_theta" in overrides:
        theta = overrides["rope_theta"]
        for name in ROPES:
            if _is_flat(made.get(name)):
                made[name] = {**made[name], "rope_theta": theta}
            elif isinstance(made.get(name), Mapping):
                raise InputError(
                    f"{NAME}: rope_theta must be left out: {name} has one for each kind of layer"
                )
    return made


def _is_flat(rope: object) -> bool:
    """Return whether it is the RoPE of all layers, not one for each kind."""
    return isinstance(rope, Mapping) and not any(isinstance(value, Mapping) for value in rope.values())


def check_read(fields: Fields, overrides: Iterable[str]) -> None:
    """Refuse overrides of what a model's family does not read: they would change nothing in silence."""
    for name in overrides:
        rule = "a field of the model's config.json that its family reads"
        check(f"{NAME}: key", name, rule, fields.has_read(name))
