"""Tests of the numbers that an engine tells of its tokens, when they are not the model's own."""

import numpy as np
import pytest

from jaxpaged.sampling_params import SamplingParams
from reference import sampler as reference
from tests import tiny


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["processed_logprobs", pytest.param("processed_logits", marks=pytest.mark.nightly)]
)
def test_an_engine_tells_processed_numbers_of_answers_and_the_models_own_of_prompts(mode):
    driver = tiny.driver(logprobs_mode=mode)
    asked = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    bias = {5: 2.0, 9: -50.0}
    params = SamplingParams(
        max_tokens=9, seed=1, logprobs=4, prompt_logprobs=0, logit_bias=bias, ignore_eos=True, **asked
    )
    prompts = tiny.prompts([40, 9])
    ids = tiny.submit(driver, prompts, params)
    found = tiny.drain(driver)
    for prompt, i in zip(prompts, ids, strict=True):
        answer, scores = found[i].token_ids, found[i].scores
        logits = tiny.reference_logits((*prompt, *answer[:-1]))
        for place, token in enumerate(answer):
            its = logits[len(prompt) - 1 + place]
            changed = reference.edited(its, prompt, answer[:place], logit_bias=bias)
            want = reference.told(its, changed, mode, **asked)
            np.testing.assert_allclose(scores[place].logprob, want[token], atol=1e-3)
        own = reference.logprobs(logits)[range(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose([score.logprob for score in found[i].prompt_scores[1:]], own, atol=1e-3)
