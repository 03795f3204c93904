"""Long random histories: every policy against its oracle, at three block sizes, with jit and without."""

import functools
import os

import pytest

from jaxpaged.memory.policies import POLICIES
from jaxpaged.research.verify import histories
from jaxpaged.research.verify.lockstep import Lockstep
from jaxpaged.research.verify.subjects import jitted
from tests.marks import slow_and_nightly

# Soaking: JAXPAGED_SOAK=20 runs twenty times as many histories.
SOAK = int(os.environ.get("JAXPAGED_SOAK", "1"))

pytestmark = pytest.mark.usefixtures("small_chunks")


def run(policy: str, block_size: int, max_examples: int, steps: int, **options: bool) -> None:
    make = functools.partial(Lockstep, policy, block_size, **options)
    histories.run(make, block_size, max_examples=max_examples * SOAK, steps=steps)


# Each policy at two block sizes; "naive" in every run, which frees to the head as "lifo" does.
# "lru" has one hash for all there; `tests/step/test_scheduler.py` compares its own.
QUICK = [("naive", 4)]
SLOW = [("lifo", 4), ("lru", 1), ("lru_split", 16)]
LONG = [("lifo", 1), ("naive", 16), ("lru", 16), ("lru_split", 4), *SLOW]
assert {policy for policy, _ in LONG} == POLICIES.keys()


@pytest.mark.parametrize(("policy", "block_size"), [*QUICK, *slow_and_nightly(LONG, SLOW)])
def test_policy_equals_its_oracle(policy: str, block_size: int) -> None:
    run(policy, block_size, max_examples=6, steps=36)
    for verb, times in jitted(policy, block_size).num_traces.items():
        assert times == 1, f"{verb} was compiled {times} times"


@pytest.mark.slow
def test_prefix_caching_is_exact_when_every_hash_is_the_same() -> None:
    run("lru", 4, max_examples=6, steps=40, collide=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_equals_its_oracle_without_jit(policy: str) -> None:
    run(policy, 4, use_jit=False, max_examples=2, steps=15)
