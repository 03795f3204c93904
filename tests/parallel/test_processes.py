"""Two processes with two devices each: `asks.py` runs in both, and answers as one process does."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import tiny_recursive

ROOT = Path(__file__).parents[2]
DEVICES = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
LIMIT = 240  # seconds, behind which what hangs is killed
ENDED = "jaxpaged: process {} of 2 has ended, and so must this one"


@contextlib.contextmanager
def started(*each):
    """Start a process for each of these options; they are killed at the end, or if they hang."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = []

    def kill():
        for process in processes:
            process.kill()

    late = threading.Timer(LIMIT, kill)
    late.start()
    try:
        for options in each:
            command = [sys.executable, "-m", "tests.parallel.asks", json.dumps(options)]
            started = subprocess.Popen(command, env=os.environ | DEVICES, cwd=ROOT, text=True, **pipes)
            processes.append(started)
        yield processes
    finally:
        late.cancel()
        kill()
        for process in processes:
            process.communicate()


def both(*, brief=False, **other):
    """Return the options of two processes of one engine, and what process 1 has otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    meets = {"tensor_parallel_size": 4, "distributed_init": address, "num_processes": 2, "brief": brief}
    return meets, meets | {"process_id": 1} | other


def next_answer(process):
    """Read the next answer; None if there is none. Gloo writes lines of its own."""
    return next((json.loads(line) for line in process.stdout if line.startswith("{")), None)


def tell(process, word):
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


@pytest.mark.slow
def test_two_processes_answer_as_one():
    with started(*both(), {}) as (leader, follower, alone):
        said = next_answer(leader)
        assert said, leader.communicate()[1][-4000:] + follower.communicate()[1][-4000:]
        assert said["aborted"] == ["NONE", "ABORT", True]
        assert said["free"]
        assert said["swapped"]
        assert said["told"] == [True, True]
        assert said["forgotten"]
        assert said["updated"][1:] == [True, True, 1]
        assert said["read_anew"]
        for i, (plain, adapted) in enumerate(zip(said["answers"], said["adapted"], strict=True)):
            assert (plain == adapted) == bool(i % 2), i
        oracle = tiny_recursive.oracle("sum")
        for tokens in said["followed"]:
            assert all(token in oracle.allowed(tokens[:i]) for i, token in enumerate(tokens))
        its_own = next_answer(alone)
        del said["aborted"], its_own["aborted"]  # one process may have been done before it heard
        assert said == its_own
        assert follower.poll() is None  # idle, and in no collective
        tell(leader, "no")
        assert (leader.wait(60), follower.wait(60)) == (0, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("end", ["states differ", "follower killed", "leader killed"])
def test_two_processes_end_together(end):
    with started(*both(differs=end == "states differ", brief=True)) as (leader, follower):
        assert next_answer(leader) == {"free": True}
        tell(leader, "more")
        assert next_answer(leader) == {"more": True}
        if end == "states differ":
            assert (leader.wait(60), follower.wait(60)) == (1, 0)
            assert "the devices of a model have come to different states" in leader.stderr.read()
            return
        dies, stays = (leader, follower) if end == "leader killed" else (follower, leader)
        began = time.monotonic()
        dies.kill()
        assert stays.wait(10) == 1
        assert time.monotonic() - began < 10
        assert stays.stderr.read().count(ENDED.format([leader, follower].index(dies))) == 1


@pytest.mark.slow
def test_a_process_with_another_engine_is_refused():
    """Before it has done anything: it waits for process 0's word."""
    with started(*both(seed=7, begins="tells")) as (leader, follower):
        error = leader.communicate()[1]
        assert "process 1's seed must be process 0's, 0, but is 7" in error
        told, other_error = follower.communicate()
        assert other_error.count(ENDED.format(0)) == 1
        assert "begins" not in told
        assert (leader.returncode, follower.returncode) == (1, 1)


@pytest.mark.slow
def test_all_end_where_process_0_fails_to_start():
    meets, follows = both(begins="tells")
    with started(meets | {"begins": "fails"}, follows) as (leader, follower):
        assert next_answer(follower) == {"begins": True}
        began = time.monotonic()
        assert "no such file" in leader.communicate()[1]
        assert follower.communicate()[1].count(ENDED.format(0)) == 1
        assert time.monotonic() - began < 20
        assert (leader.returncode, follower.returncode) == (1, 1)
