"""Compiled kernels on the machine: right, without a race, with few bank conflicts; planted faults show.

launches/decode.npz is made by `python -m benchmarks.compile_ptx --capability=8.0 --capability=9.0
--capability=10.0 --capability=12.0 --out tests/ptx/launches/decode.npz decode_small decode_merge`.
"""

import contextlib
import functools
from pathlib import Path

import pytest

from jaxpaged.cli import main
from jaxpaged.research.ptx import launch
from jaxpaged.research.ptx.faults import Fault
from jaxpaged.research.ptx.planted import planted

FILE = Path(__file__).parent / "launches" / "decode.npz"
TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
# Wavefronts of shared memory as a multiple of the least, of a target's decode steps: reductions and the
# output's exchange have conflicts, the tiles have none.
EXCESS = {"sm_80": 1.36, "sm_90a": 1.98, "sm_100a": 1.48, "sm_120a": 1.48}


@functools.cache
def launches():
    return {(one.name, one.target): one for one in launch.load(FILE)}


@pytest.mark.parametrize("target", TARGETS)
def test_a_merge_of_partitions_is_right_in_any_order(target):
    """Two blocks, of which the last to arrive merges: weak order between them, late copies."""
    outcome = launch.run(launches()["decode_merge", target], seed=1)
    assert outcome.share <= 1
    assert outcome.races == []
    counts = outcome.counts
    assert counts.excess <= EXCESS[target]
    tiles = "cp.async" if target == "sm_80" else "ldmatrix"
    assert counts.wavefronts[tiles] > 0
    # Four tiles of 64 tokens of K and V, 64 numbers of 16 bits each, and the queries: each sector once.
    brought = counts.sectors["cp.async"] + counts.sectors["tensor copies"]
    assert brought <= 4 * 64 * 2 * 64 * 2 // 32 + 100


@pytest.mark.parametrize(
    ("target", "what", "at"),
    [
        ("sm_80", "a wait for an mbarrier removed", 0),
        ("sm_80", "ldmatrix not transposed", 0),
        ("sm_90a", "a proxy fence removed", 0),
        ("sm_90a", "wgmma.wait_group removed", 0),
        ("sm_90a", "stmatrix not transposed", 0),
        ("sm_120a", "an atomic that is relaxed", 0),
    ],
)
def test_a_planted_fault_shows(target, what, at):
    name = "decode_merge" if what.startswith("an atomic") else "decode_small"
    one = launches()[name, target]
    text = list(planted(one.ptx, what))[at]
    with contextlib.suppress(Fault):
        assert not launch.run(one, ptx=text).is_right


def test_the_command_says_what_is_right(capsys, tmp_path):
    wrong = tmp_path / "wrong.npz"
    one = launches()["decode_small", "sm_80"]
    launch.save(wrong, [one])
    assert main(["verify", "ptx", str(wrong)]) == 0
    assert "right decode_small on sm_80, seed 0: error" in capsys.readouterr().out
    assert main(["verify", "ptx", str(tmp_path / "none.npz")]) != 0
    assert "must be a file of launches" in capsys.readouterr().err
