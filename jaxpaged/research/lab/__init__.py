"""The laboratory: request traces replayed through this package's own allocator and prefix cache.

As a library: a trace goes in, tables come out. A table is a list of dicts, one for each row, which
`pandas.DataFrame` and `polars.DataFrame` take as it is. Plots are figures of matplotlib. Names are looked up
when first used, so that importing the package does not import jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.research.lab.plots import plot
    from jaxpaged.research.lab.synthetic import agents, chat
    from jaxpaged.research.lab.tables import (
        block_sizes,
        gains,
        hit_rates,
        layouts,
        policies,
        to_csv,
        to_markdown,
    )
    from jaxpaged.research.lab.traces import Trace, of_requests, read

__all__ = [
    "Trace",
    "agents",
    "block_sizes",
    "chat",
    "gains",
    "hit_rates",
    "layouts",
    "of_requests",
    "plot",
    "policies",
    "read",
    "to_csv",
    "to_markdown",
]

_HOME = {
    "Trace": "traces",
    "agents": "synthetic",
    "block_sizes": "tables",
    "chat": "synthetic",
    "gains": "tables",
    "hit_rates": "tables",
    "layouts": "tables",
    "of_requests": "traces",
    "plot": "plots",
    "policies": "tables",
    "read": "traces",
    "to_csv": "tables",
    "to_markdown": "tables",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
