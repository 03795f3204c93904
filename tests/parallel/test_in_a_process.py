"""Cases that need several devices, in a process that has them: JAX makes all devices of a process at
once.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import slow_and_nightly

FOLDER = Path(__file__).parent
NUM_DEVICES = 8


@pytest.mark.parametrize("marks", slow_and_nightly(["not nightly", "nightly"], ["not nightly"]))
def test_the_cases_pass_on_several_devices(marks):
    files = [FOLDER / f"{name}.py" for name in ("cases", "group_cases", "outsider_cases", "device_cases")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-m", marks, *files]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(NUM_DEVICES)}
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
