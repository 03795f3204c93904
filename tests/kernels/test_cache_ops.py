"""reshape_and_cache, copy_blocks and swap_blocks against their oracles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import ops
from reference import cache_ops
from tests import quick
from tests.shapes import DTYPES, QUANTISED

write = quick.jit(ops.reshape_and_cache, static_argnames="kv_layout")
swap_blocks = quick.jit(ops.swap_blocks, donate_argnums=1)


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float32", *QUANTISED])
def test_reshape_and_cache(cache_dtype: str, layout: str) -> None:
    rng = np.random.default_rng(0)
    num_blocks, block_size, num_kv_heads, head_dim = 6, 4, 3, 8
    k, v = (100 * rng.standard_normal((2, 7, num_kv_heads, head_dim))).astype(np.float32)
    k[0] = 1e6  # beyond every small type
    slots = np.array([9, 23, -1, 4, 10**6, 22, -(2**31)], np.int32)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    if layout == "head_major":
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
    old = np.full(shape, 3).astype(DTYPES[cache_dtype])
    scales = {}
    if cache_dtype in QUANTISED:
        scales = {"k_scale": np.float32(1.5), "v_scale": np.array([0.5, 1.0, 2.0], np.float32)}
    want = cache_ops.reshape_and_cache(k, v, old, old, slots, **scales, kv_layout=layout)
    got = write(k, v, old, old, slots, **scales, kv_layout=layout)
    for name, g, w in zip("kv", got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g)[1:], w[1:], err_msg=name)  # block 0 is the null block


def test_reshape_and_cache_is_in_place_under_donation() -> None:
    spec = jax.ShapeDtypeStruct
    cache = spec((512, 16, 8, 64), jnp.bfloat16)
    new = spec((4, 8, 64), jnp.bfloat16)
    compiled = (
        jax.jit(ops.reshape_and_cache, donate_argnums=(2, 3))
        .lower(new, new, cache, cache, spec((4,), jnp.int32))
        .compile()
    )
    memory = compiled.memory_analysis()
    cache_bytes = 512 * 16 * 8 * 64 * 2
    assert memory.alias_size_in_bytes == 2 * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes // 100


copy_blocks = quick.jit(ops.copy_blocks)
PAIRS = st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6)), max_size=8)


@settings(max_examples=200, deadline=None)
@given(PAIRS)
def test_copy_blocks_is_sequential(pairs: list[tuple[int, int]]) -> None:
    """Chains, repeats, loops and pairs out of range, padded to one length (so one compilation)."""
    padded = np.array([*pairs, *[(0, 0)] * (8 - len(pairs))], np.int32)
    caches = [np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6, dtype=np.int32)]
    want = cache_ops.copy_blocks(caches, padded)
    got = copy_blocks(caches, padded)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), w)


def test_copy_blocks_without_caches_or_pairs() -> None:
    assert ops.copy_blocks([], jnp.zeros((0, 2), jnp.int32)) == []
    (same,) = ops.copy_blocks([jnp.arange(3)], jnp.zeros((0, 2), jnp.int32))
    assert same.tolist() == [0, 1, 2]


@pytest.mark.parametrize("target_space", ["Host", "Device"])
@pytest.mark.parametrize("source_space", ["Host", "Device"])
def test_swap_blocks(source_space: str, target_space: str) -> None:
    source = np.arange(20, dtype=np.float32).reshape(10, 2)
    target = -np.ones((4, 2), np.float32)
    pairs = np.array([[9, 1], [3, 2], [8, 1], [7, 4], [-1, 0], [10, 3]], np.int32)
    spaces = jax.memory.Space
    got = swap_blocks(
        jax.device_put(source, spaces[source_space]), jax.device_put(target, spaces[target_space]), pairs
    )
    assert jax.typeof(got).memory_space == spaces[target_space]
    np.testing.assert_array_equal(np.asarray(got), cache_ops.swap_blocks(source, target, pairs))
