"""Tests of what trainers ask of answers: replays of given ones, and what tokens were chosen from."""

import dataclasses

import numpy as np
import pytest

from jaxpaged.api.outputs import request_output
from jaxpaged.checks import InputError
from jaxpaged.engine.handle import RequestMetrics
from jaxpaged.sampling_params import SamplingParams
from reference import sampler as reference
from tests import tiny

PROMPTS = tiny.prompts([40, 9, 23])
EOS = 3
SAMPLED = {"temperature": 0.9, "top_k": 30, "seed": 2, "logprobs": 3}


def told(driver, prompts, params):
    ids = tiny.submit(driver, prompts, params)
    found = tiny.drain(driver)
    return [(found[i].token_ids, found[i].scores) for i in ids]


@pytest.fixture(scope="module")
def driver():
    config = dataclasses.replace(tiny.CONFIG, eos_token_ids=(EOS,))
    return tiny.driver(model_config=config, enable_trace_replay=True, return_sampling_mask=True, **tiny.SMALL)


@pytest.mark.slow
def test_a_given_answer_is_replayed_with_the_bits_of_its_sampling(driver):
    """Replays run beside others, and are preempted: the pool holds a part of what runs."""
    plain = SamplingParams(max_tokens=30, ignore_eos=True, **SAMPLED)
    sampled = told(driver, PROMPTS, plain)
    again = [
        SamplingParams(
            max_tokens=50, trace_decode_token_ids=tokens, **SAMPLED | {"seed": 9, "temperature": 0}
        )
        for tokens, _ in sampled
    ]
    preempted = driver.stats.num_preemptions
    assert told(driver, PROMPTS * 2, [*again, plain, plain, plain]) == sampled * 2
    assert driver.stats.num_preemptions > preempted
    trace = [5, EOS, 5, 7, EOS, 11]
    cut = SamplingParams(max_tokens=4, trace_decode_token_ids=trace, **SAMPLED)
    [(tokens, scores), (short, _)] = told(
        driver, PROMPTS[:2], [SamplingParams(trace_decode_token_ids=trace, **SAMPLED), cut]
    )
    want = []
    for _ in range(9):
        want.append(reference.chosen(-1, want, trace))
    assert tokens == want[: want.index(-1)]
    assert short == trace[:4]
    own = reference.logprobs(tiny.reference_logits((*PROMPTS[0], *trace[:-1])))[len(PROMPTS[0]) - 1 :]
    np.testing.assert_allclose([score.logprob for score in scores], own[range(len(trace)), trace], atol=1e-3)
    with pytest.raises(InputError, match="trace_decode_token_ids: token=.* must be a token id"):
        tiny.submit(driver, PROMPTS[:1], SamplingParams(trace_decode_token_ids=[1, 10**6]))
    tiny.assert_nothing_is_held(driver)


@pytest.mark.slow
def test_answers_tell_what_their_tokens_were_chosen_from(driver):
    """Filters, rules and greedy rows run side by side, and are preempted: the pool holds a part of them."""
    preempted = driver.stats.num_preemptions
    filters = [
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 0},
    ]
    bias = {5: 3.0, 9: -50.0}
    params = [
        SamplingParams(max_tokens=40, seed=i, ignore_eos=True, logit_bias=bias, **each)
        for i, each in enumerate(filters)
    ]
    ids = tiny.submit(driver, PROMPTS, params)
    requests = [
        tiny.request(driver, i, prompt, its) for i, prompt, its in zip(ids, PROMPTS, params, strict=True)
    ]
    found = tiny.drain(driver)
    assert driver.stats.num_preemptions > preempted
    for request, prompt, each in zip(requests, PROMPTS, filters, strict=True):
        answer = found[request.request_id]
        logits = tiny.reference_logits((*prompt, *answer.token_ids[:-1]))[len(prompt) - 1 :]
        want = []
        for place in range(40):
            changed = reference.edited(logits[place], prompt, answer.token_ids[:place], logit_bias=bias)
            want.append(tuple(reference.support(changed, **each)))
        assert list(answer.support) == want
        assert all(token in left for token, left in zip(answer.token_ids, answer.support, strict=True))
        [output] = request_output(
            request, None, [answer], [RequestMetrics(0.0, None, None)], None, finished=True
        ).outputs
        assert output.sampling_mask.token_ids == [*map(list, want)]
    assert max(map(len, found[ids[0]].support)) > 1
    tiny.assert_nothing_is_held(driver)
