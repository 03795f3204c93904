"""The engine against the NumPy model that has no cache, no batch and no blocks."""

import jax
import numpy as np
import pytest

from jaxpaged.config import InputError, SamplingParams
from jaxpaged.engine import loop
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.state import FinishReason, Phase
from jaxpaged.status import PagedMemoryError, Status
from tests import tiny

# Lengths around a block, a prefill tile (32) and the wide prefill shape (256), and single tokens.
LENGTHS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 65, 100]


def assert_all_blocks_free(engine: Engine) -> None:
    tables = engine._state.tables
    assert int(tables.pool.num_free) == engine.plan.num_blocks - 1
    assert not np.any(tables.pool.ref_count)
    assert not np.any(tables.block_tables)
    assert not np.any(tables.seq_lens)


@pytest.mark.parametrize(
    ("block_size", "max_num_seqs", "small_pool"),
    [
        pytest.param(8, 12, False, id="all rows at once"),
        pytest.param(8, 4, False, id="rows wait for rows"),
        pytest.param(1, 4, True, id="rows wait for blocks of 1"),
        pytest.param(8, 4, True, id="rows wait for blocks of 8"),
        pytest.param(16, 4, True, id="rows wait for blocks of 16"),
        pytest.param(16, 1, False, id="one row"),
    ],
)
def test_greedy_tokens_equal_the_reference(block_size, max_num_seqs, small_pool):
    prompts = tiny.prompts(LENGTHS)
    max_tokens = [3 + i % 9 for i in range(len(prompts))]
    # The small pool holds the longest request and nothing else.
    num_blocks = 1 + -(-(max(LENGTHS) + max(max_tokens)) // block_size) if small_pool else None
    engine = tiny.engine(block_size=block_size, max_num_seqs=max_num_seqs, num_blocks=num_blocks)
    answers = tiny.generate(engine, prompts, [tiny.greedy(n) for n in max_tokens])
    for prompt, n, answer in zip(prompts, max_tokens, answers, strict=True):
        assert answer == tiny.reference_answer(tuple(prompt), n)
    assert_all_blocks_free(engine)


def test_a_request_may_fill_the_model_length_exactly():
    prompt = tiny.prompts([120])[0]
    engine = tiny.engine()
    [answer] = tiny.generate(engine, [prompt], tiny.greedy(100))
    assert len(answer) == tiny.CONFIG.max_model_len - len(prompt)
    assert answer == tiny.reference_answer(tuple(prompt), len(answer))
    assert_all_blocks_free(engine)


def test_requests_are_admitted_in_order_of_arrival_and_never_overtake():
    # Room for one long request only: the short one behind it could run at once, and must not.
    engine = tiny.engine(num_blocks=1 + 8)
    prompts = tiny.prompts([40, 40, 3])
    for prompt in prompts:
        engine.add_request(prompt, tiny.greedy(10))
    engine.run(max_steps=3)
    phase = np.asarray(engine._state.rows.phase)
    assert phase[:3].tolist() == [Phase.RUNNING, Phase.WAITING, Phase.WAITING]
    assert tiny.drain(engine)[0].request_id == 0


def test_stop_tokens_end_an_answer_and_belong_to_it():
    prompt = tiny.prompts([9])[0]
    free = tiny.reference_answer(tuple(prompt), 8)
    stop = free[4]
    engine = tiny.engine()
    engine.add_request(prompt, SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(96, stop)))
    [answer] = tiny.drain(engine)
    assert answer.token_ids == free[: free.index(stop) + 1]
    assert answer.finish_reason is FinishReason.STOP
    assert_all_blocks_free(engine)


