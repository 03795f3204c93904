"""Where what is costly to make is kept from one process to the next."""

import functools
import logging
import os
from pathlib import Path

import jax


def compilation_cache_dir() -> Path | None:
    """The folder, made if need be: `JAX_COMPILATION_CACHE_DIR`, else one in the user's cache, that is in
    `XDG_CACHE_HOME` or ~/.cache.

    None if it cannot be written to, or the user has no home: then nothing is kept, and the log says so once.
    """
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{str(folder)!r} cannot be written to")
    except (OSError, RuntimeError) as error:
        _warn(f"nothing is kept for the next start: {error}; XDG_CACHE_HOME names another folder")
        return None
    return folder


def _folder() -> Path:
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpaged"


@functools.cache
def _warn(message: str) -> None:
    logging.getLogger(__name__).warning(message)
