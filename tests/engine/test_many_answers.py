"""Thousands of answers to one prompt, more than there are rows: its blocks are held once."""

import pytest

from jaxpaged.sampling_params import SamplingParams
from tests import tiny


@pytest.mark.parametrize(
    "count", [64, pytest.param(512, marks=pytest.mark.slow), pytest.param(4096, marks=pytest.mark.nightly)]
)
def test_answers_in_turns_hold_the_prompts_blocks_once(count):
    """Four rows take turns. Each answer is the one that its seed gives alone."""
    driver = tiny.driver()
    [prompt] = tiny.prompts([33])  # four full blocks; each answer has one more of its own
    params = SamplingParams(n=count, max_tokens=2, temperature=1, seed=1, ignore_eos=True)
    requests = tiny.numbered(driver.door.admit(prompt, params))
    for request in requests:
        driver.add(request)
    held, tokens = 0, {}
    while driver.has_work:
        for delta in driver.turn(max_steps=1):
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        held = max(held, driver.stats.num_blocks - driver.stats.num_free_blocks)
    assert held == 4 + 4
    assert driver.stats.num_preemptions == 0
    found = [tuple(tokens[request.request_id]) for request in requests]
    assert len(set(found)) > count // 2
    for i in (0, 1, count // 2, count - 1):
        [alone] = tiny.generate(driver, [prompt], [params.of_answer(i)])
        assert tuple(alone) == found[i]
    tiny.assert_nothing_is_held(driver)
