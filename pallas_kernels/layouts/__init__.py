"""The layouts of a cache: the registry, and how a user's options name one.

To add a layout, write a file with a frozen value of a class under `Layout` (or `Dense`, if only the order of
axes is new) and put it into `LAYOUTS`; or leave it outside and name it "package.module:Name". `base.py`
defines what it must have. The operations, the engine, the tests and the benchmarks take whatever is in the
registry.
"""

import itertools
import warnings
from typing import Any

import jax

from pallas_kernels import outside
from pallas_kernels.layouts.all_layers import AllLayers
from pallas_kernels.layouts.base import (
    Arrays,
    BlockSlice,
    Layout,
    Location,
    PackedView,
    Pool,
    Sizes,
    View,
    check,
    create,
)
from pallas_kernels.layouts.dense import Dense
from pallas_kernels.layouts.fp8 import TYPES as FP8_TYPES
from pallas_kernels.layouts.fp8 import Fp8
from pallas_kernels.layouts.fused import Fused
from pallas_kernels.layouts.head_major import HeadMajor
from pallas_kernels.layouts.int4_grouped import Int4Grouped
from pallas_kernels.layouts.int8_per_token import Int8PerToken
from pallas_kernels.layouts.latent import Latent
from pallas_kernels.layouts.split_x import SplitX
from pallas_kernels.layouts.token import Token
from pallas_kernels.layouts.token_major import TOKEN_MAJOR

__all__ = [
    "CONTRACTS",
    "LAYOUTS",
    "TOKEN_MAJOR",
    "Arrays",
    "BlockSlice",
    "Dense",
    "Fp8",
    "Latent",
    "Layout",
    "Location",
    "PackedView",
    "Pool",
    "Sizes",
    "View",
    "check",
    "choose",
    "create",
    "is_ours",
    "named",
    "words",
]

LAYOUTS: dict[str, Layout] = {
    "token_major": TOKEN_MAJOR,
    "head_major": HeadMajor(),
    "split_x": SplitX(),
    "fused": Fused(),
    "all_layers": AllLayers(),
    "token": Token(),
    "int8_per_token": Int8PerToken(),
    "int4_grouped": Int4Grouped(),
    "fp8_e4m3": Fp8("fp8_e4m3"),
    "fp8_e5m2": Fp8("fp8_e5m2"),
}
CONTRACTS = (1,)  # versions of the contract of layouts that this release serves
CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4")  # fp8 is fp8_e4m3, as in vLLM


# Names of an earlier release, and what they are called now.
RENAMED = {"Place": Location, "Part": BlockSlice}


def __getattr__(name: str) -> Any:
    """Return the layout that replaces a name of an earlier release, with a warning."""
    if name not in RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = RENAMED[name]
    warnings.warn(f"layouts.{name} is now layouts.{new.__name__}", DeprecationWarning, stacklevel=2)
    return new


def named(layout: str | Layout) -> Layout:
    """Return the layout of that name, "package.module:Name" for one from outside; return a layout itself.

    Raises: ValueError if there is none.
    """
    rule = f"must be {', '.join(LAYOUTS)}, a Layout, or 'package.module:Name'"
    value: Any = layout
    if isinstance(layout, str):
        value = LAYOUTS.get(layout)
        if outside.is_path(layout):
            try:
                value = outside.imported(layout)
            except ValueError as error:
                raise ValueError(f"kv_layout={layout!r} {rule}: {error}") from error
    if isinstance(value, type) and issubclass(value, Layout):
        value = value()
    if not isinstance(value, Layout):
        raise ValueError(f"kv_layout={layout!r} {rule}")
    if why := outside.why_not_version(value, CONTRACTS):
        raise ValueError(f"kv_layout={str(layout)!r} cannot be used: {why}")
    return value


def choose(
    kv_layout: str | Layout,
    kv_cache_dtype: str = "auto",
    *,
    measures_scales: bool = False,
    keys_alone: bool = False,
) -> Layout:
    """Choose the layout for these options, in its form for JAX's default device.

    keys_alone: whether it is for latent attention, whose values are a part of its keys.

    Raises: ValueError for a combination that means nothing.
    """
    layout, wanted = named(kv_layout), {"fp8": "fp8_e4m3"}.get(kv_cache_dtype, kv_cache_dtype)
    if wanted not in CACHE_DTYPES:
        raise ValueError(f"{kv_cache_dtype=} must be one of {', '.join(CACHE_DTYPES)}")
    if wanted not in ("auto", layout.cache_dtype):
        if layout.cache_dtype is not None:
            raise ValueError(f"{kv_cache_dtype=} must be 'auto' or {layout.cache_dtype!r} for {kv_layout=}")
        if wanted == "int4" and layout == TOKEN_MAJOR:
            layout = Int4Grouped()
        elif wanted == "int8" and isinstance(layout, Dense):
            layout = Int8PerToken(layout)
        elif wanted in FP8_TYPES and isinstance(layout, Dense):
            layout = Fp8(wanted, layout)
        else:
            raise ValueError(f"{kv_cache_dtype=} must be 'auto' for {kv_layout=}, which has no such form")
    if measures_scales:
        if not isinstance(layout, Fp8):
            raise ValueError("calculate_kv_scales=True must go with a kv_cache_dtype of fp8")
        layout = Fp8(layout.cache_dtype, layout.base, is_measured=True)
    alone = layout.keys_alone()
    if keys_alone:
        if alone is None:
            raise ValueError(
                f"{kv_layout=} with {kv_cache_dtype=} must be 'token_major' with 'auto' for latent attention"
            )
        layout = alone
    elif alone == layout:
        raise ValueError(f"{kv_layout=} must go with latent attention: it has no place for values")
    return layout.on(jax.default_backend())


def words(layout: Layout) -> dict[str, Any]:
    """Return the options with which `choose` makes the layout. Raise ValueError if there are none."""
    outside = f"{type(layout).__module__}:{type(layout).__qualname__}"
    has_keys_alone = layout.keys_alone() == layout
    for kv_layout, kv_cache_dtype, measures in itertools.product(
        (*LAYOUTS, outside), CACHE_DTYPES, (False, True)
    ):
        try:
            options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "measures_scales": measures}
            options |= {"keys_alone": True} if has_keys_alone else {}
            if choose(kv_layout, **options) == layout.on(jax.default_backend()):
                return {"kv_layout": kv_layout, **options}
        except (ValueError, TypeError):
            continue
    raise ValueError(f"kv_layout={layout} must be one that words name: without values of its own")


def is_ours(layout: Layout) -> bool:
    """Return whether the layout's source is in this package. Programs compiled for other layouts must not be
    kept on disk: their source may change.
    """
    layouts = layout, getattr(layout, "base", layout)
    return all(type(each).__module__.startswith(f"{__name__}.") for each in layouts)
