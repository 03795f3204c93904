"""The driver and the compiled loop against the NumPy model that has no cache, no batch and no blocks."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import row_filler
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.setup import Setup
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.status import PagedMemoryError, Status
from jaxpaged.step import loop
from jaxpaged.step.state import FinishReason
from pallas_kernels import native
from pallas_kernels.ops import choice
from reference import sampler as reference_sampler
from tests import tiny

# Lengths around a block, a prefill tile (32), the prompt tokens of one step (128), and single tokens.
LENGTHS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 65, 100, 127]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="room for all"),
        pytest.param(
            {"max_num_seqs": 1, "max_num_batched_tokens": 33, "enable_prefix_caching": False},
            id="one row, one tile, no caching",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"block_size": 1, "num_blocks": 1 + 136, "eviction_policy": "lru_split"},
            id="blocks of 1, few",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_greedy_tokens_equal_the_reference(options):
    prompts = tiny.prompts(LENGTHS)
    max_tokens = [3 + i % 9 for i in range(len(prompts))]
    driver = tiny.driver(**options)
    assert driver.state.tables.pool.policy.name == driver.config.eviction_policy
    for _ in range(2):  # the second time with what the first has left in the prefix cache
        answers = tiny.generate(driver, prompts, [tiny.greedy(n) for n in max_tokens])
        for prompt, n, answer in zip(prompts, max_tokens, answers, strict=True):
            assert answer == tiny.reference_answer(
                tuple(prompt), min(n, tiny.CONFIG.max_model_len - len(prompt))
            )
    tiny.assert_nothing_is_held(driver)


@pytest.mark.parametrize(
    "options",
    [pytest.param(tiny.SMALL, id="recompute"), pytest.param(tiny.SWAP, id="swap", marks=pytest.mark.nightly)],
)
def test_who_gives_way_answers_as_if_it_had_not(options):
    prompts = tiny.prompts([10, 20, 30, 12, 25])
    driver = tiny.driver(**options)
    answers = tiny.generate(driver, prompts, tiny.greedy(60))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == tiny.reference_answer(tuple(prompt), 60)
    assert driver.stats.num_preemptions > 0
    tiny.assert_nothing_is_held(driver)


@pytest.mark.slow
def test_a_long_prompt_is_computed_while_others_decode():
    driver = tiny.driver(**tiny.SWAP)  # steps of one tile
    short, long = tiny.prompts([3, 97])
    [first] = tiny.submit(driver, [short], tiny.greedy(20))
    driver.turn(max_steps=2)
    [second] = tiny.submit(driver, [long], tiny.greedy(3))
    driver.turn(max_steps=2)  # two of the long prompt's four tiles
    computed = np.asarray(driver.state.tables.seq_lens)
    assert sorted(computed[computed > 0].tolist()) == [3 + 3, 64]
    answers = tiny.drain(driver)
    assert answers[second].token_ids == tiny.reference_answer(tuple(long), 3)
    assert set(answers) == {first, second}


def test_prompts_are_written_in_chunks(monkeypatch):
    monkeypatch.setattr(row_filler, "SUBMIT_TOKENS", 16)
    driver = tiny.driver()
    prompts = tiny.prompts([100, 3, 16, 60])
    answers = tiny.generate(driver, prompts, tiny.greedy(5))
    assert answers == [tiny.reference_answer(tuple(prompt), 5) for prompt in prompts]


def test_a_request_may_fill_the_model_length_exactly():
    prompt = tiny.prompts([120])[0]
    driver = tiny.driver()
    [answer] = tiny.generate(driver, [prompt], tiny.greedy(100))
    assert len(answer) == tiny.CONFIG.max_model_len - len(prompt)
    assert answer == tiny.reference_answer(tuple(prompt), len(answer))
    tiny.assert_nothing_is_held(driver)


def test_stop_tokens_end_an_answer_and_belong_to_it():
    prompt = tiny.prompts([9])[0]
    free = tiny.reference_answer(tuple(prompt), 8)
    for stop in (free[0], free[4]):
        driver = tiny.driver()
        params = SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(96, stop))
        [request_id] = tiny.submit(driver, [prompt], params)
        answer = tiny.drain(driver)[request_id]
        assert answer.token_ids == free[: free.index(stop) + 1]
        assert answer.finish_reason is FinishReason.STOP
        tiny.assert_nothing_is_held(driver)


@pytest.mark.parametrize("block_size_ends", [7, 8, 9])
def test_an_answer_may_end_at_a_blocks_edge(block_size_ends):
    prompt = tiny.prompts([5])[0]
    driver = tiny.driver()
    [request_id] = tiny.submit(driver, [prompt], tiny.greedy(block_size_ends - 5))
    answer = tiny.drain(driver)[request_id]
    assert answer.token_ids == tiny.reference_answer(tuple(prompt), block_size_ends - 5)
    assert answer.finish_reason is FinishReason.LENGTH
    tiny.assert_nothing_is_held(driver)


def test_an_answer_of_one_token_to_a_prompt_of_one_runs_no_decode_step():
    driver = tiny.driver()
    [answer] = tiny.generate(driver, tiny.prompts([1]), tiny.greedy(1))
    assert answer == tiny.reference_answer(tuple(tiny.prompts([1])[0]), 1)
    assert (driver.stats.num_steps, driver.stats.num_decode_tokens) == (1, 0)


def test_log_probabilities_are_the_models():
    prompt = tiny.prompts([20])[0]
    driver = tiny.driver()
    params = SamplingParams(max_tokens=5, temperature=0.7, top_k=3, seed=3, logprobs=0)
    [request_id] = tiny.submit(driver, [prompt], params)
    answer = tiny.drain(driver)[request_id]
    logits = tiny.reference_logits((*prompt, *answer.token_ids))[len(prompt) - 1 : -1].astype(np.float64)
    want = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    want = want[np.arange(5), answer.token_ids]
    np.testing.assert_allclose(answer.logprobs, want, atol=1e-5)


MIXES = [
    {"presence_penalty": 1.2},
    {"frequency_penalty": -0.7, "repetition_penalty": 1.4},
    {"repetition_penalty": 0.6, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {i: (-1) ** i * 2.5 for i in range(0, 97, 2)}, "frequency_penalty": 1.0},
    {"allowed_token_ids": list(range(5, 97, 7)), "presence_penalty": 2},
    {"stop_token_ids": list(range(60)), "min_tokens": 12},
    {"stop_token_ids": list(range(40)), "min_tokens": 20, "frequency_penalty": 2, "repetition_penalty": 2},
    {},
]


def test_greedy_answers_follow_every_option_among_preemptions():
    """Together in a pool too small for them, against the oracle's model and sampler."""
    prompts = tiny.prompts([5, 33, 20, 12, 40, 1, 9, 7])
    params = [SamplingParams(max_tokens=45, temperature=0, **mix) for mix in MIXES]
    driver = tiny.driver(**tiny.SMALL)
    answers = tiny.generate(driver, prompts, params)
    for prompt, its, answer in zip(prompts, params, answers, strict=True):
        assert answer == tiny.reference_greedy(prompt, its), its
    assert driver.stats.num_preemptions > 0
    tiny.assert_nothing_is_held(driver)


