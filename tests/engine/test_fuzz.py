"""A few workloads of the fuzzer, in engines whose programs other tests have; `fuzz.py` runs for longer."""

import pytest

from tests.engine.fuzz import NUM_ASKS, Fuzz


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["adapters", "swap"])
def test_answers_in_random_company_are_those_of_the_request_alone(setting, tmp_path):
    fuzz = Fuzz(setting, tmp_path)
    counts = [fuzz.run(seed) for seed in range(6)]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True)), "some whole, and some given up"


@pytest.mark.slow
def test_answers_are_the_same_with_drafts_and_without(tmp_path):
    """Alone, to the last bit of each score; then in random company."""
    plain, drafting = (Fuzz(setting, tmp_path, asks_of="swap") for setting in ("swap", "swap, drafts"))
    for number in range(NUM_ASKS):
        assert drafting.alone(number) == plain.alone(number)
    stats = drafting.driver.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 20
    assert stats.num_new_tokens == plain.driver.stats.num_new_tokens
    for seed in range(4):
        drafting.run(seed)
