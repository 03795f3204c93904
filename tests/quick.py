"""Programs that take longer to compile than to run: see `jaxpaged.verify.quick`."""

from jaxpaged.verify.quick import UNOPTIMIZED, jit

__all__ = ["UNOPTIMIZED", "jit"]
