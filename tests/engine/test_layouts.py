"""Every layout of the registry under a model: the tokens are those of the oracle, with its numbers.

By forward passes alone, between which blocks go to the host and back, and are copied; and in an engine, where
compiling takes most of the time, one layout of each kind: prompts in several tiles, decoding, hits, rows that
give way and come back, forks, windows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity, start
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.setup import Setup
from jaxpaged.memory import kv_cache
from jaxpaged.memory.eviction import EVICTION_POLICIES
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.config import LayerKind, ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.sampling_params import SamplingParams
from pallas_kernels import layouts, native
from pallas_kernels.layouts import LAYOUTS, Fp8, Layout, Sizes
from reference import cached_model
from reference import model as reference_model
from tests import layouts as cases
from tests import tiny
from tests.marks import slow_and_nightly

PROMPTS = tiny.prompts([20, 40, 17, 20, 70])
NUM_NEW = 24
TILE_LEN = 32
F32 = jnp.dtype("float32")
slow = pytest.mark.slow
# By forward passes alone in every run: one, with scales beside its numbers.
QUICK = "int8_per_token"
WINDOW = 21
WINDOWED = ("token",)  # the engine with blocks that leave a window, of a token each: they make room by that


def kind(layout: Layout) -> Any:
    """Return the properties of a layout for which an engine has code of its own."""
    block_size = block_size_of(layout)
    arrays = layout.arrays(2, block_size, 2, 8, F32).values()
    has_one_type = len({jnp.dtype(spec.dtype) for spec in arrays}) == 1
    return layout.layers_apart, block_size, has_one_type


def in_engines() -> list[str]:
    """Return the first layout of each kind, and all from outside. Other modules test `token_major`."""
    kinds = {kind(LAYOUTS["token_major"])}
    found = []
    for name, layout in LAYOUTS.items():
        if kind(layout) not in kinds or not layouts.is_ours(layout):
            found.append(name)
        kinds.add(kind(layout))
    return found


def block_size_of(layout: Layout) -> int:
    return cases.block_size_of(layout, (8, 16, 1), head_dim=tiny.CONFIG.head_dim)


def options(layout: Any, chosen: Layout, num_tokens: int = 96) -> dict[str, Any]:
    """Return the options of a pool of `num_tokens` tokens in all."""
    block_size = block_size_of(chosen)
    num_blocks = 1 + num_tokens // block_size
    host = {"preemption_mode": "swap", "num_host_blocks": 1 + 128 // block_size}
    sizes = {"block_size": block_size, "num_blocks": num_blocks, "max_model_len": "auto"}
    return {"kv_layout": layout, **sizes, **host}


def answers(name: str, layout: Layout, window: int | None = None) -> list[list[int]]:
    """Return the oracle's answers of a model with a window."""
    return answers_of(name, layout, tiny.with_window(window))


