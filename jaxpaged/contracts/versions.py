"""Versions of the contracts, and how parts from outside are found. Imports nothing heavy."""

from typing import Any

from jaxpaged.checks import InputError, shown
from pallas_kernels import outside
from pallas_kernels.outside import is_path

__all__ = ["SERVED", "check_version", "imported", "is_path"]

# The versions that this release serves, by kind of part, the newest last.
SERVED: dict[str, tuple[int, ...]] = {
    "layout": (1,),
    "policy": (1,),
    "attention": (1,),
    "sampler": (1,),
    "processor": (1,),
    "layer_kind": (1,),
    "block_store": (1,),
}


def imported(option: str, path: str, rule: str) -> Any:
    """Import the object with the path "package.module:Name". Raises `InputError`, which names the option and
    the rule.
    """
    try:
        return outside.imported(path)
    except ValueError as error:
        raise InputError(f"{option}={path!r} must be {rule}: {error}") from error


def check_version(option: str, value: Any, part: Any, kind: str) -> None:
    """Raise `InputError` if this release does not serve the version of the contract that a part declares."""
    if why := outside.why_not_version(part, SERVED[kind]):
        raise InputError(f"{option}={shown(value)} cannot be used: {why}")
