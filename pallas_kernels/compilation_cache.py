"""Where what is costly to make is kept from one process to the next."""

import functools
import logging
import os
import stat
from pathlib import Path

import jax


def compilation_cache_dir() -> Path | None:
    """Return the folder, made if need be: `JAX_COMPILATION_CACHE_DIR`, else one in the user's cache, that is
    in `XDG_CACHE_HOME` or ~/.cache.

    None if it cannot be written to, if others could write to it, or if the user has no home: then nothing is
    kept, and the log says so once.
    """
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if problem := why_untrusted(folder):
            raise PermissionError(f"{str(folder)!r} {problem}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{str(folder)!r} cannot be written to")
    except (OSError, RuntimeError) as error:
        _warn(f"nothing is kept for the next start: {error}; XDG_CACHE_HOME names another folder")
        return None
    return folder


def why_untrusted(path: Path) -> str | None:
    """Return, in words, why what a file or folder holds may not be run: somebody else could have written it.

    None if it is the user's own and nobody else may write to it; a file must be no link. Raises `OSError` if
    it is not there. Systems without users of POSIX's kind are trusted.
    """
    if not hasattr(os, "geteuid"):
        return None
    status = path.stat() if path.is_dir() else path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return "is a link"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, must belong to this process's user, {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):o}): chmod go-w would mend it"
    return None


def _folder() -> Path:
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpaged"


@functools.cache
def _warn(message: str) -> None:
    logging.getLogger(__name__).warning(message)
