"""Memory that rows and lengths cost, read from the compiled loop at sizes that no test could run."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpaged.config import EngineConfig
from jaxpaged.memory import kv_cache
from jaxpaged.memory.cache_specs import FULL, SlidingWindow
from jaxpaged.memory.grouping import Grouping
from jaxpaged.models.constant import VOCAB_SIZE, ConstantModel
from jaxpaged.step import loop
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState, create_state, create_tables

MAX_NUM_SEQS = 512
MAX_MODEL_LEN = 131_072
BLOCK_SIZE = 16
NUM_BLOCKS = 16_384
NUM_ROWS = EngineConfig(max_num_seqs=MAX_NUM_SEQS).num_rows

pytestmark = pytest.mark.nightly


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="one group"), pytest.param(6, id="six groups")],
)
def num_groups(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def compiled(num_groups: int) -> jax.stages.Compiled:
    """Compile `loop.run` for many long rows, from shapes alone. All groups but the first have a window."""
    specs = (FULL, *[SlidingWindow(1024)] * (num_groups - 1))
    grouping = Grouping(specs, tuple((layer,) for layer in range(num_groups))).of_step

    def state() -> EngineState:
        width = MAX_MODEL_LEN // BLOCK_SIZE
        tables = create_tables(
            NUM_BLOCKS, NUM_ROWS, width, BLOCK_SIZE, prefix_caching=True, num_groups=num_groups
        )
        cache = kv_cache.create(0, NUM_BLOCKS, BLOCK_SIZE, 1, 1, jnp.dtype("float32"))
        return create_state(tables, cache, MAX_MODEL_LEN, VOCAB_SIZE)

    graphdef, params = nnx.split(nnx.eval_shape(ConstantModel))
    config = StepConfig(
        max_num_seqs=MAX_NUM_SEQS, num_tiles=16, tiles_per_pass=8, attention="xla", grouping=grouping
    )
    numbers = jax.eval_shape(lambda: (jnp.zeros(2, jnp.int32), jnp.bool_(False)))
    lowered = loop.run.lower(graphdef, params, jax.eval_shape(state), *numbers, config=config)
    return lowered.compile()


def test_many_long_rows_take_an_int32_a_token_place_and_little_beside(compiled, num_groups):
    """A group's line takes an int32 a block. Beside those, further groups cost next to nothing."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results
    assert total < (600e6 if num_groups == 1 else 900e6)
    token_places = 4 * NUM_ROWS * MAX_MODEL_LEN
    block_tables = num_groups * token_places // BLOCK_SIZE
    assert total - token_places - block_tables < 30e6  # rules and scores of the rows, most of it


def test_no_step_makes_anything_of_rows_times_length(compiled):
    """Arrays as large as the block tables are handed on, and written to in place: nothing else makes one."""
    made = set()
    for line in compiled.as_text().splitlines():
        found = re.match(r"\s*(?:ROOT )?\S+ = \w+\[([\d,]+)\]\S* ([\w-]+)\(", line)
        if found and math.prod(map(int, found[1].split(","))) >= NUM_ROWS * MAX_MODEL_LEN // BLOCK_SIZE:
            made.add(found[2])
    assert made <= {"parameter", "get-tuple-element", "dynamic-update-slice", "scatter", "bitcast", "fusion"}
