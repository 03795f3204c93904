"""Tests of answers that are given, and replayed with what the sampler tells of them."""

import dataclasses

import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.sampling_params import SamplingParams
from reference import sampler as reference
from tests import tiny

PROMPTS = tiny.prompts([40, 9, 23])
SAMPLED = {"temperature": 0.9, "top_k": 30, "seed": 2, "logprobs": 3}


def told(driver, prompts, params):
    ids = tiny.submit(driver, prompts, params)
    found = tiny.drain(driver)
    return [(found[i].token_ids, found[i].scores) for i in ids]


@pytest.mark.slow
def test_a_given_answer_is_replayed_with_the_bits_of_its_sampling():
    """Replays run beside others, and are preempted: the pool holds a part of what runs."""
    eos = 3
    config = dataclasses.replace(tiny.CONFIG, eos_token_ids=(eos,))
    driver = tiny.driver(model_config=config, enable_trace_replay=True, **tiny.SMALL)
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
    trace = [5, eos, 5, 7, eos, 11]
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
