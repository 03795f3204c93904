"""Scores of completions, by a model that answers and by its learner: bit for bit what its sampler tells,
and the oracle's.
"""

import dataclasses

import numpy as np
import pytest

from jaxpaged import InputError, SamplingParams
from jaxpaged.research.learn.learner import padded
from reference import sampler as reference
from tests import tiny


def test_scores_of_completions_are_the_samplers_to_the_bit(llm):
    prompts = tiny.prompts([40, 9, 33])
    params = SamplingParams(max_tokens=12, temperature=1, seed=4, logprobs=0, ignore_eos=True)
    answers = [result.outputs[0] for result in llm.generate(prompts, params)]
    told = [[its[token].logprob for its, token in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
    found = llm.score(prompts, [answer.token_ids for answer in answers])
    for prompt, answer, its, score in zip(prompts, answers, told, found, strict=True):
        assert (score.prompt_token_ids, score.token_ids) == (prompt, list(answer.token_ids))
        assert score.logprobs.tolist() == its
        logits = tiny.reference_logits((*prompt, *answer.token_ids))[len(prompt) - 1 : -1]
        want = reference.logprobs(logits)[range(12), answer.token_ids]
        np.testing.assert_allclose(score.logprobs, want, atol=1e-4)
    whole = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    learned = np.asarray(llm.learner().log_probs(llm.weights, *padded(whole)))
    for row, prompt, its in zip(learned, prompts, told, strict=True):
        assert row[len(prompt) - 1 :][:12].tolist() == its
    [alone] = llm.score(prompts[1], answers[1].token_ids)
    assert dataclasses.asdict(alone)["logprobs"].tolist() == told[1]


def test_completions_that_cannot_be_scored_are_refused(llm):
    for prompts, completions, message in (
        ([[3], [4]], [[5]], "^completions has 1 entries, must have one for each of 2 prompts$"),
        ([[3]], [[]], r"^completion 0=\[\] must be a text or token ids, not empty$"),
        ([[]], [[3]], r"^prompt 0=\[\] must be a text or token ids, not empty$"),
    ):
        with pytest.raises(InputError, match=message):
            llm.score(prompts, completions)
