"""A row changes hands while the report of a run is on its way: what that tells is of who was in it then."""

import dataclasses

import pytest

from jaxpaged.sampling_params import SamplingParams
from tests import tiny, tiny_lora


def told(found, ids):
    return [dataclasses.replace(found[i], request_id=0, num_hit_tokens=0) for i in ids]


@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.9, "seed": 4}],
    ids=["plain", "scores"],
)
def test_who_is_taken_back_and_gets_its_row_again_answers_as_if_it_had_not(more):
    """Take back all at any moment: who waits, whose prompt is being computed, who decodes, who has ended
    unread. The report of the run before, in which they had the same rows, is not of these stays.
    """
    driver = tiny.driver(**tiny.SMALL)
    params = SamplingParams(**{"max_tokens": 9, "temperature": 0.0, "ignore_eos": True} | more)
    prompts = tiny.prompts([60, 12, 33])
    alone = []
    for prompt in prompts:
        ids = tiny.submit(driver, [prompt], params)
        alone += told(tiny.drain(driver), ids)
    for turns in range(1, 9):
        ids = tiny.submit(driver, prompts, params)
        deltas = [delta for n in (*[1] * turns, 4) for delta in driver.turn(max_steps=n)]
        rows = {place.request.request_id: row for row, place in driver.rows.taken()}
        driver.recall(list(rows.values()))
        deltas += driver.turn(max_steps=2)
        assert {place.request.request_id: row for row, place in driver.rows.taken()}.items() <= rows.items()
        while driver.has_work:
            deltas += driver.turn(max_steps=5)
        found = {i: tiny.collect([delta for delta in deltas if delta.request_id == i]) for i in ids}
        assert told(found, ids) == alone
        tiny.assert_nothing_is_held(driver)


def test_nobody_is_taken_back_for_who_waits_for_an_adapters_room(tmp_path):
    """Eight urgent requests wait for room for their adapter while three others run; those in rows who are
    less urgent have their turn meanwhile, each when it comes.
    """
    driver = tiny_lora.driver(tmp_path, scheduling_policy="priority")

    def add(prompt, max_tokens, priority, seed=None):
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        lora = None if seed is None else tiny_lora.request(tmp_path, seed)
        [request] = tiny.numbered(driver.door.admit(prompt, params, priority=priority, lora_request=lora))
        driver.add(request)
        return request.request_id, seed, prompt, max_tokens

    prompts = tiny.prompts([9, 12, 5, 7, 8, 6, 10, 11, *[9] * 8], seed=8)
    asked = [add(prompts[i], 60, 5, i) for i in range(3)]
    asked += [add(prompt, 6, 6) for prompt in prompts[3:8]]
    deltas = driver.turn(max_steps=1) + driver.turn(max_steps=1)
    assert len(driver.rows.free_rows) == 0
    asked += [add(prompt, 3, 0, 3) for prompt in prompts[8:]]
    while driver.has_work:
        deltas += driver.turn(max_steps=2)
    ended = [delta.request_id for delta in deltas if delta.finish_reason]
    ids = [its[0] for its in asked]
    assert set(ended[:5]) == set(ids[3:8]), "before those with adapters, who run ten times as long"
    for request_id, seed, prompt, length in asked:
        answer = tiny.collect([delta for delta in deltas if delta.request_id == request_id])
        assert answer.token_ids == tiny_lora.reference_answer(seed, prompt, length)
    tiny.assert_nothing_is_held(driver)
