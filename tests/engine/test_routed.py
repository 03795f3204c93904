"""Experts of tokens, as answers tell them: those that the oracle's router chooses."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxpaged import LLM, InputError, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.models import loading, weights
from reference import model as reference
from tests import tiny
from tests.models.test_decoder import GOLDENS

FOLDER = GOLDENS / "families" / "glm4_moe"  # with a dense layer, and experts in groups
ASKED = {"enable_return_routed_experts": True, "enable_prefix_caching": False}


def oracles(token_ids: list[int], folder: Path = FOLDER) -> np.ndarray:
    """Return the experts of all tokens but the last: [tokens, layers, experts], zeros for a dense layer."""
    checkpoint = loading.open_checkpoint(folder)
    by_role = weights.by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())
    found: dict[str, list[list[int]]] = {}
    reference.logits(checkpoint.config, by_role, token_ids[:-1], routed=found)
    nothing = np.zeros((len(token_ids) - 1, 2), int)
    layers = range(checkpoint.config.num_layers)
    return np.stack([found.get(f"layers.{number}", nothing) for number in layers], axis=1)


@pytest.mark.slow
def test_answers_tell_the_experts_that_the_oracles_router_chooses():
    """Two answers to each prompt, which share its K and V; rows are preempted, for the pool is small. A part
    of an answer that is known is told of, too, and the prompt's beginning is left out where that is asked.
    """
    options = tiny.DEFAULTS | tiny.SMALL | {"generation_config": "vllm", "max_model_len": 128}
    llm = LLM(FOLDER, skip_tokenizer_init=True, **options | ASKED)
    prompts = [[3 + token % 58 for token in its] for its in tiny.prompts([40, 9, 33])]
    params = SamplingParams(n=2, max_tokens=25, temperature=1, seed=4, ignore_eos=True, detokenize=False)
    results = llm.generate(prompts, params)
    assert llm.engine.stats.num_preemptions > 0
    for result in results:
        for answer in result.outputs:
            want = oracles([*result.prompt_token_ids, *answer.token_ids])
            assert (want[:, 0] == 0).all()
            assert len(np.unique(want[:, 1:])) > 4
            assert answer.routed_experts.dtype == np.uint8
            np.testing.assert_array_equal(answer.routed_experts, want)
    answer = results[0].outputs[0]
    one = dataclasses.replace(params, n=1, routed_experts_prompt_start=38)
    prompt = {"prompt_token_ids": prompts[0], "continue_from": answer.token_ids[:20]}
    [rest] = llm.generate(prompt, one)
    assert rest.outputs[0].token_ids == answer.token_ids[20:]
    np.testing.assert_array_equal(rest.outputs[0].routed_experts, answer.routed_experts[38:])
    params = SamplingParams(routed_experts_prompt_start=10)
    with pytest.raises(
        InputError, match="^routed_experts_prompt_start=10 must be at most 9, the prompt's le"
    ):
        llm.generate(prompts[1], params)


def test_experts_that_cannot_be_told_are_refused():
    with pytest.raises(InputError, match="^enable_prefix_caching=True must be False with enable_return_rout"):
        EngineConfig(**tiny.DEFAULTS | ASKED | {"enable_prefix_caching": True})
    with pytest.raises(InputError, match="^enable_return_routed_experts=True must be False for a model with"):
        tiny.driver(**ASKED)