@functools.cache
def answers_of(name: str, layout: Layout, config: ModelConfig) -> list[list[int]]:
    """Return the oracle's answers; for a layout from outside those of a model with the numbers that it
    reads.
    """
    block_size = block_size_of(layout)
    sizes = Sizes(1 + 128 // block_size, block_size, config.num_kv_heads, config.head_dim)
    oracle = cases.oracle(name, sizes)
    weights = tiny.reference_weights()
    if oracle is None and layout.tolerance is None:
        return [reference_model.generate(config, weights, prompt, NUM_NEW) for prompt in PROMPTS]
    oracle = oracle or cases.by_itself(layout, sizes)
    empty = cases.empty(layout, sizes)
    return [
        cached_model.generate(config, weights, oracle, empty, prompt, NUM_NEW, tile_len=TILE_LEN)
        for prompt in PROMPTS
    ]


@jax.jit
def run(
    model: Decoder, cache: KVCache, token_ids: jax.Array, positions: jax.Array, batch: PassBatch
) -> tuple[jax.Array, KVCache]:
    """Return the likeliest token after each token, and the cache."""
    hidden, cache = model(token_ids, positions, cache, batch)
    return jnp.argmax(model.logits(hidden), axis=-1), cache


class Passes:
    """Model with its caches on one device, as `by_passes` uses them."""

    copy_blocks, copy_within = (
        staticmethod(jax.jit(f)) for f in (kv_cache.copy_blocks, kv_cache.copy_within)
    )

    def __init__(self, config: ModelConfig) -> None:
        self.model = tiny.load(LoadAs(F32), config)
        self.create_cache = self.model.create_cache
        self.run = functools.partial(run, self.model)


def by_passes(layout: Layout, window: int | None = None, passes: Any = Passes) -> list[list[int]]:
    """Compute the answers without an engine: one pass a prompt, then all rows at once.

    One row goes to the host and comes back into other blocks; another goes on in copies of its own.
    """
    block_size, num_rows = block_size_of(layout), len(PROMPTS)
    width = 128 // block_size
    model = passes(tiny.with_window(window))
    cache = model.create_cache(1 + (num_rows + 1) * width, block_size, layout)
    shuffled = np.random.default_rng(0).permutation((num_rows + 1) * width).astype(np.int32)
    *tables, spare = 1 + shuffled.reshape(num_rows + 1, width)
    implementation = "xla" if native.why_not_cache(layout, F32) else "native"

    def tokens_after(token_ids: Any, rows: Any, positions: Any, is_token: Any, starts: Any, lens: Any) -> Any:
        """Compute the next tokens. `rows`, `starts` and `lens` have a value for each tile."""
        nonlocal cache
        at = np.array(tables)[rows]
        if window is not None:
            at[
                (1 + np.arange(width)) * block_size <= np.array(starts)[:, None] + 1 - window
            ] = -7  # it is gone
        of_token = np.repeat(at, len(positions) // len(rows), axis=0)
        slots = of_token[np.arange(len(positions)), positions // block_size] * block_size
        slots = np.where(is_token, slots + positions % block_size, 0)
        ints = (jnp.asarray(x, jnp.int32) for x in (slots, at, starts, lens))
        batch = PassBatch(*ints, implementation=implementation)
        given = (jnp.asarray(x, jnp.int32) for x in (token_ids, positions))
        newest, cache = model.run(cache, *given, batch)
        return np.asarray(newest)

    found = []
    for row, prompt in enumerate(PROMPTS):
        positions = np.arange(3 * TILE_LEN)
        starts = positions[::TILE_LEN]
        lens = np.where(starts < len(prompt), np.minimum(starts + TILE_LEN, len(prompt)), 0)
        padded = np.pad(prompt, (0, len(positions) - len(prompt)))
        newest = tokens_after(padded, [row] * 3, positions, positions < len(prompt), starts, lens)
        found.append([int(newest[len(prompt) - 1])])
    for step in range(1, NUM_NEW):
        if step == 5:
            host = model.create_cache(1 + width, block_size, layout)
            places = 1 + jnp.arange(width, dtype=jnp.int32)
            host = model.copy_blocks(cache, host, jnp.asarray(tables[0]), places)
            cache = model.copy_blocks(host, cache, places, jnp.asarray(spare))
            tables[0], spare = spare, tables[0]
        if step == 9:
            cache = model.copy_within(cache, jnp.asarray(tables[1]), jnp.asarray(spare))
            tables[1] = spare
        positions = np.array([len(prompt) + step - 1 for prompt in PROMPTS])
        last = [answer[-1] for answer in found]
        newest = tokens_after(last, np.arange(num_rows), positions, True, positions, positions + 1)
        for answer, token in zip(found, newest, strict=True):
            answer.append(int(token))
    return found


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(n, marks=slow) for n in LAYOUTS if n != QUICK)])
def test_passes_over_its_blocks_give_the_oracles_tokens(name: str) -> None:
    assert by_passes(LAYOUTS[name]) == answers(name, LAYOUTS[name])


@slow
@pytest.mark.parametrize("name", ["token", "all_layers", "int4_grouped"])
def test_passes_with_a_window(name: str) -> None:
    """Blocks of a token each, of all layers, with numbers of two kinds."""
    assert by_passes(LAYOUTS[name], WINDOW) == answers(name, LAYOUTS[name], WINDOW)


def check_tokens(name: str, layout: Layout, window: int | None = None) -> Driver:
    driver = check_config(name, layout, tiny.with_window(window), options(name, layout))
    assert window or driver.stats.num_preemptions > 0
    return driver


def check_config(name: str, layout: Layout, config: ModelConfig, its: dict[str, Any]) -> Driver:
    """Check the tokens of an engine with these options, and those of a prompt that is in the cache."""
    driver = Driver(EngineConfig(**tiny.DEFAULTS | its), config, functools.partial(tiny.load, config=config))
    want = answers_of(name, layout, config)
    assert tiny.generate(driver, PROMPTS, tiny.greedy(NUM_NEW)) == want
    for _ in range(2):
        hits = driver.stats.num_hit_tokens
        assert tiny.generate(driver, PROMPTS[1:2], tiny.greedy(NUM_NEW)) == want[1:2]
    assert driver.stats.num_hit_tokens > hits
    tiny.assert_nothing_is_held(driver)
    return driver