def test_what_ended_an_answer_is_told():
    prompt = tiny.prompts([9])[0]
    free = tiny.reference_answer(tuple(prompt), 8)
    end = free[0]
    driver = tiny.driver()
    eos = dataclasses.replace(tiny.CONFIG, eos_token_ids=(end,))
    driver.door = dataclasses.replace(driver.door, model_config=eos)
    for options, reason in (
        ({}, None),
        ({"stop_token_ids": [end]}, None),  # it is the model's, first of all
        ({"stop_token_ids": [end], "ignore_eos": True}, end),
    ):
        [request_id] = tiny.submit(driver, [prompt], SamplingParams(max_tokens=8, temperature=0, **options))
        answer = tiny.drain(driver)[request_id]
        assert (answer.token_ids, answer.stop_reason) == (free[: free.index(end) + 1], reason)


def test_the_likeliest_tokens_are_told_in_order_with_ranks():
    """More tokens than a report has room for, in rows that want different numbers of them."""
    prompts = tiny.prompts([20, 33, 5])
    params = [SamplingParams(max_tokens=40, seed=7, logprobs=n) for n in (3, 20, 0)]
    driver = tiny.driver()
    ids = tiny.submit(driver, prompts, params)
    answers = tiny.drain(driver)
    for i, prompt, its in zip(ids, prompts, params, strict=True):
        answer = answers[i]
        logits = tiny.reference_logits((*prompt, *answer.token_ids))[len(prompt) - 1 : -1]
        logprobs = reference_sampler.logprobs(logits)
        for place, (token, score) in enumerate(zip(answer.token_ids, answer.scores, strict=True)):
            ranking = reference_sampler.ranking(logits[place])
            assert score.rank == 1 + ranking.index(token)
            assert [other for other, _ in score.top] == ranking[: its.logprobs]
            want = logprobs[place][[token, *ranking[: its.logprobs]]]
            np.testing.assert_allclose([score.logprob, *(value for _, value in score.top)], want, atol=1e-5)


