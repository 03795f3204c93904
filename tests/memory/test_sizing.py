"""Tests of the bytes of a block and of the number of blocks that fit."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity, machine, programs, start
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.setup import Setup
from jaxpaged.memory import kv_cache, sizing
from jaxpaged.memory.sizing import Budget
from jaxpaged.models.decoder import abstract
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.quantised.on_load import OnLoad
from jaxpaged.sampling_params import MAX_LOGPROBS
from jaxpaged.sampling_state import MAX_EDITS
from jaxpaged.step.config import MAX_STEPS
from reference.v0.cache_engine import CacheEngine
from tests import tiny

SIZES = {"block_size": 4, "num_layers": 4, "num_kv_heads": 8, "head_dim": 128}


def test_bytes_per_block_are_those_of_vllm_and_of_the_arrays():
    bytes_per_block = sizing.bytes_per_block(**SIZES, dtype=jnp.dtype("bfloat16"))
    assert bytes_per_block == 65_536
    assert bytes_per_block == CacheEngine.get_cache_block_size(4, "auto", 4, 8, 128)
    cache = kv_cache.create(4, 10, 4, 8, 128, jnp.dtype("bfloat16"))
    assert sum(array.nbytes for array in jax.tree.leaves(cache)) == 10 * bytes_per_block


def sized(available_bytes=10**6, **changes):
    options = {
        "num_blocks": None,
        "bytes_per_block": 100,
        "state_bytes_per_block": 14,
        "block_size": 4,
        "num_layers": 3,
        "budget": Budget(available_bytes, "a test"),
    }
    return sizing.cache_size(**options | changes)


def test_a_cache_takes_all_of_the_memory_that_was_given():
    cache = sized(available_bytes=8 * 114 - 1)
    assert cache.num_blocks == 7
    assert cache.num_tokens == 24
    assert cache.num_bytes == 700
    assert cache.reason == "as many as fit into a test"


def test_a_cache_has_no_more_blocks_than_its_slots_have_numbers():
    assert sized(available_bytes=10**12).num_blocks == 2**20
    cache, slots = sized(available_bytes=10**12, block_size=2**12), 3 * 2**12
    assert cache.num_blocks * slots <= 2**31 - 1 < (cache.num_blocks + 1) * slots
    assert cache.reason == "as many as are made without being asked for, in a test"
    assert sized(num_blocks=cache.num_blocks, block_size=2**12).num_blocks == cache.num_blocks
    message = r"num_blocks=174763 must be at most 174762, for 3 layers of 4096 tokens a block"
    with pytest.raises(InputError, match=message):
        sized(num_blocks=cache.num_blocks + 1, block_size=2**12)


def test_a_given_number_of_blocks_is_taken():
    assert sized(num_blocks=77, available_bytes=0).num_blocks == 77


@pytest.mark.parametrize("available", [227, 0, -5])
def test_a_cache_without_room_for_a_block_is_refused(available):
    message = rf"at least 2 blocks of 100 bytes, but only {max(available, 0)} bytes are available \(a test\)"
    with pytest.raises(InputError, match=message):
        sized(available_bytes=available)


@pytest.mark.parametrize(
    ("guess", "fit_beside", "numbers"),
    [
        (1000, lambda n: 1000, [1000]),
        (1001, lambda n: 1015, [1000]),  # gives up 15, one in 66
        (1000, lambda n: 1016, [1000, 1016]),
        (1000, lambda n: 999, [1000, 996]),
        (1000, lambda n: 2500, [1000, 2496]),
        (1000, lambda n: 2000 - n // 2, [1000, 1496, 1248]),  # a program that grows
        (1000, lambda n: 10**9, [1000, 5120]),
        (2, lambda n: 2, [2]),
        (1000, lambda n: -7, [1000]),
    ],
)
def test_programs_are_made_until_one_fits(guess, fit_beside, numbers):
    """Most often one. `numbers` of blocks, each of few bits, for which they are made."""
    made = []

    def make(num_blocks):
        made.append(num_blocks)
        return fit_beside(num_blocks)

    num_blocks = sizing.fitted(guess, 5130, make)
    assert made == numbers
    fits = min(fit_beside(made[-1]), 5130)
    assert num_blocks == made[-1] <= fits if fits > 1 else num_blocks < 2
    assert all(n == sizing.coarse(n) and n.bit_length() - 8 <= (n & -n).bit_length() - 1 for n in made)


def test_a_sum_is_told_in_words_and_on_paper():
    budget = Budget(1000, "half of 2000 bytes", (("in use", 300),)).less(("of weights", 0), ("of state", 1))
    assert str(budget) == "half of 2000 bytes less 300 in use and 1 of state"
    lines = [line.split() for line in budget.lines()]
    assert [line[:2] for line in lines[1:]] == [["-", "300"], ["-", "1"], ["=", "699"]]
    assert budget.left == 699


@pytest.mark.parametrize(
    ("utilization", "environment", "stats", "most", "what"),
    [
        (0.5, {}, {}, 500, "50% of the GPU's 1000 bytes"),
        (0.9, {}, {}, 750, "75% of the GPU's 1000 bytes .JAX has no more: set XLA_CLIENT_MEM_FRACTION=0.9"),
        (0.9, {"XLA_CLIENT_MEM_FRACTION": "0.9"}, {"bytes_limit": 900}, 900, "90% of the GPU's 1000 bytes$"),
        (0.5, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25"}, {"bytes_limit": 250}, 250, "25% of .* no more"),
        (0.5, {}, {"pool_bytes": 600}, 500, "50% of"),
        (0.7, {}, {"pool_bytes": 600}, 600, "the 600 bytes of the GPU that were free when JAX started"),
        (0.7, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {"pool_bytes": 600}, 700, "70% of"),
    ],
)
def test_the_memory_of_a_gpu_is_what_jax_has_of_it(utilization, environment, stats, most, what, monkeypatch):
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = EngineConfig(gpu_memory_utilization=utilization)
    budget = machine.gpu_budget(config, {"bytes_limit": 750, "bytes_in_use": 40} | stats)
    assert budget.total == most
    assert re.match(what, budget.what)
    assert budget.left == most - 40 - machine.GPU_BYTES_FREE


def test_where_jax_does_not_say_how_much_memory_there_is_the_cache_must_be_given(monkeypatch):
    monkeypatch.setattr(machine, "memory_stats", dict)
    with pytest.raises(InputError, match="num_blocks=None must be an int where JAX does not say how much"):
        start.known_size(Setup(EngineConfig(), tiny.CONFIG))
    assert start.known_size(Setup(EngineConfig(num_blocks=9), tiny.CONFIG)).num_blocks == 9


def test_what_is_too_large_beside_the_weights_is_refused_before_they_are_loaded(monkeypatch):
    weights = sum(w.nbytes for w in tiny.weights().values())
    most = machine.GPU_BYTES_FREE + weights + 2 * 2048
    config = EngineConfig(**tiny.DEFAULTS | {"num_blocks": None, "gpu_memory_utilization": 0.5})
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setattr(machine, "memory_stats", lambda: {"bytes_limit": most})
    assert start.known_size(Setup(config, tiny.CONFIG)) is None
    monkeypatch.setattr(machine, "memory_stats", lambda: {"bytes_limit": most - 1})
    message = (
        rf"at least 2 blocks of 2048 bytes, but only 4095 bytes .* less .* free and {weights} of weights"
    )
    with pytest.raises(InputError, match=message):
        start.known_size(Setup(config, tiny.CONFIG))


def test_quantised_weights_count_as_they_are_kept(monkeypatch):
    """Where there is room for these, but not for wide ones."""

    def shapes(load_as):
        return abstract(tiny.CONFIG, load_as, tiny.NAMES, OnLoad("int4"))

    kept = sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(shapes(LoadAs(jnp.dtype("float32")))))
    )
    assert kept < sum(w.nbytes for w in tiny.weights().values()) / 2
    most = machine.GPU_BYTES_FREE + kept + 2 * 2048
    config = EngineConfig(**tiny.DEFAULTS | {"num_blocks": None, "gpu_memory_utilization": 0.5})
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setattr(machine, "memory_stats", lambda: {"bytes_limit": most})
    assert start.known_size(Setup(config, tiny.CONFIG), shapes) is None
    with pytest.raises(InputError, match="of weights"):
        start.known_size(Setup(config, tiny.CONFIG))
    monkeypatch.setattr(machine, "memory_stats", lambda: {"bytes_limit": most - 1})
    with pytest.raises(InputError, match=f"only 4095 bytes .* less .* free and {kept} of weights"):
        start.known_size(Setup(config, tiny.CONFIG), shapes)


def test_on_a_gpu_the_cache_gets_what_the_compiled_loop_leaves(monkeypatch):
    """All that sizing asks of a GPU is its memory, so this CPU plays one. The program is the other tests'."""
    given = tiny.driver()
    program = given.device.kept_run
    of_loop = program.temporary_bytes + 2 * program.result_bytes
    assert min(program.temporary_bytes, program.result_bytes) > 10_000
    num_blocks = given.cache_size.num_blocks
    of_state = sum(x.nbytes for x in jax.tree.leaves(given.state)) - given.cache_size.num_bytes
    in_use = 10**6
    taken = in_use + machine.GPU_BYTES_FREE + of_state + of_loop
    limit = taken + num_blocks * 2048 + 2047
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    tiny.replace(monkeypatch, machine, "memory_stats", lambda: {"bytes_limit": limit, "bytes_in_use": in_use})
    tiny.replace(
        monkeypatch, capacity, "activation_bytes", lambda *_: of_loop
    )  # a good guess: 65 blocks, or one less
    tiny.replace(monkeypatch, programs, "compiled", lambda *_: pytest.fail("there is one"))
    driver = tiny.driver(num_blocks=None, gpu_memory_utilization=0.5)
    assert driver.cache_size.num_blocks == num_blocks
    assert driver.cache_size.budget.left == limit - taken
    assert ("of the compiled loop", of_loop) in driver.cache_size.budget.taken
    assert driver.device.kept_run is program
    [prompt] = tiny.prompts([20])
    assert tiny.generate(driver, [prompt], tiny.greedy(5)) == [tiny.reference_answer(tuple(prompt), 5)]

    # Before it is loaded, its weights count beside; and the program is the same.
    weights = sum(x.nbytes for x in jax.tree.leaves(driver.device.params))
    stats = {"bytes_limit": limit + weights, "bytes_in_use": in_use}
    tiny.replace(monkeypatch, machine, "memory_stats", lambda: stats)
    size = start.cache_size(driver.setup)
    assert (size.num_blocks, size.budget.left) == (num_blocks, limit - taken)


