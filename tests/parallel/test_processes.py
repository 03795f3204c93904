"""Two processes with two devices each: `asks.py` runs in both, and answers as one process does."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICES = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}


def start(options):
    command = [sys.executable, "-m", "tests.parallel.asks", json.dumps(options)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | DEVICES, cwd=ROOT, text=True, **pipes)


def start_both():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    meets = {"tensor_parallel_size": 4, "distributed_init": address, "num_processes": 2}
    return [start(meets | {"process_id": i}) for i in range(2)]


def next_answer(process):
    """None if there is none; gloo writes lines of its own."""
    return next((json.loads(line) for line in process.stdout if line.startswith("{")), None)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["normal", "follower killed", "leader killed"])
def test_two_processes_answer_as_one_and_end_together(end):
    processes = [*start_both(), *([start({})] if end == "normal" else [])]
    leader, follower, *alone = processes
    try:
        said = next_answer(leader)
        assert said, leader.communicate()[1][-4000:] + follower.communicate()[1][-4000:]
        assert said["aborted"] == ["NONE", "ABORT", True]
        assert said["free"]
        if end == "normal":
            assert said == next_answer(alone[0])
            assert follower.poll() is None  # idle, and in no collective
            leader.stdin.write("no\n")
            leader.stdin.flush()
            assert (leader.wait(60), follower.wait(60)) == (0, 0)
            return
        leader.stdin.write("more\n")
        leader.stdin.flush()
        assert next_answer(leader) == {"more": True}
        dies, stays = (leader, follower) if end == "leader killed" else (follower, leader)
        began = time.monotonic()
        dies.kill()
        assert stays.wait(10) == 1
        assert time.monotonic() - began < 10
        number = processes.index(dies)
        sentence = f"jaxpaged: process {number} of 2 has ended, and so must this one"
        assert stays.stderr.read().count(sentence) == 1
    finally:
        for process in processes:
            process.kill()
            process.communicate()
