"""Compiled programs kept on disk: read back by whoever asks for the same, made anew by all others."""

import functools
import logging
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import disk_cache
from jaxpaged.engine import programs, start
from jaxpaged.engine.driver import Driver
from jaxpaged.memory import block_pool
from tests import tiny

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "_folder", tmp_path / "programs")
    return tmp_path / "programs"


@pytest.fixture
def ask(monkeypatch):
    """Ask for the program that adds a number, as a new process would. Return whether it was lowered."""

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

    def other_sources():
        return ("other sources",)

    other_sources.__module__ = disk_cache.__name__  # else it is seen that a function of ours is replaced
    monkeypatch.setattr(disk_cache, "_machine", other_sources)
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


def test_what_others_could_have_written_is_not_loaded(folder, ask, caplog):
    assert ask()
    [file] = folder.iterdir()
    for spoil, why in (
        (lambda: file.chmod(0o666), "may be written by others"),
        (lambda: (file.rename(folder / "elsewhere"), file.symlink_to(folder / "elsewhere")), "is a link"),
    ):
        spoil()
        with caplog.at_level(logging.WARNING):
            assert ask()
        assert f"{file} is not used: it {why}" in caplog.text
        assert not file.is_symlink()
        assert not ask()


def test_a_program_under_the_name_of_another_is_not_taken_for_it(folder, ask, caplog):
    assert ask()
    [first] = folder.iterdir()
    assert ask(added=2.0)
    [second] = {*folder.iterdir()} - {first}
    second.write_bytes(first.read_bytes())
    with caplog.at_level(logging.WARNING):
        assert ask(added=2.0)
    assert "was made for something else" in caplog.text
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    assert ask()


def test_a_replaced_function_of_ours_is_not_answered_by_a_kept_program(folder, ask, monkeypatch, caplog):
    """A researcher replaces a function; a program that was kept before must not run in its place."""
    assert ask()
    disk_cache._say.cache_clear()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(block_pool, "create", lambda *sizes: None)
        assert programs.kept(lambda: pytest.fail("lowered"), ("add", 1.0), (X,), {"sum": 0}) is None
        assert "jaxpaged.memory.block_pool.create is not what its source file says" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(block_pool.BlockPool, "num_free", property(lambda self: 0))
        assert disk_cache.replaced() == "jaxpaged.memory.block_pool.BlockPool.num_free"
    assert disk_cache.replaced() is None
    assert not ask()


def test_nothing_is_left_of_what_could_not_be_finished(folder, ask, monkeypatch, caplog):
    def full(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(disk_cache.os, "replace", full)
        assert ask()
    assert "No space left on device" in caplog.text
    assert list(folder.iterdir()) == []
    old, new = (f"unfinished-{digit * 32}" for digit in "01")  # of processes that were killed
    foreign = [
        "unfinished-business",
        "unfinished-0123456",
        "model.program",
        f"{'0' * 32}.program",
        "a.grammar",
    ]
    for name, age in ((old, 2), (new, 0), *((name, 2) for name in foreign)):
        (folder / name).touch()
        long_ago = time.time() - age * disk_cache.UNFINISHED_SECONDS
        os.utime(folder / name, (long_ago, long_ago))
    assert ask()
    [kept] = {path.name for path in folder.iterdir()} - {new, *foreign}
    assert kept.endswith(".program")


def test_an_engine_may_keep_no_programs(monkeypatch):
    """Even where another of the process keeps them."""
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    asked = []
    monkeypatch.setattr(programs, "kept", lambda *args, **options: asked.append(args))
    for keep in (True, False):
        driver = tiny.driver(keep_programs=keep)
        loaded = driver.setup, driver.device.graphdef, driver.device.params, driver.state
        assert start.run_of(*loaded, by_host=False) is None
        assert len(asked) == keep
        asked.clear()


def test_a_folder_that_cannot_be_written_costs_the_program_only(folder, ask, caplog):
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert ask()
        assert ask()
    assert f"the program cannot be kept in {folder}" in caplog.text


def test_who_asks_while_another_compiles_waits_and_finds_it(folder, monkeypatch):
    """Engines that start at the same time compile their program once."""
    monkeypatch.setattr(programs, "_loaded", {})
    begun, may_go, lowered = threading.Event(), threading.Event(), []

    def lower():
        lowered.append(threading.current_thread())
        begun.set()
        assert may_go.wait(60)
        return jax.jit(lambda x: {"sum": x + 1}).lower(X)

    def get():
        return programs.kept(lower, made_from="slow", arrays=(X,), result={"sum": 0})

    both = [tiny.start(get)]
    assert begun.wait(60)
    both.append(tiny.start(get))
    time.sleep(0.3)  # in which the second would begin, too
    may_go.set()
    for program in both:
        np.testing.assert_array_equal(program.result(60)(jnp.asarray(X))["sum"], X + 1)
    assert len(lowered) == 1
    assert [path.suffix for path in folder.iterdir()] == [".program"]


def test_the_programs_used_longest_ago_go(folder, ask, monkeypatch):
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 2)
    assert ask(1.0)
    assert ask(2.0)
    for age, file in enumerate(sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)):
        os.utime(file, (age, age))
    foreign = [folder / "model.program", folder / f"{'0' * 32}.program"]
    for file in foreign:  # of somebody who has the same folder
        file.write_bytes(b"0" * 100)
        os.utime(file, (0, 0))
    assert not ask(1.0)  # now the one used last
    assert ask(3.0)
    assert not ask(1.0)
    assert ask(2.0)
    assert all(file.read_bytes() == b"0" * 100 for file in foreign)


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
