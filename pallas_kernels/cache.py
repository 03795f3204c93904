"""Where what is compiled on this machine is kept from one process to the next."""

import os
from pathlib import Path


def cache_dir() -> Path | None:
    """jaxpaged's folder in the user's cache, `XDG_CACHE_HOME` or ~/.cache; None for a user without a home."""
    home = os.environ.get("XDG_CACHE_HOME")
    if not home:
        try:
            home = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(home) / "jaxpaged"
