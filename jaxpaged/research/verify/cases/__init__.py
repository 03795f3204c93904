"""Cases of the kernels' operations: problems, their arrays, and which answers are right.

`frame` has what all cases share. `decode`, `ragged` and `tiles` have the cases of attention. `caches` has the
cases of writing, copying and merging. Import from these modules.
"""

import warnings
from typing import Any

OLD_NAMES = {"Case": "DecodeCase"}  # printed by earlier releases' reports


def __getattr__(name: str) -> Any:
    if name not in OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxpaged.research.verify.cases import decode

    new = OLD_NAMES[name]
    warnings.warn(f"{__name__}.{name} is now {decode.__name__}.{new}", DeprecationWarning, stacklevel=2)
    return getattr(decode, new)
