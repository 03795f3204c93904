"""Content of several groups of layers: whose block is found, and where a hit ends that has gaps."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.memory import block_pool, block_table, group_content, prefix_cache
from jaxpaged.memory.cache_specs import FULL, ChunkedLocal, SlidingWindow
from jaxpaged.memory.policies import LRU
from jaxpaged.research.verify import quick, subjects
from tests.outsiders.layer_kind import WindowWithSinks

BLOCK_SIZE, NUM_BLOCKS = 2, 5
SPECS = FULL, SlidingWindow(4), ChunkedLocal(6), WindowWithSinks(3, 3)
TOKENS = np.arange(1, 1 + NUM_BLOCKS * BLOCK_SIZE, dtype=np.int32)

append = quick.jit(functools.partial(block_table.append, max_new_blocks=len(SPECS) * NUM_BLOCKS))
commit = quick.jit(functools.partial(subjects.commit, max_blocks=NUM_BLOCKS))
evict = quick.jit(block_pool.evict)


@quick.jit
def look_up(pool):
    def tokens_at(positions):
        return jnp.asarray(TOKENS).at[positions].get(mode="clip")

    most = TOKENS.size + 1
    hit = prefix_cache.lookup(pool.prefix_cache, tokens_at, jnp.int32(most), jnp.int32(0), max_tokens=most)
    return group_content.lookup(pool.prefix_cache, hit, SPECS)


@pytest.fixture(scope="module")
def tables():
    """Return the tables of one row, whose blocks can be found."""
    size = 1 + len(SPECS) * NUM_BLOCKS
    pool = block_pool.create(size, LRU, prefix_cache=prefix_cache.create(size, BLOCK_SIZE))
    made = block_table.create(pool, 1, NUM_BLOCKS, BLOCK_SIZE, len(SPECS))
    made, _ = append(made, jnp.array([TOKENS.size]))
    return commit(made, jnp.asarray(TOKENS)[None], made.seq_lens)[0]


def found(pool):
    """Return the length of the hit, and the blocks that it names of each group."""
    hit = look_up(pool)
    return int(hit.chain.num_blocks), np.asarray(hit.block_ids)


def kept(spec, num_blocks):
    """Return which blocks the next token reads behind so many."""
    first = int(spec.first_read(jnp.int32(num_blocks * BLOCK_SIZE))) // BLOCK_SIZE
    num_first = -(-spec.first_tokens // BLOCK_SIZE)
    return [i < num_blocks and (i >= first or i < num_first) for i in range(NUM_BLOCKS)]


def test_each_group_finds_its_own_blocks(tables):
    length, block_ids = found(tables.pool)
    assert length == NUM_BLOCKS
    want = np.where([kept(spec, NUM_BLOCKS) for spec in SPECS], tables.block_tables, 0)
    assert block_ids.tolist() == want.tolist()
    assert len({*tables.block_tables.reshape(-1).tolist()}) == len(SPECS) * NUM_BLOCKS


@pytest.mark.parametrize("group", range(len(SPECS)))
def test_a_hit_ends_where_a_group_has_all_that_is_read_next(tables, group):
    """Any of the blocks of one group may be gone."""
    for gone in itertools.product([False, True], repeat=NUM_BLOCKS):
        pool, _ = evict(tables.pool, tables.block_tables[group], jnp.array(gone))
        reads = [kept(SPECS[group], n) for n in range(NUM_BLOCKS + 1)]
        serves = [n for n in range(NUM_BLOCKS + 1) if not any(np.array(reads[n]) & gone)]
        length, block_ids = found(pool)
        assert length == max(serves), f"{gone=}"
        want = np.where([kept(spec, length) for spec in SPECS], tables.block_tables, 0)
        assert block_ids.tolist() == want.tolist()
