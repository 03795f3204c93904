"""Takes vLLM's flags out of a command line, where they ask for nothing."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxpaged.checks import InputError
from jaxpaged.vllm_names.connectors import NAME as CONNECTOR
from jaxpaged.vllm_names.connectors import tiers_of
from jaxpaged.vllm_names.judge import SERVER_NAMES, entry_of, known_names, passes

CONSTANTS = {"none": None, "true": True, "false": False}


def without_vllms(arguments: Sequence[str], is_ours: Callable[[str], bool]) -> list[str]:
    """Return the arguments without vLLM's flags and their values; `is_ours` tells the command's own flags.

    A flag of our own may be written with underscores, as for vLLM. Raises `InputError` for a flag of vLLM's
    that asks for what is not there; what neither knows stays, to be told by the command's parser.
    """
    left = list(arguments)
    kept: list[str] = []
    while left and left[0] != "--":
        argument = left.pop(0)
        if re.fullmatch(r"-O\d", argument) and not is_ours(argument):
            continue  # a level of compilation
        flag, _, text = argument.partition("=")
        dashed = flag.replace("_", "-")
        if not flag.startswith("-") or is_ours(flag):
            kept.append(argument)
            continue
        if is_ours(dashed):
            kept.append(dashed + argument[len(flag) :])
            continue
        name, is_off = _name(flag)
        entry = None if name is None else entry_of(name, SERVER_NAMES[1])
        if name is None or entry is None or name not in SERVER_NAMES[0]:
            kept.append(argument)
            continue
        values = [text] if "=" in argument else [*_values(left, entry["kind"])]
        if entry["kind"] == "flag":
            value: Any = not is_off if not values else _value(values[0])
        elif is_off or not values:
            raise InputError(f"{flag} must have a value")
        else:
            value = _value(values[0]) if len(values) == 1 else [*map(_value, values)]
        for key in reversed(flag.split(".")[1:]):  # --structured-outputs-config.backend auto
            value = {key.replace("-", "_"): value}
        passes(name, value, SERVER_NAMES)
        if name == CONNECTOR and value is not None:
            for option, setting in tiers_of(value).items():
                kept += [f"--{option.replace('_', '-')}", str(setting)]
    return kept + left


def _name(flag: str) -> tuple[str | None, bool]:
    """Return whose flag it is, by its name in Python, and whether it says "no"; None: nobody's."""
    if not flag.startswith("--"):
        return known_names()["short"].get(flag), False
    name = flag[2:].partition(".")[0].replace("-", "_")  # --compilation-config.mode is a part of one
    if name.startswith("no_") and entry_of(name, SERVER_NAMES[1]) is None:
        return name.removeprefix("no_"), True
    return name, False


def _values(left: list[str], kind: str) -> Iterator[str]:
    """Remove and return a flag's values from the remaining arguments."""
    max_values = {"flag": 0, "value": 1}.get(kind, len(left))
    while max_values and left and not (left[0].startswith("-") and not _is_number(left[0])):
        max_values -= 1
        yield left.pop(0)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d*)?", text) is not None


def _value(text: str) -> Any:
    """Return the value of a flag's text: a constant, JSON, or the text itself."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    return json_or_text(text)


def json_or_text(text: str) -> Any:
    """Return the JSON value that a text is; a text that is none stays one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
