"""Kernels as they are now, compiled for every target that is described, on the machine of PTX."""

import jax
import pytest

from benchmarks import cuda_compiler
from jaxpaged.research.ptx import launch
from pallas_kernels.gpu.targets import TARGETS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(cuda_compiler.missing_packages()), reason="the cuda-compile extra is not installed"
    ),
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="before JAX 0.12 kernels are not mpmd_map"),
]


@pytest.mark.parametrize("capability", TARGETS)
def test_a_merge_is_right_as_compiled_now(capability, tmp_path):
    file = tmp_path / "launches.npz"
    arguments = ["--here", f"--out={file}", f"--capability={capability}", "decode_merge"]
    cuda_compiler.run("benchmarks.compile_ptx", arguments)
    [one] = launch.load(file)
    outcome = launch.run(one)
    assert outcome.share <= 1
    assert outcome.races == []
