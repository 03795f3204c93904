"""Channels: values of tokens, of one table. A channel of a test is one entry in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.api.outputs import request_output
from jaxpaged.engine.handle import RequestMetrics, collect
from jaxpaged.engine.request import Delta
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step import channels
from jaxpaged.step.channels import CHANNELS, EXPERTS, MASKS, Channel, Per
from jaxpaged.step.config import MAX_STEPS
from tests import tiny

# The position of each token, and its largest logit: float32 [2].
TOY = Channel(
    "position_and_logit",
    option="",
    per=Per.TOKEN,
    like=lambda config: jax.ShapeDtypeStruct((2,), jnp.float32),
    of_choice=lambda choice: jnp.stack([choice.position.astype(jnp.float32), choice.logits.max(1)], axis=1),
)


@pytest.mark.slow
def test_a_channel_that_is_one_entry_of_the_table_comes_to_users(monkeypatch):
    """Check the values of answers that are longer than a run."""
    monkeypatch.setitem(CHANNELS, TOY.name, TOY)
    driver = tiny.driver(max_num_seqs=3)  # a setup of no other test: sizes are kept by setup
    prompts = tiny.prompts([5, 9, 12, 7])
    params = SamplingParams(max_tokens=MAX_STEPS + 8, temperature=0, ignore_eos=True)
    ids = tiny.submit(driver, prompts, params)
    requests = [tiny.request(driver, i, prompt, params) for i, prompt in zip(ids, prompts, strict=True)]
    found = tiny.drain(driver)
    for request, prompt in zip(requests, prompts, strict=True):
        answer = found[request.request_id]
        metrics = [RequestMetrics(0.0, None, None)]
        [output] = request_output(request, None, [answer], metrics, None, finished=True).outputs
        positions, largest = output.channels[TOY.name].T
        assert positions.tolist() == [len(prompt) + place for place in range(MAX_STEPS + 8)]
        logits = tiny.reference_logits((*prompt, *answer.token_ids[:-1]))[len(prompt) - 1 :]
        np.testing.assert_allclose(largest, logits.max(1), rtol=1e-4)
        assert output.sampling_mask is None
    tiny.assert_nothing_is_held(driver)


def test_values_by_position_begin_with_the_prompt_and_leave_the_newest_token_out():
    newest = np.arange(MAX_STEPS, dtype=np.uint8)
    params = SamplingParams(routed_experts_prompt_start=2)
    everything = np.arange(100, dtype=np.uint8)

    def new(num_tokens: int, num_new: int, *, begins: bool) -> list[int] | None:
        values = EXPERTS.new_values(
            newest, num_tokens, num_new, (lambda: everything) if begins else None, params
        )
        return None if values is None else values.tolist()

    assert new(6, 1, begins=True) == [2, 3, 4]
    assert new(8, 2, begins=False) == [5, 6]
    assert new(90, 2, begins=False) == [MAX_STEPS - 2, MAX_STEPS - 1]
    assert new(8, 0, begins=False) is None


def test_deltas_are_joined_and_cut_by_channel():
    parts = [
        {MASKS.name: ((1, 2),), EXPERTS.name: np.zeros((4, 1))},
        {MASKS.name: ()},
        {MASKS.name: ((3,), (4,)), EXPERTS.name: np.ones((2, 1))},
    ]
    deltas = [Delta(1, [0] * len(part[MASKS.name]), None, 0, channels=part) for part in parts]
    whole = collect(deltas).channels
    assert whole[MASKS.name] == ((1, 2), (3,), (4,))
    assert whole[EXPERTS.name].ravel().tolist() == [0, 0, 0, 0, 1, 1]
    cut = channels.without_last(whole, 2)
    assert (cut[MASKS.name], len(cut[EXPERTS.name])) == (((1, 2),), 4)
    assert channels.joined([{}, {}]) == {}
