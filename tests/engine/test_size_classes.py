"""Size classes of blocks at the engine's door, and what does not go with them yet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.engine.door import check_blocks
from jaxpaged.engine.occupancy import occupancy
from jaxpaged.engine.request import Request
from jaxpaged.handover import exchange
from jaxpaged.memory import kv_cache
from jaxpaged.memory.block_pool import HELD_ONCE
from jaxpaged.memory.cache_specs import FULL, SlidingWindow
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.sizing import CacheSize
from jaxpaged.research.replay.dump import dump
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState, create_state, create_tables

BLOCK_SIZE, CLASSES = 4, (0, 1, 0)


def step_config(**options) -> StepConfig:
    grouping = Grouping((FULL, SlidingWindow(5), FULL), ((0,), (1,), (2,)), classes=CLASSES)
    sizes = {"max_num_seqs": 2, "num_tiles": 1, "tiles_per_pass": 1, "attention": "xla"}
    return StepConfig(**sizes, grouping=grouping, **options)


def state() -> EngineState:
    def create() -> EngineState:
        tables = create_tables(
            9, 2, 8, BLOCK_SIZE, prefix_caching=True, num_groups=3, classes=CLASSES, more_blocks=(5,)
        )
        cache = kv_cache.create(0, tables.pool.num_blocks, BLOCK_SIZE, 1, 1, jnp.dtype("float32"))
        return create_state(tables, cache, 32, 16)

    return jax.eval_shape(create)


@pytest.mark.parametrize(
    ("num_blocks", "more_blocks", "message"),
    [
        (21, (11,), None),
        (
            20,
            (11,),
            r"the prompt of 8 tokens with max_tokens=33 needs 20 blocks of size class 0 of 4 tokens, "
            r"but num_blocks=20 leaves 19 for use",
        ),
        (21, (10,), r"needs 10 blocks of size class 1 of 4 tokens, but num_blocks=10 leaves 9 for use"),
    ],
)
def test_a_request_that_one_class_cannot_hold_is_refused(num_blocks, more_blocks, message):
    request = Request(
        np.zeros(8, np.int32), SamplingParams(max_tokens=33), 0, 0, (), (), (), 41, request_id=1
    )
    size = CacheSize(num_blocks, 1, BLOCK_SIZE, "given", more_blocks=more_blocks)
    if message is None:
        check_blocks(request, step_config(), size)
        return
    with pytest.raises(InputError, match=message):
        check_blocks(request, step_config(), size)


def test_each_class_may_keep_blocks_of_its_own_free():
    assert step_config(watermark_blocks=[1, 2]).watermark_blocks == (1, 2)
    with pytest.raises(InputError, match=r"watermark_blocks=\(1,\) must be a number, or one for each of 2"):
        step_config(watermark_blocks=(1,))


def test_blocks_of_several_sizes_are_neither_handed_over_nor_written_down(tmp_path):
    its = state()
    with pytest.raises(InputError, match="size classes of blocks=2 must be 1 to be handed over"):
        exchange.locate(its, np.zeros(8, np.int32), 0, (FULL,))
    with pytest.raises(InputError, match="size classes of blocks=2 must be 1 to be written down"):
        dump(its, tmp_path / "state", step_config=step_config(), vocab_size=16)


def test_occupancy_counts_the_blocks_of_all_classes():
    its = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state())
    its.tables.pool.further[0].place[2] = HELD_ONCE
    shown = occupancy(its, {}, 0)
    assert np.flatnonzero(shown.holders).tolist() == [9 - 1 + 2]
    assert len(shown.holders) == len(shown.has_content) == 9 + 5 - 1
