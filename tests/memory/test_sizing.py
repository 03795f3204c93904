"""How many bytes a block takes and how many blocks fit."""

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import machine
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.state import MAX_EDITS, MAX_STEPS
from jaxpaged.memory import kv_cache, sizing
from jaxpaged.sampling_params import MAX_LOGPROBS
from reference.v0.cache_engine import CacheEngine
from tests import tiny

SIZES = {"block_size": 4, "num_layers": 4, "num_kv_heads": 8, "head_dim": 128}


def test_bytes_per_block_are_those_of_vllm_and_of_the_arrays():
    bytes_per_block = sizing.bytes_per_block(**SIZES, dtype=jnp.dtype("bfloat16"))
    assert bytes_per_block == 65_536
    assert bytes_per_block == CacheEngine.get_cache_block_size(4, "auto", 4, 8, 128)
    cache = kv_cache.create(4, 10, 4, 8, 128, jnp.dtype("bfloat16"))
    assert sum(array.nbytes for array in jax.tree.leaves(cache)) == 10 * bytes_per_block


def sized(**changes):
    options = {
        "num_blocks": None,
        "bytes_per_block": 100,
        "state_bytes_per_block": 14,
        "block_size": 4,
        "num_layers": 3,
        "available_bytes": 10**6,
        "available_why": "a test",
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


class FakeGpu:
    """Only what sizing asks of a device."""

    platform = "gpu"

    def memory_stats(self):
        return {"bytes_limit": 10**9}


def test_on_a_gpu_the_cache_gets_what_weights_and_activations_leave(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeGpu()])
    config = EngineConfig(gpu_memory_utilization=0.5, max_num_seqs=4, max_num_batched_tokens=36)
    left, why = machine.available_bytes(config, tiny.CONFIG, jnp.dtype("float32"))
    weights = sum(w.nbytes for w in tiny.weights().values())
    # 32 tokens x the 96 columns of gate and up, four times, and 4 rows x 97 logits, three times
    activations = 4 * (4 * 32 * 96 + 3 * 4 * 97)
    state, per_block = machine.state_bytes(config, tiny.CONFIG)
    assert left == 500_000_000 - weights - state - activations
    assert "50% of 1000000000 bytes" in why
    # Of 8 rows the tokens, what changes logits, and the last tokens' scores; 56 bytes and 16 tokens a block.
    a_row = 4 * 128 + 12 * MAX_EDITS + MAX_STEPS * 4 * (2 + 2 * MAX_LOGPROBS)
    assert 8 * a_row < state < 8 * a_row + 4096
    assert per_block == 56 + 4 * 16


def test_what_is_reckoned_of_the_state_is_what_the_state_takes(monkeypatch):
    monkeypatch.setattr(Driver, "_compile", lambda self: None)
    driver = tiny.driver(num_blocks=128)
    fixed, per_block = machine.state_bytes(driver.config, tiny.CONFIG)
    state = driver._state
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) - sum(
        x.nbytes for x in jax.tree.leaves(state.kv_cache)
    )
    assert held == fixed + 128 * per_block