def test_log_probabilities_of_prompts_are_told_whole_whatever_is_cached():
    """The pool is too small for all prompts; their beginnings are cached, and some ask for no scores."""
    shared = tiny.prompts([24], seed=5)[0]
    lengths = zip([0, 24, 24, 16, 8], tiny.prompts([1, 4, 9, 20, 3]), strict=True)
    prompts = [shared[:n] + prompt for n, prompt in lengths]
    params = [SamplingParams(max_tokens=45, temperature=0, prompt_logprobs=n) for n in (0, 5, None, 20, 1)]
    driver = tiny.driver(**tiny.SMALL)
    tiny.generate(driver, [shared], tiny.greedy(1))
    ids = tiny.submit(driver, prompts, params)
    answers = tiny.drain(driver)
    assert driver.stats.num_preemptions > 0
    for i, prompt, its in zip(ids, prompts, params, strict=True):
        answer = answers[i]
        assert answer.token_ids == tiny.reference_answer(tuple(prompt), 45)
        if its.prompt_logprobs is None:
            assert answer.prompt_scores is None
            continue
        assert answer.num_hit_tokens == 0
        nothing, *scores = answer.prompt_scores
        assert nothing is None
        assert len(scores) == len(prompt) - 1
        logits = tiny.reference_logits(tuple(prompt))
        logprobs = reference_sampler.logprobs(logits)
        for place, (token, score) in enumerate(zip(prompt[1:], scores, strict=True)):
            ranking = reference_sampler.ranking(logits[place])
            assert score.rank == 1 + ranking.index(token)
            assert [other for other, _ in score.top] == ranking[: its.prompt_logprobs]
            want = logprobs[place][[token, *ranking[: its.prompt_logprobs]]]
            np.testing.assert_allclose([score.logprob, *(value for _, value in score.top)], want, atol=1e-5)


def test_the_loop_compiles_once_whatever_comes():
    driver = tiny.driver(**tiny.SMALL)
    assert driver.device.kept_run is not None  # compiled for its sizes: others it refuses
    programs = loop.submit, loop.write_tokens, loop.abort
    compiled = [program.num_compiled() for program in programs]
    for seed in range(3):
        lengths = np.random.default_rng(seed).integers(1, 90, 7).tolist()
        mixes = [*MIXES, {"logprobs": 5, "prompt_logprobs": 2}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}]
        params = [SamplingParams(max_tokens=20, seed=seed, **mixes[(seed + i) % 10]) for i in range(7)]
        ids = tiny.submit(driver, tiny.prompts(lengths, seed), params)
        driver.turn()
        driver.abort(ids[2:4])
        tiny.drain(driver)
    assert [program.num_compiled() for program in programs] == compiled


@pytest.mark.slow
def test_no_step_copies_the_cache():
    """The compiled loop's temporary memory does not grow with the number of blocks."""

    def temp_bytes(**sizes: int) -> tuple[int, int]:
        driver = tiny.driver(**tiny.SWAP | sizes)
        cache_bytes = sum(a.nbytes for a in jax.tree.leaves(driver.state.kv_cache))
        return driver.device.kept_run.temporary_bytes, cache_bytes

    small_temp, small_cache = temp_bytes()  # the program of other tests
    large_temp, large_cache = temp_bytes(num_blocks=5000)
    one_array = (large_cache - small_cache) / (2 * tiny.CONFIG.num_layers)
    assert large_temp - small_temp < one_array / 2


