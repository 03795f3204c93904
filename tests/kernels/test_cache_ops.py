"""reshape_and_cache, copy_blocks and swap_blocks against their oracles."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.research.verify import Terms, cases_of, check
from jaxpaged.research.verify.cases.caches import CopyCase, MergeCase, Pairs, WriteCase
from pallas_kernels import ops
from pallas_kernels.support import Options
from pallas_kernels.xla import attention as xla

ON_DEVICE = Terms(arrays="jax")
write = jax.jit(ops.reshape_and_cache, static_argnames="kv_layout")
swap_blocks = jax.jit(ops.swap_blocks, donate_argnums=1)


@pytest.mark.parametrize("case", cases_of("reshape_and_cache"), ids=str)
def test_reshape_and_cache(case: WriteCase) -> None:
    check(write, "reshape_and_cache", case, ON_DEVICE)


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


copy_blocks = jax.jit(ops.copy_blocks)
PAIRS = st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6)), max_size=8).map(tuple)


@settings(max_examples=200, deadline=None)
@given(PAIRS)
def test_copy_blocks_is_sequential(pairs: Pairs) -> None:
    """Chains, repeats, loops and pairs out of range."""
    check(copy_blocks, "copy_blocks", CopyCase("drawn", pairs), ON_DEVICE)


def test_copy_blocks_without_caches_or_pairs() -> None:
    assert ops.copy_blocks([], jnp.zeros((0, 2), jnp.int32)) == []
    (same,) = ops.copy_blocks([jnp.arange(3)], jnp.zeros((0, 2), jnp.int32))
    assert same.tolist() == [0, 1, 2]


@pytest.mark.parametrize("target_space", ["Host", "Device"])
@pytest.mark.parametrize("source_space", ["Host", "Device"])
def test_swap_blocks(source_space: str, target_space: str) -> None:
    spaces = jax.memory.Space

    def swap(source: jax.Array, target: jax.Array, pairs: jax.Array) -> jax.Array:
        got = swap_blocks(
            jax.device_put(source, spaces[source_space]), jax.device_put(target, spaces[target_space]), pairs
        )
        assert jax.typeof(got).memory_space == spaces[target_space]
        return got

    for case in cases_of("swap_blocks"):
        check(swap, "swap_blocks", case, ON_DEVICE)


@pytest.mark.parametrize("case", cases_of("merge"), ids=str)
def test_merge(case: MergeCase) -> None:
    """XLA's merge stands for -inf with a large negative number."""

    def merge(
        out: jax.Array, maxima: jax.Array, sums: jax.Array, sinks: jax.Array | None = None
    ) -> jax.Array:
        partials = xla.Softmax(out, jnp.maximum(maxima, xla.LOWEST), sums)
        by_partition = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0)[:, :, :, None], partials)
        q = jnp.zeros((len(out), *out.shape[1:2], out.shape[3]))
        return xla.finish(xla.merge(by_partition), q, Options(scale=1.0, sinks=sinks))

    check(merge, "merge", case, ON_DEVICE)
