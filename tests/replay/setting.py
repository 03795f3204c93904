"""Setting of the tests of dumps and replays: a small engine that preempts."""

import dataclasses

import jax
import numpy as np

from jaxpaged.sampling_state import token_bits
from jaxpaged.step.state import Phase, empty_rows
from reference.engine_state import Request
from tests import tiny
from tests.step.lockstep import MAX_MODEL_LEN, Setting

# Preempts, by swap and, where the host pool is full, to be recomputed. The same as in `test_scheduler.py`.
SETTING = Setting("swap", num_blocks=1 + 17, num_host_blocks=1 + 14)
STEP_CONFIG = SETTING.config
MIDDLE = 14
VOCAB_SIZE = tiny.CONFIG.vocab_size  # no less than the history's own; so all dumps have one
# The driver's options for just the same step over a state of the same sizes: all is compiled once.
OPTIONS = {
    "attention": SETTING.config.attention,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 3 + 3 * 32,
    "block_size": 4,
    "num_blocks": 18,
    "preemption_mode": "swap",
    "num_host_blocks": 15,
    "max_model_len": "auto",  # as the cache has room for less than the model's length
    "model_config": dataclasses.replace(tiny.CONFIG, max_model_len=MAX_MODEL_LEN),
}


def line_of(request: Request):
    """Return the request as the engine takes it."""
    line = empty_rows(1, MAX_MODEL_LEN, VOCAB_SIZE)
    for array, value in (
        (line.phase, Phase.WAITING),
        (line.arrival, request.arrival),
        (line.prompt_lens, len(request.prompt)),
        (line.num_tokens, len(request.prompt)),
        (line.max_num_tokens, request.max_num_tokens),
    ):
        array[0] = value
    line.token_ids[0, : len(request.prompt)] = request.prompt
    line.rules.stop_tokens[0] = token_bits(request.stop_token_ids, VOCAB_SIZE)
    return line


def assert_equal(got, want) -> None:
    """Assert that trees are equal leaf by leaf, types too; K and V have shapes and types only."""
    jax.tree.map(lambda a, b: None, got, want)  # the same structure
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        if not isinstance(b, jax.ShapeDtypeStruct):
            np.testing.assert_array_equal(a, b, err_msg=str(path))
