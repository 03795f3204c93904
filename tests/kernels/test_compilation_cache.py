"""The folder for compiled programs and libraries."""

import re
from pathlib import Path

import jax
import pytest

from pallas_kernels import compilation_cache
from pallas_kernels.compilation_cache import compilation_cache_dir, why_untrusted


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return the home of a user who has set no cache folder."""
    given = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    compilation_cache.warn_once.cache_clear()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", given)


def test_the_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compilation_cache_dir() == home / ".cache" / "jaxpaged"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    assert compilation_cache_dir() == home / "xdg" / "jaxpaged"
    jax.config.update("jax_compilation_cache_dir", str(home / "jax"))
    assert compilation_cache_dir() == home / "jax"
    assert (home / "jax").is_dir()


def no_home(home: Path, patch: pytest.MonkeyPatch) -> None:
    def raising() -> Path:
        raise RuntimeError("Could not determine home directory.")

    patch.setattr(Path, "home", raising)


def a_file(home: Path, patch: pytest.MonkeyPatch) -> None:
    (home / ".cache").touch()


def read_only(home: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compilation_cache.os, "access", lambda folder, mode: False)  # root may write everywhere


def of_another_user(home: Path, patch: pytest.MonkeyPatch) -> None:
    owner = compilation_cache.os.geteuid() + 1
    patch.setattr(compilation_cache.os, "geteuid", lambda: owner)


def writable_by_others(home: Path, patch: pytest.MonkeyPatch) -> None:
    (home / ".cache" / "jaxpaged").mkdir(parents=True)
    (home / ".cache" / "jaxpaged").chmod(0o775)


def test_the_folder_is_made_for_the_user_alone(home: Path) -> None:
    folder = compilation_cache_dir()
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    file, link = folder / "file", folder / "link"
    file.touch(mode=0o600)
    link.symlink_to(file)
    assert why_untrusted(file) is None
    assert why_untrusted(link) == "is a link"
    file.chmod(0o602)
    assert why_untrusted(file) == "may be written by others (mode 602): chmod go-w would mend it"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (no_home, "Could not determine home directory"),
        (a_file, "(Not a directory|File exists)"),
        (read_only, "jaxpaged' cannot be written to"),
        (of_another_user, "jaxpaged' belongs to user [0-9]+, must belong to this process's user"),
        (writable_by_others, r"jaxpaged' may be written by others \(mode 775\)"),
    ],
)
def test_where_nothing_can_be_kept_it_is_said_once(spoil, why, home, monkeypatch, caplog) -> None:
    spoil(home, monkeypatch)
    assert compilation_cache_dir() is None
    assert compilation_cache_dir() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(f"nothing is kept .*{why}.*; XDG_CACHE_HOME names", record.getMessage())
