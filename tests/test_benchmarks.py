"""What the benchmarks promise that needs no time to show."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import check_kernels
from pallas_kernels import ops
from tests.kernels import checks
from tests.shapes import case

FOLDER = Path(__file__).parents[1] / "benchmarks"


def test_a_benchmark_with_flags_is_imported_by_no_other():
    """absl's flags are one to a process: two modules may not both define --out."""
    trees = {file.stem: ast.parse(file.read_text()) for file in FOLDER.glob("*.py")}
    with_flags = {name for name, tree in trees.items() if "DEFINE_" in ast.unparse(tree)}
    assert {"check_kernels", "decode_attention", "decode_shapes", "step_overhead"} <= with_flags
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "benchmarks":
                assert not with_flags & {alias.name for alias in node.names}, name


def test_checking_the_kernels_without_their_gpu_fails():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.check_kernels"], cwd=FOLDER.parent, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "nothing is checked: JAX uses cpu, which is not a Hopper GPU" in done.stderr


def test_a_wrong_kernel_is_not_ok(monkeypatch):
    """XLA stands in for the kernels, which a CPU does not have. One compilation serves both cases."""
    traced = []

    @functools.partial(jax.jit, static_argnames=checks.STATIC)
    def right(**arguments):
        traced.append(arguments)
        return ops.paged_attention_v1(**arguments | {"implementation": "xla"})

    def plus(error):
        return lambda **arguments: right(**arguments) + error

    def raising(**_):
        raise NotImplementedError("no such kernel")

    nan_in_padding = jnp.zeros((5, 1, 1)).at[4].set(jnp.nan)
    programs = {"right": right, "wrong": plus(0.1), "nan": plus(nan_in_padding), "none": raising}
    monkeypatch.setattr(checks, "PROGRAMS", programs)
    lines = check_kernels.check(("around_a_block", "one_token"), interpret=False)
    assert [line["ok"] for line in lines] == 2 * [True, False, False, False]
    assert len(traced) == 1


def test_the_cases_are_served():
    assert all(checks.is_served(case(name)) for name in check_kernels.CASES)
