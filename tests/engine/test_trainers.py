"""Tests of what trainers ask of answers: replays of given ones, and what tokens were chosen from."""

import dataclasses

import numpy as np
import pytest

from jaxpaged.api.outputs import request_output
from jaxpaged.checks import InputError
from jaxpaged.engine.handle import RequestMetrics
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.channels import CANDIDATES
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
    asked = {"enable_trace_replay": True, "return_sampling_mask": True, "max_prompt_logprob_token_ids": 5}
    return tiny.driver(model_config=config, **asked, **tiny.SMALL)


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
        assert list(answer.channels["sampling_mask"]) == want
        assert all(token in left for token, left in zip(answer.token_ids, want, strict=True))
        [output] = request_output(
            request, None, [answer], [RequestMetrics(0.0, None, None)], None, finished=True
        ).outputs
        assert output.sampling_mask.token_ids == [*map(list, want)]
    assert max(map(len, found[ids[0]].channels["sampling_mask"])) > 1
    tiny.assert_nothing_is_held(driver)


@pytest.mark.slow
def test_candidates_behind_a_prompt_s_places_are_scored(driver):
    """The second time all prompts are cached, and the pool holds a part of them. Others ask for nothing."""
    rng, starts = np.random.default_rng(0), (None, 3, 20)
    lines = [len(prompt) - 1 - (start or 0) for prompt, start in zip(PROMPTS, starts, strict=True)]
    ids = [rng.integers(0, tiny.CONFIG.vocab_size, (n, k)) for n, k in zip(lines, (5, 1, 4), strict=True)]
    ids[0][:, 2] = PROMPTS[0][1:]
    ids[2][1, 2:] = -1
    # One as lists of several lengths, as Python has them.
    given = [ids[0], ids[1], [line[line >= 0].tolist() for line in ids[2]]]
    params = [
        SamplingParams(
            max_tokens=30,
            prompt_logprob_token_ids=each,
            prompt_logprob_start=start,
            ignore_eos=True,
            **SAMPLED,
        )
        for each, start in zip(given, starts, strict=True)
    ]
    params[0].prompt_logprobs = 1
    plain = SamplingParams(max_tokens=30, ignore_eos=True, **SAMPLED)
    preempted = driver.stats.num_preemptions
    for _ in range(2):
        queued = tiny.submit(driver, PROMPTS * 2, [*params, plain, plain, plain])
        found = tiny.drain(driver)
        for number, prompt, its, start in zip(queued, PROMPTS, ids, starts, strict=False):
            told = found[number].channels[CANDIDATES.name]
            assert (told.dtype, told.shape) == (np.float32, its.shape)
            want = reference.candidate_logprobs(
                tiny.reference_logits(tuple(prompt)), its.tolist(), start or 0
            )
            np.testing.assert_allclose(told, want, atol=1e-3)
        scores = found[queued[0]].prompt_scores[1:]
        of_third = found[queued[0]].channels[CANDIDATES.name][:, 2]
        assert of_third.tolist() == [score.logprob for score in scores]
        assert [found[i].prompt_scores for i in queued[1:]] == [None] * 5
        assert [found[i].channels.get(CANDIDATES.name) for i in queued[3:]] == [None] * 3
        answers = [found[i].token_ids for i in queued]
        assert answers[:3] == answers[3:]
    assert driver.stats.num_preemptions > preempted
    told = found[queued[2]]
    output = request_output(
        tiny.request(driver, 1, PROMPTS[2], params[2]),
        None,
        [told],
        [RequestMetrics(0.0, None, None)],
        None,
        finished=True,
    )
    assert output.prompt_token_id_logprobs is told.channels[CANDIDATES.name]
    assert np.isneginf(output.prompt_token_id_logprobs[1, 2:]).all()
    tiny.assert_nothing_is_held(driver)


@pytest.mark.slow
def test_candidates_that_cannot_be_scored_are_refused(driver):
    def asking(ids, start=None, **more):
        return SamplingParams(prompt_logprob_token_ids=ids, prompt_logprob_start=start, **more)

    for params, message in (
        (
            asking([[1]] * 7),
            "^prompt_logprob_token_ids has 7 lines, must have 8, one for each token of the prompt",
        ),
        (
            asking([[1]] * 8, 2),
            "must have 6, one for each token of the prompt behind place prompt_logprob_start=2$",
        ),
        (
            asking([[1] * 6] * 8),
            "^number of ids in a line of .*=6 must be at most max_prompt_logprob_token_ids=5$",
        ),
        (
            asking([[97]] * 8),
            r"^prompt_logprob_token_ids: token=97 must be -1 or a token id, an int in \[0, 97\)$",
        ),
    ):
        with pytest.raises(InputError, match=message):
            driver.door.admit(PROMPTS[1], params)
    with pytest.raises(InputError, match="^prompt_logprob_token_ids=.* must be None with continue_from$"):
        driver.door.admit(PROMPTS[1], asking([[1]] * 8), continue_from=[1])
    several = driver.door.admit(PROMPTS[1], asking([[1]] * 8, temperature=1, n=2))
    assert [each.params.tells_prompt for each in several] == [True, False]
    for ids in (5, [], [[]], [1, 2], [[1.5]], [[-2]], np.zeros(3, np.int32), np.zeros((2, 2), np.float32)):
        with pytest.raises(
            InputError, match="^prompt_logprob_token_ids=.* must be None, or lists of token ids or"
        ):
            asking(ids)
    with pytest.raises(
        InputError, match="^prompt_logprob_start=1 must be None without prompt_logprob_token_ids$"
    ):
        asking(None, 1)
