"""Whole histories of the engine against `reference.engine`: who runs, with which blocks, with what answer."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.lockstep import LockStep, Setting, workloads

SETTINGS = [
    Setting("roomy", num_blocks=1 + 90),
    Setting("tight", num_blocks=1 + 17),
    Setting("swap", num_blocks=1 + 17, num_host_blocks=1 + 8),
    Setting("window", num_blocks=1 + 14, num_tiles=1, sliding_window=10, num_host_blocks=1 + 6),
    Setting(
        "big blocks", num_blocks=1 + 5, block_size=24, num_tiles=1, watermark_blocks=1, reuse_answers=True
    ),
    Setting("no caching", num_blocks=1 + 30, block_size=3, prefix_caching=False),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_step_is_the_oracles(setting, data):
    priorities = data.draw(st.booleans())
    LockStep(setting).run(data.draw(workloads(setting, priorities=priorities)))
