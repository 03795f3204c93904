"""A few workloads of the fuzzer, in engines whose programs other tests have; `fuzz.py` runs for longer."""

import pytest

from tests.engine.fuzz import Fuzz


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["adapters", "swap"])
def test_answers_in_random_company_are_those_of_the_request_alone(setting, tmp_path):
    fuzz = Fuzz(setting, tmp_path)
    counts = [fuzz.run(seed) for seed in range(6)]
    assert all(sum(kind) > 0 for kind in zip(*counts, strict=True)), "some whole, and some given up"
