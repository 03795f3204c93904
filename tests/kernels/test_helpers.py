"""Threads that wait for the next call, by a program of their own, with pools as XLA's are."""

import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest

from pallas_kernels.native import library

PROGRAM = Path(__file__).with_name("native_helpers.cc")


def test_calls_from_several_threads_share_their_work(tmp_path: Path) -> None:
    compiler, targets = library.find_compiler(), library.targets()
    if compiler is None or not targets:
        pytest.skip("there is no C++ compiler")
    program, command = tmp_path / "helpers", library.compile_command(library.TARGETS[targets[0]], compiler)
    options = ["-pthread", "-I", str(library.SOURCES), str(PROGRAM), "-o", str(program)]
    subprocess.run([*command, *options], check=True)
    ended = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
def test_threads_of_all_libraries_wait_at_one_place() -> None:
    """Where the loader does not join the libraries' variables by itself, too."""
    if why := library.why_not(jnp.dtype("float32")):
        pytest.skip(f"there are no native kernels: {why}")
    compiler, target = library.find_compiler() or "c++", library.TARGETS[library.targets()[0]]
    apart = compiler if "clang" in compiler else f"{compiler} -fno-gnu-unique"
    for dtype in ("float32", "bfloat16"):
        library.handler_of("low_rank", jnp.dtype(dtype), target, apart)
    assert len(library.waiting_addresses) >= 4
    assert len(set(library.waiting_addresses)) == 1
