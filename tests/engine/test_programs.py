"""Compiled programs kept on disk: read back by whoever asks for the same, made anew by all others."""

import functools
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import disk_cache
from jaxpaged.engine import programs

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_folder", tmp_path / "programs")
    return tmp_path / "programs"


@pytest.fixture
def ask(monkeypatch):
    """Asks, as a new process would, for the program that adds a number; says whether it was lowered."""

    def asked(added=1.0, x=X):
        monkeypatch.setattr(programs, "_loaded", {})
        lowered = []

        def lower():
            lowered.append(added)
            return jax.jit(lambda x: {"sum": x + added}).lower(x)

        program = programs.kept(lower, made_from=("add", added), arrays=(x,), result={"sum": 0})
        np.testing.assert_array_equal(program(jnp.asarray(x))["sum"], x + np.asarray(added, x.dtype))
        return bool(lowered)

    return asked


def test_a_program_is_made_once_for_all_that_it_depends_on(folder, ask, monkeypatch):
    assert ask()
    assert not ask()
    assert ask(added=2.0)
    assert not ask(added=2.0)
    assert ask(x=X[:3])
    assert ask(x=X.astype(np.int32))
    assert not ask()
    monkeypatch.setattr(disk_cache, "_machine", lambda: ("other sources",))
    assert ask()
    assert not ask()
    assert len(list(folder.glob("*.program"))) == len(list(folder.iterdir())) == 5


def test_nothing_is_kept_where_no_folder_is(monkeypatch):
    monkeypatch.setattr(disk_cache, "_folder", None)
    assert programs.kept(lambda: pytest.fail("lowered"), "add", (X,), X) is None


def test_a_damaged_file_is_made_anew(folder, ask, caplog):
    assert ask()
    [file] = folder.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert ask()
    assert f"the program in {file} cannot be used" in caplog.text
    assert not ask()


def test_a_folder_that_cannot_be_written_costs_the_program_only(folder, ask, caplog):
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert ask()
        assert ask()
    assert f"the program cannot be kept in {folder}" in caplog.text


def test_the_programs_used_longest_ago_go(folder, ask, monkeypatch):
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 2)
    assert ask(1.0)
    assert ask(2.0)
    for age, file in enumerate(sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)):
        os.utime(file, (age, age))
    assert not ask(1.0)  # now the one used last
    assert ask(3.0)
    assert not ask(1.0)
    assert ask(2.0)


def test_jax_keeps_its_own_programs_as_before(folder, ask):
    before = jax.config.jax_enable_compilation_cache
    assert ask()
    assert jax.config.jax_enable_compilation_cache == before


def test_a_process_holds_the_programs_asked_for_last(folder, monkeypatch):
    monkeypatch.setattr(programs, "_loaded", {})
    monkeypatch.setattr(programs, "MOST_LOADED", 2)

    def get(added):
        lower = functools.partial(jax.jit(lambda x: {"sum": x + added}).lower, X)
        return programs.kept(lower, made_from=("add", added), arrays=(X,), result={"sum": 0})

    first, second = get(1.0), get(2.0)
    assert get(1.0) is first
    get(3.0)
    assert get(1.0) is first
    assert get(2.0) is not second
