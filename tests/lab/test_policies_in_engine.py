"""Policies that rank blocks, inside the compiled serving loop."""

import pytest

from jaxpaged.memory.invariants import check_invariants
from tests import tiny


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lfu", "s3fifo"])
def test_answers_are_the_same_under_any_policy_and_short_pools(policy):
    """Prompts that share how they begin, preempted and found again, twice."""
    first, *others = tiny.prompts([24, 20, 30, 12, 25])
    prompts = [first, *(first[:16] + other for other in others), first]
    driver = tiny.driver(**tiny.SMALL, eviction_policy=policy)
    for _ in range(2):
        answers = tiny.generate(driver, prompts, tiny.greedy(40))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == tiny.reference_answer(tuple(prompt), 40)
    assert driver.stats.num_preemptions > 0
    assert driver.stats.num_hit_tokens > 0
    tiny.assert_nothing_is_held(driver)
    check_invariants(driver.state.tables)