IN_MEMORY = Budget(20000, "half of 40000 bytes", (("of weights", 1568),))


@pytest.mark.parametrize(
    ("options", "is_gpu", "window", "want"),
    [
        ({"num_blocks": 17}, False, None, 128),
        (
            {"num_blocks": 16},
            False,
            None,
            r"^max_model_len=128, the model's own, needs 16 blocks of 8 tokens, "
            r"32768 bytes, but num_blocks=16 leaves 15 for use; give max_model_len=121, or 'auto' for what "
            r"fits, or num_blocks=17$",
        ),
        (
            {"num_blocks": 9, "max_model_len": 66},
            False,
            None,
            "^max_model_len=66 needs 9 blocks .* leaves 8 for",
        ),
        ({"num_blocks": 9, "max_model_len": 65}, False, None, 65),
        ({"num_blocks": 9, "max_model_len": "auto"}, False, None, 65),
        ({"num_blocks": 9, "max_model_len": -1}, True, None, 65),
        ({"num_blocks": 17, "max_model_len": "auto"}, False, None, 128),
        ({"max_model_len": "auto"}, True, None, 65),
        (
            {},
            True,
            None,
            r"needs 16 blocks of 8 tokens, 32768 bytes, but the cache has 8 for use, 16384 bytes: as "
            r"many as fit into half of 40000 bytes less 1568 of weights; give max_model_len=65, or 'auto' "
            r"for what fits, or more memory \(gpu_memory_utilization\)$",
        ),
        ({}, False, None, 65),  # of a CPU's cache and length nobody has said anything
        ({"max_model_len": 66}, False, None, "^max_model_len=66 needs 9 blocks"),
        ({"num_blocks": 9}, False, 16, 128),  # a row leaves behind what its window has left
    ],
)
def test_a_length_that_the_cache_cannot_hold_is_refused_or_made_to_fit(
    options, is_gpu, window, want, monkeypatch, caplog
):
    """The door asks that all tokens of a request but the answer's last have slots."""
    if is_gpu:
        monkeypatch.setattr(machine, "memory_stats", dict)
    config = EngineConfig(**tiny.DEFAULTS | {"num_blocks": None, "max_num_batched_tokens": 36} | options)
    model_config = tiny.with_window(window) if window else tiny.CONFIG
    why = ("num_blocks was given", None) if config.num_blocks else (sizing.FITTED, IN_MEMORY)
    size = sizing.CacheSize(config.num_blocks or 9, 2048, 8, *why)
    if isinstance(want, str):
        with pytest.raises(InputError, match=want):
            capacity.served_len(Setup(config, model_config), size)
    else:
        assert capacity.served_len(Setup(config, model_config), size) == want
    says = f"max_model_len is {want}, not the model's 128: what fits into 8 blocks of 8 tokens"
    assert (says in caplog.text) == (want == 65 and options.get("max_model_len") != 65)


