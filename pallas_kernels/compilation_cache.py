"""The folder in which compiled programs and libraries are kept from one process to the next."""

import functools
import logging
import os
import stat
from pathlib import Path

import jax


def compilation_cache_dir() -> Path | None:
    """Return the folder: `JAX_COMPILATION_CACHE_DIR`, else "jaxpaged" in `XDG_CACHE_HOME` or ~/.cache. Create
    it if needed.

    Returns: None if it cannot be written to, if others could write to it, or if the user has no home. Then
        nothing is kept, and a warning is logged once.
    """
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if problem := why_untrusted(folder):
            raise PermissionError(f"{str(folder)!r} {problem}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{str(folder)!r} cannot be written to")
    except (OSError, RuntimeError) as error:
        warn_once(f"nothing is kept for the next start: {error}; XDG_CACHE_HOME names another folder")
        return None
    return folder


def why_untrusted(path: Path) -> str | None:
    """Return why the content of a file or folder must not be run: another user could have written it.

    Returns: a reason in words; None if the path is the user's own and only the user may write to it. A file
        must not be a link. Systems without POSIX users are trusted.
    Raises: OSError if the path does not exist.
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
def warn_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)
