"""Others' functions and classes: how they are named, and how arrays go to their frameworks and come back."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, checked_choice
from jaxpaged.research.verify import hints

FRAMEWORKS = ("numpy", "jax", "torch")


def named(path: str, *, may_be_module: bool = False) -> Any:
    """Return the object that `MODULE:NAME` names; NAME may have dots.

    The current directory is searched, too.

    With `may_be_module`, `MODULE` alone names the module, for all of its functions together.

    Raises: InputError if there is no such thing, or importing it fails.
    """
    module_name, colon, name = path.partition(":")
    is_module = may_be_module and not colon
    if not (module_name and (name or is_module)):
        raise InputError(f"{path!r} must be MODULE:NAME, such as my_kernels:attention")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(module_name)
        for part in filter(None, name.split(".")):
            value = getattr(value, part)
    except Exception as error:  # whatever importing somebody's module raises
        raise InputError(f"{path!r} cannot be imported: {hints.raised(error)}") from error
    return value


def path_of(something: Any) -> str:
    """Return MODULE:NAME if the object can be imported by it; otherwise an empty string."""
    something = getattr(something, "__wrapped__", something)
    module = getattr(something, "__module__", None)
    qualified = getattr(something, "__qualname__", "<unnamed>")
    return f"{module}:{qualified}" if module and "<" not in qualified else ""


def to(framework: str) -> Callable[[Any], Any]:
    """Return a function that turns a NumPy array into the framework's.

    Raises: InputError for an unknown one.
    """
    checked_choice("arrays", framework, FRAMEWORKS)
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray
    if framework == "torch":
        return _to_torch
    return lambda array: array


def _to_torch(array: np.ndarray) -> Any:
    torch = _torch()
    array = np.asarray(array)
    if is_numpys(array.dtype):
        return torch.from_numpy(array)
    bits = array.view(f"u{array.itemsize}")
    # Sharing memory, as for the other types, so that what is written to in place is seen.
    return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))


def is_numpys(dtype: np.dtype) -> bool:
    """Return whether a type is NumPy's own, which every program and file format knows; bfloat16 is not."""
    return dtype.isbuiltin == 1


def _torch() -> Any:
    """Import torch. Whoever tests a function of tensors has it installed; it is no dependency of ours."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise InputError(f"arrays='torch' needs PyTorch: {error}") from error


def to_numpy(array: Any) -> np.ndarray:
    """Return an array of any framework as NumPy's: by `__array__`, PyTorch's `numpy`, or DLPack."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):
        import ml_dtypes

        torch = _torch()
        array = array.detach().cpu().contiguous()
        name = str(array.dtype).removeprefix("torch.")
        if hasattr(ml_dtypes, name):
            integers = {1: torch.uint8, 2: torch.int16}[array.element_size()]
            return array.view(integers).numpy().view(getattr(ml_dtypes, name))
        return array.numpy()
    if hasattr(array, "__array__") or not hasattr(array, "__dlpack__"):
        return np.asarray(array)
    return np.from_dlpack(array)


def keywords_of(function: Callable[..., Any]) -> set[str] | None:
    """Return the names that a function takes by keyword; None for any, or if that is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
