"""Example that trains: the importance ratio at its first step is 1, and the reward rises.

`test_ratio.py` has the ratio in programs that are compiled as users have them.
"""

import json
import runpy
import sys

import numpy as np
import pytest


@pytest.mark.slow
def test_the_example_of_grpo_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo", "--out", str(tmp_path), "--steps", "25"])
    runpy.run_module("examples.grpo", run_name="__main__")
    line = json.loads((tmp_path / "grpo.jsonl").read_text())
    assert line["ratios at step 0"] == [1.0, 1.0]
    assert np.mean(line["rewards"][:5]) < 0.6
    assert np.mean(line["rewards"][-5:]) > 0.75
    assert (tmp_path / "grpo.png").stat().st_size > 1000
