"""One table has all that is said of an option: adding one touches few files."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.request_encoding import filled
from jaxpaged.options import flags_of
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_state import LogitRules, RowOptions, SamplingState, neutral_rows, row_values

ROOT = Path(__file__).parents[1]
VOCAB_SIZE = 40
MORE = {
    f"jaxpaged/{name}.py" for name in ("contracts/samplers", "serve/responses", "research/integrations/tunix")
}


def files_that_name(option):
    return {
        str(file.relative_to(ROOT))
        for file in (ROOT / "jaxpaged").rglob("*.py")
        if re.search(rf"\b{option}\b", file.read_text())
    }


@pytest.mark.parametrize("option", ["min_p", "top_p", "presence_penalty", "frequency_penalty"])
def test_a_sampling_option_is_in_few_files(option):
    """The files are its table, the device's table, its use, the contract of others' samplers and, for a few,
    the fields of OpenAI's answers and those of Tunix's rollouts.
    """
    use = "sampling_filters" if option.endswith("_p") else "sampling"
    table = {f"jaxpaged/{name}.py" for name in (use, "sampling_params", "sampling_state")}
    assert table <= files_that_name(option) <= {*table, *MORE}


def test_a_request_without_options_is_written_as_neutral_values():
    params = SamplingParams(temperature=0, max_tokens=3)
    row = RowOptions(params=params, prompt_len=5, vocab_size=VOCAB_SIZE, seed=0, stop_token_ids=(), edits=())
    for table in (SamplingState, LogitRules):
        untouched = neutral_rows(table, 2, VOCAB_SIZE)
        written = filled(untouched, [row_values(table, row)])
        for field in dataclasses.fields(table):
            np.testing.assert_array_equal(getattr(written, field.name), getattr(untouched, field.name))


def test_every_flag_says_what_it_does():
    for table in (SamplingParams, EngineConfig):
        for names, flag in flags_of(table).values():
            assert flag["help"], names