def test_a_memory_error_in_a_step_stops_the_driver():
    """Such a bit means that the scheduler miscounted; it must not pass for an answer."""
    driver = tiny.driver()
    tiny.submit(driver, [[1, 2, 3]], tiny.greedy(3))
    bits = jax.numpy.int32(Status.OUT_OF_BLOCKS | Status.DOUBLE_FREE)
    tiny.set_state(driver, dataclasses.replace(driver.state, status=bits))
    with pytest.raises(PagedMemoryError, match=r"out of blocks: raise num_blocks .*; double free"):
        tiny.drain(driver)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "the prompt must have at least one token"),
        ([3, 97], 4, r"prompt token=97 must be a token id, an int in \[0, 97\)"),
        ([3, -1], 4, r"prompt token=-1 must be a token id"),
        ([True], 4, r"prompt token=True must be a token id"),
        ([1] * 64, 4, "the prompt has 64 tokens, must have less than max_model_len=64"),
    ],
)
def test_a_request_that_could_never_run_is_refused_at_the_door(prompt, max_tokens, message, monkeypatch):
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    driver = tiny.driver(max_model_len=64)
    with pytest.raises(InputError, match=message):
        driver.door.admit(prompt, tiny.greedy(max_tokens))
    with pytest.raises(InputError, match="priority=1 must be 0 unless scheduling_policy is 'priority'"):
        driver.door.admit([1], tiny.greedy(1), priority=1)


@pytest.mark.parametrize(
    ("options", "head_dim", "default", "chosen", "why"),
    [
        ({}, 8, "xla", "xla", "JAXPAGED_NATIVE is 0"),
        ({}, 8, "native", "native", "AVX2 with FMA"),
        ({"dtype": "bfloat16"}, 64, "mosaic_gpu", "mosaic_gpu", "our kernels serve this GPU"),
        ({"dtype": "bfloat16"}, 8, "mosaic_gpu", "xla", "does not serve head_dim=8"),
        ({"dtype": "bfloat16", "attention": "xla"}, 64, "mosaic_gpu", "xla", "asked for"),
    ],
)
def test_the_attention_is_chosen_once_and_says_why(options, head_dim, default, chosen, why, monkeypatch):
    monkeypatch.setattr(choice, "default_tiled_implementation", lambda dtype, tile_len: default)
    why_not = None if default == "native" else "JAXPAGED_NATIVE is 0"
    monkeypatch.setattr(native, "why_not_cache", lambda layout, dtype: why_not)
    monkeypatch.setattr(native, "instructions", lambda: "AVX2 with FMA")
    model = dataclasses.replace(tiny.CONFIG, head_dim=head_dim)
    setup = Setup(EngineConfig(**options), model)
    assert setup.attention == chosen
    assert why in setup.attention_reason


def test_an_attention_that_does_not_serve_the_model_is_refused():
    with pytest.raises(InputError, match="attention='mosaic_gpu' must serve the model: .*q.dtype=float32"):
        _ = Setup(EngineConfig(dtype="float32", attention="mosaic_gpu"), tiny.CONFIG).attention
    with pytest.raises(InputError, match="attention='native' must serve the model: the dtype is float16"):
        _ = Setup(EngineConfig(dtype="float16", attention="native"), tiny.CONFIG).attention


@pytest.mark.slow
def test_a_gpu_is_given_the_kernels_for_the_heads_that_they_serve(monkeypatch):
    device = types.SimpleNamespace(platform="gpu", compute_capability="12.0")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(native, "serves", lambda *_: False)

    def attention(head_dim, asked="auto", kv_cache_dtype="int8"):
        model = dataclasses.replace(tiny.CONFIG, head_dim=head_dim)
        options = {
            "dtype": "bfloat16",
            "attention": asked,
            "kv_cache_dtype": kv_cache_dtype,
            "block_size": 32,
        }
        return Setup(EngineConfig(**options), model).attention

    assert (attention(64), attention(256), attention(96)) == ("mosaic_gpu", "mosaic_gpu", "xla")
    assert attention(96, kv_cache_dtype="auto") == "mosaic_gpu"
    with pytest.raises(InputError, match="must serve the model: .* does not serve head_dim=96"):
        attention(96, "mosaic_gpu")


def test_a_native_target_that_the_processor_is_not_is_refused(monkeypatch):
    monkeypatch.setenv("JAXPAGED_NATIVE", "avx3")
    with pytest.raises(InputError, match="JAXPAGED_NATIVE='avx3' must be 0, 1 or a target of this processor"):
        _ = Setup(EngineConfig(), tiny.CONFIG).attention
