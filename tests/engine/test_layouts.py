"""The engine on every layout of the registry: the tokens are those of the oracle, with its numbers.

One engine a layout, with blocks for few rows and a pool on the host: prompts in several tiles, decoding,
hits, rows that give way and come back, forks.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine.driver import Driver
from jaxpaged.sampling_params import SamplingParams
from pallas_kernels import layouts
from pallas_kernels.layouts import LAYOUTS, Layout, Sizes
from reference import cached_model
from reference import model as reference_model
from tests import layouts as cases
from tests import tiny

PROMPTS = tiny.prompts([20, 40, 17, 20, 70])
NUM_NEW = 24
slow = pytest.mark.slow
# In every run one, with scales beside its numbers.
QUICK = ("int8_per_token",)
each = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else slow) for name in LAYOUTS]
)


def options(layout: Any, chosen: Layout, num_tokens: int = 96) -> dict[str, Any]:
    """A pool of so many tokens in all."""
    block_size = cases.block_size_of(chosen, (8, 16, 1), head_dim=tiny.CONFIG.head_dim)
    num_blocks = 1 + num_tokens // block_size
    host = {"preemption_mode": "swap", "num_host_blocks": 1 + 128 // block_size}
    return {"kv_layout": layout, "block_size": block_size, "num_blocks": num_blocks, **host}


@functools.cache
def answers(name: str, layout: Layout, window: int | None = None) -> list[list[int]]:
    """The oracle's; of a layout from outside, whose numbers must be those of the computation, the plain
    model's.
    """
    config = tiny.with_window(window)
    block_size = cases.block_size_of(layout, (8, 16, 1), head_dim=config.head_dim)
    sizes = Sizes(1 + 128 // block_size, block_size, config.num_kv_heads, config.head_dim)
    oracle = cases.oracle(name, sizes)
    weights = tiny.reference_weights()
    if oracle is None:
        assert layout.cache_dtype is None
        return [reference_model.generate(config, weights, prompt, NUM_NEW) for prompt in PROMPTS]
    empty = cases.empty(layout, sizes)
    return [
        cached_model.generate(config, weights, oracle, empty, prompt, NUM_NEW, tile_len=32)
        for prompt in PROMPTS
    ]


def check_tokens(name: str, layout: Layout) -> Driver:
    driver = tiny.driver(**options(name, layout))
    want = answers(name, layout)
    assert tiny.generate(driver, PROMPTS, tiny.greedy(NUM_NEW)) == want
    assert driver.stats.num_preemptions > 0
    for _ in range(2):
        hits = driver.stats.num_hit_tokens
        assert tiny.generate(driver, PROMPTS[1:2], tiny.greedy(NUM_NEW)) == want[1:2]
    assert driver.stats.num_hit_tokens > hits
    tiny.assert_nothing_is_held(driver)
    return driver


@each
def test_tokens_are_the_oracles(name: str) -> None:
    driver = check_tokens(name, LAYOUTS[name])
    several = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=NUM_NEW, logprobs=0)
    together = sampled(driver, PROMPTS[4], several)
    # Alone, one after the other, and without the blocks of one another.
    for index, got in enumerate(together):
        driver.reset_prefix_cache()
        one = dataclasses.replace(several, n=1, seed=5 + index)
        assert sampled(driver, PROMPTS[4], one) == [got], "bits depend on the company"
    tiny.assert_nothing_is_held(driver)


def sampled(driver: Driver, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of each answer."""
    requests = driver.door.admit(prompt, params)
    ids = [next(tiny._request_ids) for _ in requests]
    for request_id, request in zip(ids, requests, strict=True):
        driver.add(dataclasses.replace(request, request_id=request_id))
    done = tiny.drain(driver)
    return [(done[i].token_ids, list(done[i].logprobs or [])) for i in ids]


@slow
@pytest.mark.parametrize("name", ["token", "all_layers", "int4_grouped"])
def test_windows_and_recomputed_rows(name: str) -> None:
    """Blocks that leave a window, of a token each, of all layers, with numbers of two kinds."""
    layout, window = LAYOUTS[name], 21
    config = tiny.with_window(window)
    its = options(name, layout, num_tokens=192) | {"preemption_mode": "recompute", "num_host_blocks": 0}
    driver = Driver(EngineConfig(**tiny.DEFAULTS | its), config, functools.partial(tiny.load, config=config))
    assert tiny.generate(driver, PROMPTS, tiny.greedy(NUM_NEW)) == answers(name, layout, window)
    tiny.assert_nothing_is_held(driver)


@slow
def test_measured_scales_are_those_of_the_first_prompt() -> None:
    layout = layouts.choose("token_major", "fp8", measures_scales=True)
    its = options("token_major", layout, num_tokens=512) | {
        "kv_cache_dtype": "fp8",
        "calculate_kv_scales": True,
    }
    driver = tiny.driver(**its)
    kv = driver._state.kv_cache
    assert not np.any(kv.shared["k_scale"])
    first = tiny.generate(driver, PROMPTS[1:2], tiny.greedy(NUM_NEW))
    scales = {name: np.asarray(x) for name, x in driver._state.kv_cache.shared.items()}
    assert all(np.all(x > 0) and x.shape == (2, 2) for x in scales.values())
    assert tiny.generate(driver, PROMPTS[1:2], tiny.greedy(NUM_NEW)) == first
    tiny.generate(driver, PROMPTS, tiny.greedy(4))
    for name, x in scales.items():
        np.testing.assert_array_equal(driver._state.kv_cache.shared[name], x)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_layout": "token"}, "block_size must be 1, not block_size=8"),
        ({"kv_layout": "split_x", "kv_cache_dtype": "fp8"}, "must be 'auto' for kv_layout='split_x'"),
        ({"kv_layout": "nothing"}, "kv_layout='nothing' must be token_major"),
        ({"kv_cache_dtype": "int4"}, "block_size must be a multiple of 16"),
        ({"calculate_kv_scales": True}, "must go with a kv_cache_dtype of fp8"),
    ],
)
def test_combinations_that_mean_nothing_are_refused_at_the_door(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny.driver(**wrong)


def test_a_block_takes_what_the_arrays_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_compile", lambda self: None)
    for name, layout in LAYOUTS.items():
        driver = tiny.driver(**options(name, layout))
        held = sum(x.nbytes for x in driver._state.kv_cache.blocks.values())
        assert held == driver.cache_size.num_bytes, name
        assert driver._state.kv_cache.dtype == jnp.float32