@pytest.mark.parametrize("name", slow_and_nightly(in_engines(), ["int4_grouped"]))
def test_an_engines_tokens_are_the_oracles(name: str) -> None:
    driver = check_tokens(name, LAYOUTS[name], WINDOW if name in WINDOWED else None)
    several = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=NUM_NEW, logprobs=0)
    together = sampled(driver, PROMPTS[4], several)
    # Alone, one after the other, and without the blocks of one another.
    for index, got in enumerate(together):
        driver.reset_prefix_cache()
        one = dataclasses.replace(several, n=1, seed=5 + index)
        assert sampled(driver, PROMPTS[4], one) == [got], "bits depend on the company"
    tiny.assert_nothing_is_held(driver)


TWO_KINDS = tiny.mixed(LayerKind(), LayerKind(sliding_window=WINDOW))


def of_two_kinds(name: str) -> dict[str, Any]:
    """Return options with room for the longest prompt, but not for all, in blocks of two groups."""
    return options(name, LAYOUTS[name], num_tokens=176) | {"max_num_batched_tokens": 4 + 32}


def check_company(driver: Driver) -> None:
    """Check that rows which grow together, and give way to each other, answer as each does alone."""
    prompts, params = tiny.prompts([9, 12, 5, 10], seed=3), tiny.greedy(60)
    alone = [answer for prompt in prompts for answer in tiny.generate(driver, [prompt], params)]
    before = driver.stats.num_preemptions
    assert tiny.generate(driver, prompts, params) == alone
    assert driver.stats.num_preemptions > before
    tiny.assert_nothing_is_held(driver)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["all_layers", "int8_per_token"])
def test_an_engine_with_two_kinds_of_layers(name: str) -> None:
    check_company(check_config(name, LAYOUTS[name], TWO_KINDS, of_two_kinds(name)))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in EVICTION_POLICIES if name != "lru"])
def test_every_policy_evicts_blocks_of_two_kinds_of_layers(name: str) -> None:
    its = of_two_kinds("token_major") | {"eviction_policy": name}
    check_company(check_config("token_major", LAYOUTS["token_major"], TWO_KINDS, its))


def test_an_engine_has_one_of_each_kind() -> None:
    assert in_engines() == ["fused", "token", "int8_per_token", "int4_grouped"]


def sampled(driver: Driver, prompt: list[int], params: SamplingParams) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities of each answer."""
    requests = tiny.numbered(driver.door.admit(prompt, params))
    for request in requests:
        driver.add(request)
    done = tiny.drain(driver)
    answers = [done[request.request_id] for request in requests]
    return [(answer.token_ids, list(answer.logprobs or [])) for answer in answers]


@slow
def test_measured_scales_are_those_of_the_first_prompt() -> None:
    layout = layouts.choose("token_major", "fp8", measures_scales=True)
    its = options("token_major", layout, num_tokens=512) | {
        "kv_cache_dtype": "fp8",
        "calculate_kv_scales": True,
    }
    driver = tiny.driver(**its)
    kv = driver.state.kv_cache
    assert not np.any(kv.shared["k_scale"])
    first = tiny.generate(driver, PROMPTS[1:2], tiny.greedy(NUM_NEW))
    scales = {name: np.asarray(x) for name, x in driver.state.kv_cache.shared.items()}
    assert all(np.all(x > 0) and x.shape == (2, 2) for x in scales.values())
    assert tiny.generate(driver, PROMPTS[1:2], tiny.greedy(NUM_NEW)) == first
    tiny.generate(driver, PROMPTS, tiny.greedy(4))
    for name, x in scales.items():
        np.testing.assert_array_equal(driver.state.kv_cache.shared[name], x)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kv_layout": "token"}, "block_size must be 1, not block_size=8"),
        ({"kv_layout": "split_x", "kv_cache_dtype": "fp8"}, "must be 'auto' for kv_layout='split_x'"),
        ({"kv_layout": "nothing"}, "kv_layout='nothing' must be token_major"),
        ({"kv_cache_dtype": "int4"}, "block_size must be a multiple of 16"),
        ({"calculate_kv_scales": True}, "must go with a kv_cache_dtype of fp8"),
        (
            {"kv_layout": Fp8(v_scale=(1.0, 0.5, 2.0))},
            "v_scale must be a number, or 2, one for each kv head, not",
        ),
    ],
)
def test_combinations_that_mean_nothing_are_refused_at_the_door(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny.driver(**wrong)


def test_a_block_takes_what_the_arrays_take() -> None:
    model = tiny.load(LoadAs(F32))
    for name, layout in LAYOUTS.items():
        setup = Setup(EngineConfig(**tiny.DEFAULTS | options(name, layout)), tiny.CONFIG)
        size = capacity.cache_size(setup)
        cache = start.state_shapes(setup, model, size.num_blocks).kv_cache
        held = sum(x.size * x.dtype.itemsize for x in cache.blocks.values())
        assert held == size.num_bytes, name
        assert cache.dtype == jnp.float32
