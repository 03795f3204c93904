"""Tables of options: a dataclass field declares an option's default, its check, and where users set it."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxpaged.checks import (
    FLOAT32_MAX,
    INT32_MAX,
    InputError,
    check,
    checked_choice,
    checked_int,
    checked_number,
    is_int,
)

# Brings a value into its form, given the option's name; raises `InputError`.
type Check = Callable[[str, Any], Any]

AUTO: Literal["auto"] = "auto"
DISK_PREFIX = "disk:"  # of a store of blocks in a directory
DTYPE_ALIASES = {"half": "float16", "float": "float32"}  # vLLM's


def option(
    default: Any,
    check: Check | None = None,
    *,
    flag: Mapping[str, Any] | None = None,
    short: str | None = None,
    compare: bool = True,
    **more: Any,
) -> Any:
    """Declare an option as a field of a dataclass.

    check: None where the value depends on other options: the class checks it.
    flag: what `add_argument` takes for the flag of this name; None: there is no flag.
    short: another name of the flag.
    compare: whether tables with other values are different.
    more: what else one table says of its options.
    """
    metadata = {"check": check, "flag": flag, "short": short, **more}
    return dataclasses.field(default=default, metadata=metadata, compare=compare)


def checks_of(table: Any) -> dict[str, Check]:
    """Return the checks of a table's options by their names."""
    fields = dataclasses.fields(table)
    return {field.name: check for field in fields if (check := field.metadata["check"]) is not None}


def flags_of(table: Any) -> dict[str, tuple[list[str], Mapping[str, Any]]]:
    """Return, by option name, the names of its flag and the further arguments of `add_argument`."""
    flags = {}
    for field in dataclasses.fields(table):
        if (flag := field.metadata["flag"]) is not None:
            short = field.metadata["short"]
            flags[field.name] = ([f"--{field.name.replace('_', '-')}", *([short] if short else [])], flag)
    return flags


def whole(rule: str, minimum: int, maximum: int = INT32_MAX) -> Check:
    """Check that a value is an integer in [minimum, maximum]; errors say `rule`."""
    return lambda name, value: checked_int(name, value, rule, minimum, maximum)


def number(rule: str, minimum: float, maximum: float = FLOAT32_MAX, *, above: bool = False) -> Check:
    """Check that a value is a number in [minimum, maximum], or above the minimum; errors say `rule`."""
    return lambda name, value: checked_number(name, value, rule, minimum, maximum, above=above)


def choice(*choices: str) -> Check:
    """Check that a value is one of these texts."""
    return lambda name, value: checked_choice(name, value, choices)


def number_format(*choices: str) -> Check:
    """Check that a value names one of these number formats, or is NumPy's, JAX's or PyTorch's type for it."""

    def check_one(name: str, value: Any) -> str:
        dtype_name = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
        dtype_name = str(dtype_name).removeprefix("torch.")
        dtype_name = DTYPE_ALIASES.get(dtype_name, dtype_name)
        return checked_choice(name, dtype_name if dtype_name in choices else value, choices)

    return check_one


def length(name: str, value: Any) -> Any:
    """Check a length in tokens: None, an int, or 'auto' (-1) for the longest that fits."""
    if value == AUTO if isinstance(value, str) else is_int(value) and value == -1:
        return AUTO
    rule = "None or an int >= 2, at most 2**31 - 1, or 'auto' (-1) for what fits"
    return optional(whole(rule, 2))(name, value)


def sums(name: str, value: Any) -> Any:
    """Check how sums over devices are made: in one of two ways, or as a number of devices would make them."""
    rule = "fast, ordered, or an int from 2 to 256"
    if isinstance(value, str):
        check(name, value, rule, value in ("fast", "ordered"))
        return value
    return checked_int(name, value, rule, 2, 256)


def optional(check: Check) -> Check:
    """Check a value that may be None."""
    return lambda name, value: None if value is None else check(name, value)


def ours_or_path(choices: tuple[str, ...], rule: str) -> Check:
    """Check that a value is one of these names, a path to a part from outside, or such a part.

    Only the engine's start imports what a path names.
    """

    def check_one(name: str, value: Any) -> Any:
        if isinstance(value, str):
            check(name, value, rule, value in choices or ":" in value)
        elif value is not None or choices:
            check(name, value, rule, callable(value) or hasattr(value, "contract"))
        return value

    return check_one


def parts_or_paths(rule: str) -> Check:
    """Check that a value is None, or a list of paths to parts from outside and such parts; empty is None."""
    check_one = ours_or_path((), rule)

    def check_all(name: str, value: Any) -> Any:
        check(name, value, rule, value is None or isinstance(value, list | tuple))
        return tuple(check_one(name, each) for each in value or () if each is not None) or None

    return check_all


def store_of_blocks(name: str, value: Any) -> Any:
    """Check that a value names a store of blocks, or is one."""
    value = ours_or_path(("host", "native"), "host, disk:DIR, or 'package.module:Name'")(name, value)
    if isinstance(value, str) and value.startswith(DISK_PREFIX):
        disk_folder(name, value)
    return value


def disk_folder(name: str, value: str) -> Path:
    """Return the directory of `disk:DIR`, "~" in it as the user's own.

    Raises `InputError` for the working directory as a whole, and for the "~" of nobody.
    """
    folder = Path(value.removeprefix(DISK_PREFIX).strip())
    check(name, value, "disk:DIR with a directory that is not the working directory", folder != Path())
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise InputError(f"{name}={value!r} must be disk:DIR: {error}") from error


def text(help_: str) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a flag with a text."""
    return {"help": help_}


def count(help_: str) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a flag with an integer."""
    return {"type": int, "help": help_}


def yes_or_no(help_: str) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for a flag and its opposite."""
    return {"action": argparse.BooleanOptionalAction, "help": help_}
