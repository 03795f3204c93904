"""A few workloads of the fuzzer, in engines whose programs other tests have; `fuzz.py` runs for longer."""

import dataclasses

import pytest

from jaxpaged.engine.request import DraftCounts
from jaxpaged.sampling_params import SamplingParams
from pallas_kernels.native import attention
from tests import tiny
from tests.engine.fuzz import NUM_ASKS, Fuzz
from tests.marks import slow_and_nightly

DRAFTING = ["swap, drafts", "swap, suffixes", "swap, drafts by itself", "swap, drafts by another"]
DRAFTING += ["swap, drafts by a head", "adapters, drafts", "adapters, drafts by a head"]


@pytest.mark.parametrize(
    "setting", slow_and_nightly(["adapters", "swap", "swap, tiers"], ["swap", "swap, tiers"])
)
def test_answers_in_random_company_are_those_of_the_request_alone(setting, tmp_path):
    fuzz = Fuzz(setting, tmp_path)
    counts = [fuzz.run(seed) for seed in range(6)]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True)), "some whole, and some given up"
    tiers = fuzz.driver.stats.tiers
    assert not tiers or tiers["host"].num_hits > 20


@pytest.mark.nightly
def test_answers_behind_prefixes_that_are_read_once_are_those_of_the_request_alone(tmp_path, monkeypatch):
    """Attention shares any prefix of several rows, however short: several answers, beams and cache hits."""
    monkeypatch.setattr(attention, "LEAST_SAVED", 0)
    fuzz = Fuzz("swap, prefixes read once", tmp_path)
    counts = [fuzz.run(seed) for seed in range(6)]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True)), "some whole, and some given up"


@pytest.mark.slow
def test_answers_of_a_model_with_states_are_those_of_the_request_alone(tmp_path):
    fuzz = Fuzz("states, swap", tmp_path)
    counts = [fuzz.run(seed) for seed in range(4)]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True)), "some whole, and some given up"


@pytest.mark.slow
def test_answers_of_a_model_with_latents_are_those_of_the_request_alone(tmp_path):
    fuzz = Fuzz("latents, swap, drafts", tmp_path)
    counts = [fuzz.run(seed) for seed in range(2)]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True)), "some whole, and some given up"


@pytest.mark.parametrize("setting", slow_and_nightly(DRAFTING, ["swap, drafts", "swap, drafts by itself"]))
def test_answers_are_the_same_with_drafts_and_without(setting, tmp_path):
    """Alone, to the last bit of each score; then in random company."""
    without = setting.split(",")[0]
    plain, drafting = (Fuzz(name, tmp_path, asks_of=without) for name in (without, setting))
    for number in range(NUM_ASKS):
        assert drafting.alone(number) == plain.alone(number)
    stats = drafting.driver.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert stats.num_accepted_tokens > 10
    assert stats.num_new_tokens == plain.driver.stats.num_new_tokens
    # Draws from three tokens are often as drafted.
    few = SamplingParams(
        max_tokens=60, temperature=1.5, logprobs=1, allowed_token_ids=[7, 8, 9], ignore_eos=True
    )
    answers: list[list[object]] = [[], []]
    counts = DraftCounts()
    for its, driver in zip(answers, (plain.driver, drafting.driver), strict=True):
        for seed in range(8):  # one after the other: a full batch makes no drafts
            [number] = tiny.submit(driver, tiny.prompts([9]), dataclasses.replace(few, seed=seed))
            found = tiny.drain(driver)[number]
            its.append((found.token_ids, found.scores))
            if driver is drafting.driver:
                counts += found.drafts
    assert answers[0] == answers[1]
    since = drafting.driver.stats
    assert counts == DraftCounts(
        since.num_drafts - stats.num_drafts,
        since.num_draft_tokens - stats.num_draft_tokens,
        since.num_accepted_tokens - stats.num_accepted_tokens,
    )
    assert counts.num_accepted_draft_tokens > 20
    at = since.num_accepted_at
    assert (sum(at), list(at)) == (since.num_accepted_tokens, sorted(at, reverse=True))
    if setting == "swap, drafts by itself":  # to the last token: what both chose from was the same
        assert counts.num_accepted_draft_tokens == counts.num_draft_tokens
    for seed in range(4):
        drafting.run(seed)
