"""Options of vLLM's `LLM` and `EngineArgs`, brought into the names that the engine has."""

from collections.abc import Iterable, Mapping
from typing import Any

from jaxpaged.checks import InputError, UnknownNameError, check, shown, unknown
from jaxpaged.vllm_names.connectors import NAME as CONNECTOR
from jaxpaged.vllm_names.connectors import tiers_of
from jaxpaged.vllm_names.judge import ENGINE_NAMES, known_names, passes
from jaxpaged.vllm_names.table import ENGINE

# By another name here.
RENAMED = {"num_gpu_blocks_override": "num_blocks"}


def defaults() -> dict[str, object]:
    """Return vLLM's options that are not ours, each with its default in vLLM; None where that is unknown."""
    names = known_names()["names"]["EngineArgs"]
    others = {name: names.get(name, {}).get("default") for name in sorted(ENGINE)}
    return dict.fromkeys(RENAMED) | others


def unknown_option(name: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for an option of an engine that neither vLLM nor this engine has."""
    if name in known_names()["names"]["SamplingParams"]:
        return UnknownNameError(f"option {name!r} must be given to SamplingParams: it is none of an engine")
    return unknown("option ", name, sorted(known))


def translated(options: Mapping[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Return the options by our own names, without those that change nothing; None stands for the default.

    Raises `InputError` for a value that is not supported here, and for a name that neither has.
    """
    ours: dict[str, Any] = {}
    for name, value in options.items():
        if name in known or name in RENAMED:
            name = RENAMED.get(name, name)
            if value is None:
                continue
            if name in ours:
                raise InputError(f"{name} is given twice, the second time as {shown(value)}: give it once")
            ours[name] = value
        elif not passes(name, value, ENGINE_NAMES, options):
            raise unknown_option(name, known)
    if options.get(CONNECTOR) is not None:
        for name, value in tiers_of(options[CONNECTOR]).items():
            rule = f"left out beside {CONNECTOR}"
            check(name, ours.get(name), rule, ours.setdefault(name, value) == value)
    return ours
