"""Channels and features, each of one table. Those of a test are an entry in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.api.outputs import request_output
from jaxpaged.engine.handle import RequestMetrics, collect
from jaxpaged.engine.request import Delta
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step import channels
from jaxpaged.step.channels import CANDIDATES, CHANNELS, EXPERTS, MASKS, Channel, Given, Per
from jaxpaged.step.config import MAX_STEPS
from jaxpaged.step.features import FEATURES, Feature
from jaxpaged.step.state import Rows
from tests import tiny

# The position of each token, and its largest logit: float32 [2].
TOY = Channel(
    "position_and_logit",
    option="",
    per=Per.TOKEN,
    like=lambda model, config: jax.ShapeDtypeStruct((2,), jnp.float32),
    of_choice=lambda choice: jnp.stack([choice.position.astype(jnp.float32), choice.logits.max(1)], axis=1),
)
# The logits of one or two tokens behind each place of a prompt from the fourth on, plus the numbers given.
TOY_PLACES = Channel(
    "logits_and_given",
    option="",
    per=Per.PLACE,
    like=lambda model, config: jax.ShapeDtypeStruct((2, 2), jnp.float32),
    given=lambda params: None if params.prompt_logprobs is None else Given(3, given(params.prompt_logprobs)),
    of_prompt=lambda logits, given: logits[:, 10:14].reshape(-1, 2, 2) + given,
)

# Seed of each request, which is added to all its tokens; passes that it was in, and the sum of its tokens.
TALLY = Feature(
    "tally",
    option="",
    empty=lambda num_rows, size: {name: np.zeros(num_rows, np.int32) for name in ("seed", "passes", "sum")},
    encode=lambda request, num_tokens: {"seed": request.params.seed or 0, "passes": 0, "sum": 0},
    before_pass=lambda its, rows, computes: its | {"passes": its["passes"] + computes},
    of_choice=lambda its, rows, row, choice: (choice.token_ids + its["seed"][row]) % tiny.CONFIG.vocab_size,
    after_choice=lambda its, rows, num_new: its | {"sum": its["sum"] + num_new * newest(rows)},
)
TALLIES = Channel(
    "tallies",
    option="",
    per=Per.TOKEN,
    like=lambda model, config: jax.ShapeDtypeStruct((2,), jnp.int32),
    of_choice=lambda choice: jnp.stack([choice.of_rows("tally")[name] for name in ("passes", "sum")], axis=1),
)


def newest(rows: Rows) -> jax.Array:
    """Return the newest token of each row."""
    return jnp.take_along_axis(rows.token_ids, rows.num_tokens[:, None] - 1, axis=1)[:, 0]


def given(num: int) -> np.ndarray:
    """Return numbers for five places, int32 [5, num, 2]."""
    return np.arange(10 * num, dtype=np.int32).reshape(5, num, 2)


@pytest.mark.slow
def test_what_is_one_entry_of_a_table_works_in_an_engine_and_comes_to_users(monkeypatch):
    """Check the values of answers that are longer than a run."""
    for channel in (TOY, TOY_PLACES, TALLIES):
        monkeypatch.setitem(CHANNELS, channel.name, channel)
    monkeypatch.setitem(FEATURES, TALLY.name, TALLY)
    driver = tiny.driver(max_num_seqs=3)  # a setup of no other test: sizes are kept by setup
    prompts = tiny.prompts([5, 9, 12, 7])
    each = [
        SamplingParams(
            max_tokens=MAX_STEPS + 8, temperature=0, ignore_eos=True, prompt_logprobs=num, seed=num
        )
        for num in (None, 1, 2, None)
    ]
    ids = tiny.submit(driver, prompts, each)
    requests = [tiny.request(driver, *its) for its in zip(ids, prompts, each, strict=True)]
    found = tiny.drain(driver)
    for request, prompt, params in zip(requests, prompts, each, strict=True):
        answer = found[request.request_id]
        metrics = [RequestMetrics(0.0, None, None)]
        told = request_output(request, None, [answer], metrics, None, finished=True)
        [output], num = told.outputs, params.prompt_logprobs
        positions, largest = output.channels[TOY.name].T
        assert positions.tolist() == [len(prompt) + place for place in range(MAX_STEPS + 8)]
        logits = tiny.reference_logits((*prompt, *answer.token_ids[:-1]))[len(prompt) - 1 :]
        np.testing.assert_allclose(largest, logits.max(1), rtol=1e-4)
        assert output.sampling_mask is None
        assert [*output.channels] == [TOY.name, TALLIES.name]
        seed, vocab_size = params.seed or 0, logits.shape[1]
        assert answer.token_ids == ((logits.argmax(1) + seed) % vocab_size).tolist()
        sums = np.cumsum([0, *answer.token_ids[:-1]])
        tallies = output.channels[TALLIES.name].tolist()
        assert tallies == [[1 + place, total] for place, total in enumerate(sums.tolist())]
        assert [*told.channels] == ([] if num is None else [TOY_PLACES.name])
        if num is not None:
            want = tiny.reference_logits(tuple(prompt))[3:8, 10 : 10 + 2 * num].reshape(5, num, 2)
            np.testing.assert_allclose(told.channels[TOY_PLACES.name], want + given(num), rtol=1e-4)
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


def test_what_a_request_gives_for_places_is_written_by_row_and_read_from_its_tiles():
    """A request may give less for a place than there is room for."""
    ids = np.array([[4, 5], [6, -1]], np.int32)
    asks = SamplingParams(prompt_logprob_token_ids=ids, prompt_logprob_start=33)
    lines = CANDIDATES.lines([(2, SamplingParams()), (7, asks)], (3,))
    assert (lines.dtype, lines.T.tolist()) == (np.int32, [[7, 33, 4, 5, -1], [7, 34, 6, -1, -1]])
    assert CANDIDATES.lines([], (3,)).shape == (5, 0)
    tiles = {32: np.arange(9).reshape(3, 3) + 100, 0: np.zeros((32, 3))}
    assert CANDIDATES.reported(asks, tiles).tolist() == [[103, 104], [106, 107]]
    assert CANDIDATES.reported(SamplingParams(), {}) is None


def test_deltas_are_joined_and_cut_by_channel():
    parts = [
        {MASKS.name: ((1, 2),), EXPERTS.name: np.zeros((4, 1)), CANDIDATES.name: np.ones((3, 2))},
        {MASKS.name: ()},
        {MASKS.name: ((3,), (4,)), EXPERTS.name: np.ones((2, 1))},
    ]
    deltas = [Delta(1, [0] * len(part[MASKS.name]), None, 0, channels=part) for part in parts]
    whole = collect(deltas).channels
    assert whole[MASKS.name] == ((1, 2), (3,), (4,))
    assert whole[EXPERTS.name].ravel().tolist() == [0, 0, 0, 0, 1, 1]
    cut = channels.without_last(whole, 2)
    assert (cut[MASKS.name], len(cut[EXPERTS.name]), len(cut[CANDIDATES.name])) == (((1, 2),), 4, 3)
    assert channels.joined([{}, {}]) == {}
