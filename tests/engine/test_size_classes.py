"""Size classes of blocks at the engine's door, states as one of them, and how they are dumped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity, start
from jaxpaged.engine.door import check_blocks
from jaxpaged.engine.occupancy import occupancy
from jaxpaged.engine.request import Request
from jaxpaged.engine.setup import Setup
from jaxpaged.handover import staging
from jaxpaged.memory import kv_cache
from jaxpaged.memory.block_pool import HELD_ONCE
from jaxpaged.memory.cache_specs import FULL, SlidingWindow
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.sizing import Budget, CacheSize
from jaxpaged.research.replay.dump import dump, load
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState, create_state, create_tables
from tests import tiny, tiny_states

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


def setup(mixer: Any, *kinds: Any, **options: Any) -> Setup:
    return Setup(EngineConfig(**tiny.DEFAULTS | options), tiny_states.config(mixer, *kinds))


def test_states_get_as_many_bytes_as_keys_and_values():
    of_states = setup(tiny_states.DELTA, num_blocks=20_000)
    size = capacity.cache_size(of_states)
    [count], [num_bytes] = size.more_blocks, size.more_bytes
    # Two layers, each: 16 heads of 16 x 16 numbers, for each token of a block its rows, and a tail of 3.
    assert num_bytes == capacity.bytes_of_states(of_states) > 2 * 4 * 16 * 16 * 16
    assert count == 20_000 * size.bytes_per_block // num_bytes
    assert size.num_bytes == 20_000 * size.bytes_per_block + count * num_bytes
    state = jax.eval_shape(lambda: start.create_state(of_states, tiny_states.model(of_states.whole), 20_000))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.kv_cache)) == size.num_bytes


def test_states_have_at_least_what_a_request_needs_and_no_more_blocks_than_keys_and_values():
    few = setup(tiny_states.DELTA, num_blocks=60, max_num_batched_tokens=36, max_model_len=120)
    # A tile of 32 tokens, and the state before it, may begin and end within blocks of 8.
    [least], bound = capacity.more_blocks(few, 60), few.step_config(60, (2,)).blocks_by_class(119, 8)[1]
    # Three more rows that decode have two each.
    assert least == bound + 1 + 3 * 2 > 60 * capacity.bytes_per_block(few) // capacity.bytes_of_states(few)
    assert capacity.more_blocks(few, 3) == (3,)
    # States alone: K and V have blocks without bytes.
    alone = setup(tiny_states.CONVOLUTION, tiny_states.STATE, num_blocks=60)
    assert (capacity.bytes_per_block(alone), capacity.more_blocks(alone, 60)) == (0, (60,))


@pytest.mark.parametrize("kinds", [(), (tiny_states.STATE,)])
def test_a_budget_is_divided_so_that_one_block_more_would_not_fit(kinds, monkeypatch):
    budget = Budget(5_000_000, "of a test")
    monkeypatch.setattr(capacity, "budget", lambda *_: budget)
    sized = setup(tiny_states.MAMBA, *kinds, num_blocks=None, max_model_len=64)
    size, of_block = capacity.cache_size(sized), capacity.state_bytes(sized)[1]

    def taken(num_blocks: int) -> int:
        return num_blocks * (size.bytes_per_block + of_block) + capacity.further_bytes(sized, num_blocks)

    assert taken(size.num_blocks) <= budget.left < taken(size.num_blocks + 1)


def test_a_length_for_which_states_have_too_few_blocks_is_refused():
    size = CacheSize(101, 64, BLOCK_SIZE, "given", more_blocks=(3,), more_bytes=(1000,))
    tight = setup(tiny_states.DELTA, num_blocks=101, block_size=4, max_model_len=120)
    with pytest.raises(
        InputError, match=r"max_model_len=120 needs \d+ blocks of states of 4 tokens, \d+ byte"
    ):
        capacity.served_len(tight, size)


def test_pieces_of_a_chain_have_room_for_the_blocks_of_each_class():
    """Blocks at one place go together; each lies behind those of its class that came before."""
    sizes = staging.PieceSizes((3, 1), CLASSES, max_blocks=8)
    chain = [[(0, 0), (2, 0)], [(0, 1)], [(0, 2), (1, 2), (2, 2)], [(1, 3)], [(0, 4)]]
    assert sizes.cut(chain) == [range(2), range(2, 3), range(3, 5)]
    assert sizes.cut([]) == []
    assert sizes.by_class(chain[2]) == ([(0, 2), (2, 2)], [(1, 2)])
    assert [line.tolist() for line in sizes.places(chain[2])] == [[2, 2 * 8 + 2, -1], [8 + 2]]


def test_a_piece_has_as_many_bytes_of_keys_and_values_as_a_state_has(monkeypatch):
    monkeypatch.setattr(staging, "PIECE_BYTES", 1)
    few = setup(tiny_states.DELTA, num_blocks=20, max_model_len=120)
    made = start.create_state(few, tiny_states.model(few.whole), 20)
    times = made.kv_cache.block_bytes(1) // made.kv_cache.block_bytes(0)
    assert times > made.tables.max_blocks_per_seq  # and no more than a sequence has
    assert staging.PieceSizes.of(made).of_class == (made.tables.max_blocks_per_seq, 1)


def test_a_state_with_several_classes_is_written_down_and_read_again(tmp_path):
    before = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state())
    before.tables.pool.further[0].place[2] = HELD_ONCE
    dump(before, tmp_path / "state", step_config=step_config(), vocab_size=16)
    after = load(tmp_path / "state")
    assert after.step_config.grouping.classes == CLASSES
    pairs = zip(jax.tree.leaves(before.tables), jax.tree.leaves(after.state.tables), strict=True)
    assert all(np.array_equal(old, new) for old, new in pairs)


def test_occupancy_counts_the_blocks_of_all_classes():
    its = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state())
    its.tables.pool.further[0].place[2] = HELD_ONCE
    shown = occupancy(its, {}, 0)
    assert np.flatnonzero(shown.holders).tolist() == [9 - 1 + 2]
    assert len(shown.holders) == len(shown.has_content) == 9 + 5 - 1