def test_a_cache_too_small_is_told_of_before_anything_is_loaded_and_the_door_knows_what_fits(monkeypatch):
    with pytest.raises(InputError, match="max_model_len=128, the model's own, needs 16 blocks"):
        tiny.driver(lambda _: pytest.fail("it is loaded"), num_blocks=16)
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    door = tiny.driver(num_blocks=9, max_model_len="auto").door
    assert door.max_model_len == 65
    [request] = door.admit([1] * 64, tiny.greedy(9))
    assert request.max_num_tokens == 65
    with pytest.raises(InputError, match="the prompt has 65 tokens, must have less than max_model_len=65"):
        door.admit([1] * 65, tiny.greedy(9))


def test_what_a_cpu_has_for_the_cache_is_reckoned_from_shapes():
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=36)
    budget = capacity.budget(Setup(config, tiny.CONFIG), bytes_to_load=10**6)
    # 32 tokens x the 96 columns of gate and up, four times, and 4 rows x 97 logits, three times
    activations = 4 * (4 * 32 * 96 + 3 * 4 * 97)
    state, per_block = capacity.state_bytes(Setup(config, tiny.CONFIG))
    assert budget.taken == (("of state", state), ("of activations", activations))
    assert "5% of this machine's" in budget.what
    # Of 8 rows the tokens, what changes logits, and the last tokens' scores; 56 bytes and 16 tokens a block.
    a_row = 4 * 128 + 12 * MAX_EDITS + MAX_STEPS * 4 * (2 + 2 * MAX_LOGPROBS)
    assert 8 * a_row < state < 8 * a_row + 4096
    assert per_block == 56 + 4 * 16


def test_what_is_reckoned_of_the_state_is_what_the_state_takes(monkeypatch):
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    driver = tiny.driver(num_blocks=128)
    fixed, per_block = capacity.state_bytes(driver.setup)
    state = driver.state
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - sum(
        x.nbytes for x in jax.tree.leaves(state.kv_cache)
    )
    assert held == fixed + 128 * per_block
