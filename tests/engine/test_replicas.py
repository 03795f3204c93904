"""Choice of a replica for a request; `tests/parallel` has whole engines with several replicas."""

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.replicas import Replicas
from jaxpaged.engine.request import Request
from jaxpaged.sampling_params import SamplingParams


def answer(index: int) -> Request:
    """Make one of several answers to a prompt of one token, of which no block can be cached."""
    return Request(
        prompt_token_ids=np.array([1], np.int32),
        params=SamplingParams(),
        priority=0,
        salt=0,
        eos_token_ids=(),
        stop_token_ids=(),
        edits=(),
        max_num_tokens=9,
        index=index,
        request_id=1 + index,
    )


@pytest.mark.parametrize(("load", "group"), [(1, 0), (3, 0), (4, 1), (5, 1)])
def test_answers_go_where_the_first_went_only_while_they_run_together_there(load, group):
    """Four run together in a group of eight rows: a fifth would wait there while the other group has room."""
    groups = Replicas(EngineConfig(max_num_seqs=4, data_parallel_size=2, num_blocks=9), num_blocks=9)

    def free_rows(*loads):
        return [list(range(8 * i, 8 * i + 8 - load)) for i, load in enumerate(loads)]

    first, second = answer(0), answer(1)
    assert groups.choose(first, first.prompt_token_ids, free_rows(0, 0)) == 0
    assert groups.choose(second, second.prompt_token_ids, free_rows(load, 0)) == group
