"""Transitions of block tables under JAX's transformations, and in place."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.memory import block_pool, block_table, prefix_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.memory.policies import LRU, LRU_SPLIT, NAIVE, Policy
from jaxpaged.research.verify.subjects import commit, look_up
from jaxpaged.status import Status
from tests.memory.test_block_table import BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, assert_equal_states, create


def step(tables: BlockTables, num: jax.Array) -> tuple[BlockTables, jax.Array]:
    """Let rows grow, and free a full one."""
    tables, info = block_table.append(tables, num, max_new_blocks=MAX_SEQS)
    tables, freed = block_table.free_rows(tables, tables.seq_lens >= 12)
    return tables, info.status | freed.status


def growth(num_steps: int, seed: int = 0) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).integers(0, 4, (num_steps, MAX_SEQS)), jnp.int32)


def test_scan_and_while_loop_equal_steps() -> None:
    nums = growth(40)
    tables = create(LRU, 13)
    jitted = jax.jit(step)
    for num in nums:
        tables, status = jitted(tables, num)
        assert int(status) == Status.OK
        check_invariants(tables)
    assert jitted._cache_size() == 1
    scanned, statuses = jax.jit(lambda t: jax.lax.scan(step, t, nums))(create(LRU, 13))
    assert not statuses.any()
    assert_equal_states(scanned, tables)

    def body(carry: tuple[jax.Array, BlockTables]) -> tuple[jax.Array, BlockTables]:
        i, tables = carry
        return i + 1, step(tables, nums[i])[0]

    start = (jnp.int32(0), create(LRU, 13))
    _, looped = jax.jit(lambda c: jax.lax.while_loop(lambda c: c[0] < len(nums), body, c))(start)
    assert_equal_states(looped, tables)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [NAIVE, LRU_SPLIT], ids=lambda policy: policy.name)
def test_vmap_is_a_batch_of_pools(policy: Policy) -> None:
    """Three pools with a life each, and prompts looked up in each, in one call."""

    def live(nums: jax.Array, tokens: jax.Array) -> tuple[BlockTables, jax.Array]:
        cache = prefix_cache.create(9, BLOCK_SIZE) if policy.keeps_content else None
        pool = block_pool.create(9, policy, prefix_cache=cache)
        tables = block_table.create(pool, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE)

        def one(tables: BlockTables, num: jax.Array) -> tuple[BlockTables, jax.Array]:
            tables, status = step(tables, num)
            if cache is not None:
                tables, _ = commit(tables, tokens, tables.seq_lens, max_blocks=MAX_SEQS)
            return tables, status

        tables, _ = jax.lax.scan(one, tables, nums)
        if tables.pool.prefix_cache is None:
            return tables, jnp.zeros(0, jnp.int32)
        found = look_up(tables.pool.prefix_cache, tokens[0], jnp.int32(16), jnp.int32(0))
        return tables, found.block_ids

    nums = jnp.stack([growth(25, seed) for seed in range(3)])
    tokens = jnp.array(np.random.default_rng(3).integers(0, 2, (3, MAX_SEQS, 16)))
    batch, found = jax.jit(jax.vmap(live))(nums, tokens)
    alone = jax.jit(live)
    for i in range(3):
        tables, ids = alone(nums[i], tokens[i])
        check_invariants(tables)
        assert_equal_states(jax.tree.map(lambda x, i=i: x[i], batch), tables)
        assert found[i].tolist() == ids.tolist()


def test_no_transition_copies_or_scans_the_pool() -> None:
    """Donated arrays of the pool's size are changed in place. (A ring that is full of holes is compacted.)"""
    num_blocks = 5003  # unlike every other size here
    cache = prefix_cache.create(num_blocks, BLOCK_SIZE)
    pool = block_pool.create(num_blocks, LRU_SPLIT, prefix_cache=cache)
    tables = block_table.create(pool, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE)
    nums, rows = jnp.zeros(MAX_SEQS, jnp.int32), jnp.zeros(MAX_SEQS, bool)
    line, tokens = jnp.zeros(16, jnp.int32), jnp.zeros((MAX_SEQS, 16), jnp.int32)

    def find_and_adopt(t: BlockTables, line: Any) -> Any:
        hit = look_up(t.pool.prefix_cache, line, jnp.int32(16), jnp.int32(0))
        chain = jax.tree.map(lambda x: x[None], hit.chain)
        return block_table.adopt(t, jnp.array([0]), hit.block_ids[None], chain, jnp.array([True]))

    transitions = {
        "append": (lambda t, n: block_table.append(t, n, max_new_blocks=4), nums),
        "commit": (lambda t, n: commit(t, tokens, n, max_blocks=4), nums),
        "adopt": (find_and_adopt, line),
        "free": (lambda t, r: block_table.free_rows(t, r), rows),
        "truncate": (block_table.truncate, nums),
        "window": (block_table.slide_window, nums),
    }
    sizes = {str(n) for n in (num_blocks, pool.free_queue.capacity, cache.num_slots)}
    for name, (transition, arg) in transitions.items():
        donating = jax.jit(transition, donate_argnums=0)
        compiled = donating.lower(tables, arg).compile()
        text = compiled.as_text()
        # The others have a branch that compacts.
        entry = text if name in ("append", "commit") else text.split("\nENTRY ")[1]
        for line_ in entry.splitlines():
            made = re.search(r"= \w+\[(\d+)[\],]\S* (copy|sort|broadcast|iota|reduce|concatenate)\(", line_)
            assert not (made and made.group(1) in sizes), f"{name} makes an array of the pool's size: {line_}"
        tables, info = donating(tables, arg)
        assert int(info.status) == Status.OK