def test_an_answer_of_one_token_runs_no_decode_step():
    engine = tiny.engine()
    [answer] = tiny.generate(engine, tiny.prompts([5]), tiny.greedy(1))
    assert answer == tiny.reference_answer(tuple(tiny.prompts([5])[0]), 1)
    assert engine.progress.num_steps == 1
    assert int(engine._state.counters.num_decode_tokens) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_answer_is_the_same_alone_and_in_any_company(dtype):
    """Greedy and sampled rows, alone, and among others in another row and another order."""
    prompts = tiny.prompts([5, 33, 64, 12, 90, 1, 40, 7])
    params = [
        SamplingParams(max_tokens=12, temperature=(0.0, 1.5)[i % 2], top_k=(0, 9)[i % 3 == 0], seed=i)
        for i in range(len(prompts))
    ]
    engine = tiny.engine(dtype=dtype)
    alone = [tiny.generate(engine, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    together = tiny.generate(engine, prompts, params)
    backwards = tiny.generate(engine, prompts[::-1], params[::-1])[::-1]
    assert together == alone
    assert backwards == alone


def test_the_loop_compiles_once_whatever_comes():
    engine = tiny.engine()
    compiled = loop.run._cache_size(), loop.submit._cache_size()
    for seed in range(3):
        lengths = np.random.default_rng(seed).integers(1, 90, 7).tolist()
        tiny.generate(engine, tiny.prompts(lengths, seed), SamplingParams(max_tokens=5 + seed, seed=seed))
    assert (loop.run._cache_size(), loop.submit._cache_size()) == compiled


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_no_step_copies_the_cache(max_num_seqs, monkeypatch):
    """The compiled loop's temporary memory does not grow with the number of blocks."""
    monkeypatch.setattr(Engine, "_compile", lambda self: None)

    def temp_bytes(num_blocks: int) -> tuple[int, int]:
        engine = tiny.engine(max_num_seqs=max_num_seqs, num_blocks=num_blocks)
        compiled = loop.run.lower(
            engine._graphdef,
            engine._params,
            engine._state,
            np.int32(1),
            np.bool_(False),
            max_prefill_tokens=engine.config.max_prefill_tokens,
        ).compile()
        cache_bytes = sum(a.nbytes for a in jax.tree.leaves(engine._state.kv_cache))
        return compiled.memory_analysis().temp_size_in_bytes, cache_bytes

    small_temp, small_cache = temp_bytes(100)
    large_temp, large_cache = temp_bytes(5000)
    one_array = (large_cache - small_cache) / (2 * tiny.CONFIG.num_layers)
    assert large_temp - small_temp < one_array / 2


def test_a_memory_error_in_a_step_stops_the_engine():
    """Such a bit means that the scheduler miscounted; it must not pass for an answer."""
    engine = tiny.engine()
    engine.add_request([1, 2, 3], tiny.greedy(3))
    engine._state = jax.tree.map(lambda x: x, engine._state)
    object.__setattr__(engine._state, "status", jax.numpy.int32(Status.OUT_OF_BLOCKS | Status.DOUBLE_FREE))
    with pytest.raises(PagedMemoryError, match=r"out of blocks: raise num_blocks .*; double free"):
        engine.run()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "the prompt must have at least one token"),
        ([3, 97], 4, r"prompt token=97 must be a token id, an int in \[0, 97\)"),
        ([3, -1], 4, r"prompt token=-1 must be a token id"),
        ([True], 4, r"prompt token=True must be a token id"),
        ([1] * 64, 4, "the prompt has 64 tokens, must have less than max_model_len=64"),
        (
            [1] * 40,
            20,
            "the prompt of 40 tokens with max_tokens=20 needs 8 blocks of 8 tokens, "
            "but num_blocks=7 leaves 6 for use",
        ),
    ],
)
def test_a_request_that_could_never_run_is_refused_at_the_door(prompt, max_tokens, message, monkeypatch):
    monkeypatch.setattr(Engine, "_compile", lambda self: None)
    engine = tiny.engine(num_blocks=7, max_model_len=64)
    with pytest.raises(InputError, match=message):
        engine.add_request(prompt, tiny.greedy(max_tokens))
    assert not engine.has_work
