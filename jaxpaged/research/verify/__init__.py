"""The conformance kit: others' kernels and allocators against our oracles, with our own tests' cases.

`verify_kernel` runs a function of any framework over an operation's case list; `verify_allocator` drives an
allocator through random histories beside the oracle of its generation. Both make what fails as small as may
be, and say how to see it again. `oracles` are the files of `reference/`, under a name that clashes with
nobody's. Only shrinking and histories need more than the package: hypothesis, the extra `verify`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.research.verify.allocators import AllocatorReport, replay, verify_allocator
    from jaxpaged.research.verify.kernels import NotServed, Terms, WrongResult, cases_of, check
    from jaxpaged.research.verify.report import Report, verify_kernel

__all__ = [
    "AllocatorReport",
    "NotServed",
    "Report",
    "Terms",
    "WrongResult",
    "cases_of",
    "check",
    "replay",
    "verify_allocator",
    "verify_kernel",
]


HOMES = {"AllocatorReport": "allocators", "replay": "allocators", "verify_allocator": "allocators"}
HOMES |= {"Report": "report", "verify_kernel": "report"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{HOMES.get(name, 'kernels')}")
    return getattr(home, name)
