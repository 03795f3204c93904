"""XLA flags: when each is set, and that XLA knows it. An unknown flag ends the process."""

import importlib.metadata
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine import gpu_flags

WANTED = "--xla_gpu_enable_command_buffer=+WHILE"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Imitate a machine with the CUDA plugin, no flags, and JAX not started."""
    for name in ("XLA_FLAGS", *gpu_flags.MEMORY_SHARE_NAMES):
        monkeypatch.setenv(name, "")  # for it to be gone again after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(gpu_flags, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=None)))
    plugin = SimpleNamespace(name="xla_cuda12")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [plugin])
    monkeypatch.setattr(gpu_flags, "jax_has_started", lambda: False)
    return monkeypatch


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, WANTED),
        ("", WANTED),
        (
            "--xla_dump_to=x  --xla_gpu_autotune_level=0",
            f"--xla_dump_to=x --xla_gpu_autotune_level=0 {WANTED}",
        ),
        ("--xla_gpu_enable_command_buffer=", "--xla_gpu_enable_command_buffer="),
        (
            "--xla_dump_to=x --xla_gpu_enable_command_buffer",
            "--xla_dump_to=x --xla_gpu_enable_command_buffer",
        ),
        ("--xla_gpu_enable_command_buffers=1", f"--xla_gpu_enable_command_buffers=1 {WANTED}"),
    ],
)
def test_flags_are_added_unless_the_user_set_them(
    machine: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    if before is not None:
        machine.setenv("XLA_FLAGS", before)
    gpu_flags.set_defaults()
    assert os.environ["XLA_FLAGS"] == after
    gpu_flags.set_defaults()
    assert os.environ["XLA_FLAGS"] == after


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, 0.9), ({"XLA_CLIENT_MEM_FRACTION": ".5"}, 0.5), ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".25"}, 0.25)],
)
def test_jax_gets_a_share_of_the_memory_unless_the_user_gave_it_one(
    machine: pytest.MonkeyPatch, before: dict[str, str], after: float
) -> None:
    """JAX refuses both names at once."""
    for name, value in before.items():
        machine.setenv(name, value)
    gpu_flags.set_defaults()
    assert gpu_flags.memory_share() == (after if before else 0.75)
    gpu_flags.set_defaults(EngineConfig())
    assert gpu_flags.memory_share() == after
    assert sum(name in os.environ for name in gpu_flags.MEMORY_SHARE_NAMES) == 1


@pytest.mark.parametrize(
    ("plugins", "platforms", "sets"),
    [
        ([], None, False),
        (["some_other"], None, False),
        (["xla_cuda13"], None, True),
        (["xla_cuda12"], "", True),
        (["xla_cuda12"], "cpu", False),
        (["xla_cuda12"], "cuda,cpu", True),
        (["xla_cuda12"], "gpu", True),
    ],
)
def test_only_where_jax_may_use_cuda(
    machine: pytest.MonkeyPatch, plugins: list[str], platforms: str | None, sets: bool
) -> None:
    found = [SimpleNamespace(name=name) for name in plugins]
    machine.setattr(importlib.metadata, "entry_points", lambda group: found)
    gpu_flags.jax.config.jax_platforms = platforms
    gpu_flags.set_defaults(EngineConfig())
    assert ("XLA_FLAGS" in os.environ) == ("XLA_CLIENT_MEM_FRACTION" in os.environ) == sets


def test_too_late_is_logged(machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    machine.setattr(gpu_flags, "jax_has_started", lambda: True)
    with caplog.at_level(logging.WARNING, "jaxpaged"):
        gpu_flags.set_defaults(EngineConfig())
    assert "XLA_FLAGS" not in os.environ
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ  # where the cache is sized it is said to be too late
    assert WANTED in caplog.text


def test_a_file_of_flags_is_left_alone(machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    machine.setenv("XLA_FLAGS", "flags.txt")
    with caplog.at_level(logging.WARNING, "jaxpaged"):
        gpu_flags.set_defaults(EngineConfig())
    assert os.environ["XLA_FLAGS"] == "flags.txt"
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    assert WANTED in caplog.text


def test_asking_whether_jax_has_started_does_not_start_it() -> None:
    """Importing the package does not start it either. JAX's own private function is the second opinion."""
    program = """
import jaxpaged.cli, jaxpaged.engine.gpu_flags as flags
from jaxpaged import LLM
import jax
from jax._src.xla_bridge import backends_are_initialized
before = dict(jax.config.values)
assert [flags.jax_has_started() for _ in range(2)] == [False, False]
assert jax.config.values == before
assert not backends_are_initialized()
jax.devices()
assert backends_are_initialized()
assert flags.jax_has_started()
assert jax.config.values == before
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("flag", "known"),
    [(WANTED, True), (WANTED + ",+NONSENSE", False), ("--xla_gpu_nonsense=1", False)],
)
def test_xla_knows_the_flags(flag: str, known: bool) -> None:
    """The CPU's XLA reads the same flags as the GPU's, and refuses alike."""
    program = "import jax; assert jax.jit(lambda x: x + 1)(1) == 2"
    environment = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True)
    assert (done.returncode == 0) == known, done.stderr
