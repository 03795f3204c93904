"""Engines over models with states: an answer has the bits of a prompt that has it."""

import numpy as np
import pytest

from jaxpaged.models.config import STATE
from jaxpaged.sampling_params import SamplingParams
from tests import tiny, tiny_states
from tests.marks import slow_and_nightly

# Optimised programs alone show what XLA rounds otherwise in passes of another shape.
pytestmark = pytest.mark.usefixtures("optimized")
SLOW = [(tiny_states.CONVOLUTION, (STATE,), 4, 64), (tiny_states.MAMBA, (), 4, 36)]
CASES = [
    *SLOW,
    (tiny_states.CONVOLUTION, (), 1, 33),
    (tiny_states.DELTA, (), 1, 33),
    (tiny_states.DELTA, (), 4, 64),
    (tiny_states.MAMBA, (), 2, 66),
    (tiny_states.MAMBA_1, (), 2, 66),
    (tiny_states.LIGHTNING, (), 2, 66),
    (tiny_states.MAMBA, tiny_states.ONE_PART, 2, 66),
    (tiny_states.MAMBA, (tiny_states.BOTH, tiny_states.BOTH), 2, 66),
]


@pytest.mark.parametrize(("mixer", "kinds", "rows", "tokens"), slow_and_nightly(CASES, SLOW))
def test_an_answer_has_the_log_probabilities_of_a_prompt(mixer, kinds, rows, tokens):
    driver = tiny_states.driver(mixer, *kinds, max_num_seqs=rows, max_num_batched_tokens=tokens)

    def ask(prompt, **options):
        params = SamplingParams(temperature=0, ignore_eos=True, **options)
        [request] = tiny.numbered(driver.door.admit(prompt, params))
        driver.add(request)
        return tiny.drain(driver)[request.request_id]

    rng = np.random.default_rng(0)
    for length in [1, 2, 7, 8, 20, 33] * 2:
        prompt = rng.integers(0, driver.door.model_config.vocab_size, length).tolist()
        answer = ask(prompt, max_tokens=40, logprobs=0)
        whole = ask([*prompt, *answer.token_ids], max_tokens=1, prompt_logprobs=0)
        assert [score.logprob for score in answer.scores] == [
            score.logprob for score in whole.prompt_scores[len(prompt) :]
        ]
