"""Tests beside the lock-step histories: planted collisions, stale parents, sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int, UInt32

from jaxpaged.memory import block_pool, block_table, prefix_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.invariants import InvariantError, check_invariants
from jaxpaged.memory.policies import LRU, LRU_SPLIT, Policy
from jaxpaged.memory.prefix_cache import PrefixCache
from jaxpaged.research.verify import quick, subjects
from jaxpaged.status import Status

BLOCK_SIZE = 4
MAX_SEQS = 3
MAX_BLOCKS = 4
NUM_BLOCKS = 12


def constant_hash(token_ids: Int[Array, "*n block_size"], index: Int[Array, "*n"]) -> UInt32[Array, "*n 2"]:
    return jnp.zeros((*index.shape, 2), jnp.uint32)


# A program a verb and shape: without, each of their operations would be one.
append = quick.jit(block_table.append, static_argnames="max_new_blocks")
commit = quick.jit(subjects.commit, static_argnames="max_blocks")
find = quick.jit(subjects.look_up)
free_rows, slide_window, truncate, adopt = (
    quick.jit(getattr(block_table, verb)) for verb in ("free_rows", "slide_window", "truncate", "adopt")
)
evict_blocks, reset_prefix_cache = quick.jit(block_pool.evict), quick.jit(block_pool.reset_prefix_cache)


def create(hash_fn: prefix_cache.HashFn = prefix_cache.hash_block, policy: Policy = LRU) -> BlockTables:
    cache = prefix_cache.create(NUM_BLOCKS, BLOCK_SIZE, hash_fn)
    pool = block_pool.create(NUM_BLOCKS, policy, prefix_cache=cache)
    return block_table.create(pool, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE)


def prompt(*blocks: int) -> list[int]:
    """Make a prompt in which each letter stands for a block."""
    return [10 * block + i for block in blocks for i in range(BLOCK_SIZE)]


def lines(rows: dict[int, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((MAX_SEQS, MAX_BLOCKS * BLOCK_SIZE), np.int32)
    lens = np.zeros(MAX_SEQS, np.int32)
    for row, line in rows.items():
        tokens[row, : len(line)] = line
        lens[row] = len(line)
    return tokens, lens


def add(tables: BlockTables, rows: dict[int, list[int]]) -> BlockTables:
    """Give empty rows these tokens, and cache them."""
    tokens, lens = lines(rows)
    tables, info = append(tables, lens, max_new_blocks=MAX_SEQS * MAX_BLOCKS)
    assert int(info.status) == Status.OK
    tables, info = commit(tables, tokens, lens, max_blocks=MAX_SEQS * MAX_BLOCKS)
    assert int(info.status) == Status.OK
    check_invariants(tables)
    return tables


def hits(tables: BlockTables, tokens: list[int], salt: int = 0) -> list[int]:
    line = np.zeros(MAX_BLOCKS * BLOCK_SIZE + 1, np.int32)
    line[: len(tokens)] = tokens
    hit = find(tables.pool.prefix_cache, line, np.int32(len(tokens)), np.int32(salt))
    return hit.block_ids[: int(hit.chain.num_blocks)].tolist()


def evict(tables: BlockTables, *block_ids: int) -> BlockTables:
    ids = np.pad(np.array(block_ids, np.int32), (0, 3 - len(block_ids)))
    pool, info = evict_blocks(tables.pool, ids, np.arange(3) < len(block_ids))
    assert int(info.status) == Status.OK
    tables = dataclasses.replace(tables, pool=pool)
    check_invariants(tables)
    return tables


def test_finds_the_longest_run_and_leaves_a_token() -> None:
    tables = add(create(), {0: [*prompt(1, 2, 3), 7]})
    assert tables.block_tables[0].tolist() == [1, 2, 3, 4]
    assert hits(tables, prompt(1, 2, 3)) == [1, 2], "one token is left to compute"
    assert hits(tables, [*prompt(1, 2, 3), 9]) == [1, 2, 3]
    assert hits(tables, [*prompt(1, 2, 4), 9]) == [1, 2]
    assert hits(tables, [*prompt(2, 3), 9]) == [], "the same tokens elsewhere are other content"
    assert hits(tables, [*prompt(1), 9], salt=1) == [], "salts are kept apart"
    assert hits(tables, [1]) == []


def test_the_hash_is_sensitive_to_order_and_place() -> None:
    index = jnp.arange(3)
    tokens = jnp.array([[1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 3, 4]])
    hashes = np.asarray(prefix_cache.hash_block(tokens, index))
    assert len(np.unique(hashes[:, 0])) == len(np.unique(hashes[:, 1])) == 3


def test_a_planted_collision_does_not_match() -> None:
    """All content has one hash; what tells it apart is the stored tokens and the parent."""
    tables = add(create(constant_hash), {0: prompt(1)})
    assert hits(tables, [*prompt(2), 9]) == [], "the only candidate"
    tables = create(constant_hash)
    for row, line in enumerate([prompt(1), prompt(2), prompt(3)]):
        tables = add(tables, {row: line})
    assert [hits(tables, [*prompt(i), 9]) for i in (1, 2, 3)] == [[1], [2], [3]]
    assert hits(tables, [*prompt(4), 9]) == []
    # The same tokens with another parent: again one hash.
    tables, _ = free_rows(tables, np.array([True, True, True]))
    for row, line in enumerate([prompt(5, 1), prompt(6, 1)]):
        for blocks in (1, 2):  # colliding blocks of one call would not all be cached
            tokens, lens = lines({row: line})
            tables, _ = append(tables, lens * (blocks == 1), max_new_blocks=MAX_SEQS * MAX_BLOCKS)
            lens = np.minimum(lens, blocks * BLOCK_SIZE)
            tables, _ = commit(tables, tokens, lens, max_blocks=MAX_SEQS * MAX_BLOCKS)
            check_invariants(tables)
    assert hits(tables, [*prompt(5, 1), 9]) == tables.block_tables[0, :2].tolist()
    assert hits(tables, [*prompt(6, 1), 9]) == tables.block_tables[1, :2].tolist()
    assert len(hits(tables, [*prompt(1, 1), 9])) == 1


def test_colliding_blocks_of_one_call_break_the_row_but_never_match() -> None:
    tables = add(create(constant_hash), {0: prompt(1, 2), 1: prompt(3), 2: prompt(1, 3)})
    assert hits(tables, [*prompt(1, 2), 9]) == [1]
    assert hits(tables, [*prompt(3), 9]) == []
    assert tables.chains.slot.tolist()[:2] == [PrefixCache.BROKEN, PrefixCache.BROKEN]


def test_full_buckets_leave_content_uncached() -> None:
    tables = create(constant_hash)
    for i in range(NUM_BLOCKS - 1):
        tables = add(tables, {0: prompt(i)})
        tables, _ = free_rows(tables, jnp.array([True, False, False]))
    found = [hits(tables, [*prompt(i), 9]) for i in range(NUM_BLOCKS - 1)]
    assert [bool(hit) for hit in found] == [True] * PrefixCache.BUCKET + [False] * 3


@pytest.mark.parametrize("parent", [1, 8])
def test_children_of_an_evicted_parent_are_not_found(parent: int) -> None:
    """The parent's block is reused, for the very same content or another: its child must not match."""
    tables = add(create(policy=LRU_SPLIT), {0: prompt(1, 2)})
    tables, _ = slide_window(evict(tables, 1), jnp.array([BLOCK_SIZE, 0, 0]))
    tables = add(tables, {1: prompt(parent)})
    assert tables.block_tables[:2, 0].tolist() == [0, 1]
    assert hits(tables, [*prompt(1, 2), 9]) == ([1] if parent == 1 else [])
    assert hits(tables, [*prompt(8, 2), 9]) == ([1] if parent == 8 else [])
    # Computed again, the child is found again, though the orphan has the same hash.
    tables = add(tables, {2: prompt(parent, 2)})
    assert hits(tables, [*prompt(parent, 2), 9]) == [1, int(tables.block_tables[2, 1])]


def test_a_stale_parent_in_the_same_slot_is_told_by_its_generation() -> None:
    """The new parent takes the slot of the evicted one, since all have one hash."""
    tables = add(create(constant_hash), {0: prompt(1)})
    tokens, lens = lines({0: prompt(1, 2)})
    tables, _ = append(tables, jnp.array([BLOCK_SIZE, 0, 0]), max_new_blocks=MAX_SEQS * MAX_BLOCKS)
    tables, _ = commit(tables, tokens, lens, max_blocks=MAX_SEQS * MAX_BLOCKS)
    assert hits(tables, [*prompt(1, 2), 9]) == [1, 2]
    slot = int(tables.pool.prefix_cache.slot[1])
    tables = add(evict(tables, 1), {1: prompt(7)})
    block = int(tables.block_tables[1, 0])
    assert int(tables.pool.prefix_cache.slot[block]) == slot
    assert hits(tables, [*prompt(7, 2), 9]) == [block]


def test_the_oldest_of_equal_blocks_is_found() -> None:
    tables = add(create(), {row: prompt(1) for row in range(3)})
    assert tables.block_tables[:, 0].tolist() == [1, 2, 3]
    assert hits(tables, [*prompt(1), 9]) == [1]
    assert hits(evict(tables, 1), [*prompt(1), 9]) == [2]
    assert hits(evict(tables, 1, 2), [*prompt(1), 9]) == [3]
    assert hits(evict(tables, 2, 1), [*prompt(1), 9]) == [3]
    assert hits(evict(tables, 2, 3), [*prompt(1), 9]) == [1]
    assert hits(evict(tables, 3, 2, 1), [*prompt(1), 9]) == []
    assert hits(evict(evict(tables, 2), 1), [*prompt(1), 9]) == [3]


def test_rows_of_one_call_share_what_is_new() -> None:
    tables = add(create(), {0: prompt(1, 2), 1: prompt(1, 3), 2: prompt(1, 2, 4)})
    slot = tables.pool.prefix_cache.slot[tables.block_tables]
    assert len({*slot[:, 0].tolist()}) == 1
    assert slot[0, 1] == slot[2, 1] != slot[1, 1]
    a, b = tables.block_tables[0, :2].tolist()
    assert hits(tables, [*prompt(1, 2, 4), 9]) == [a, b, int(tables.block_tables[2, 2])]


def test_what_is_written_over_is_not_found() -> None:
    """A row cut in the middle of a cached block goes on writing there."""
    tables = add(create(), {0: prompt(1, 2)})
    tables, _ = truncate(tables, jnp.array([2, 0, 0]))
    assert len(hits(tables, [*prompt(1, 2), 9])) == 2
    tables, info = append(tables, jnp.array([1, 0, 0]), max_new_blocks=MAX_SEQS * MAX_BLOCKS)
    assert not info.copy_sources.any()
    assert len(hits(tables, [*prompt(1, 2), 9])) == 1


def test_evicting_for_an_allocation_spares_what_is_touched() -> None:
    tables = add(create(), {0: prompt(1, 2)})
    tables, _ = free_rows(tables, jnp.array([True, False, False]))
    line = np.zeros(MAX_BLOCKS * BLOCK_SIZE + 1, np.int32)
    line[:9] = [*prompt(1, 2), 9]
    hit = find(tables.pool.prefix_cache, line, np.int32(9), np.int32(0))
    tables, info = adopt(
        tables,
        jnp.array([1]),
        hit.block_ids[None],
        jax.tree.map(lambda x: x[None], hit.chain),
        jnp.array([True]),
    )
    assert int(info.status) == Status.OK
    rest = jnp.array([4, 2, 3]) * BLOCK_SIZE
    tables, info = append(tables, rest, max_new_blocks=MAX_SEQS * MAX_BLOCKS)
    assert int(info.status) == Status.OK
    assert int(tables.pool.num_free) == 0
    assert hits(tables, [*prompt(1, 2), 9]) == tables.block_tables[1, :2].tolist() == [1, 2]


def test_an_allocated_block_forgets_its_content() -> None:
    tables = add(create(), {0: prompt(1, 2)})
    tables, _ = free_rows(tables, jnp.array([True, False, False]))
    assert hits(tables, [*prompt(1, 2), 9]) == [1, 2], "a free block keeps it"
    tables, _ = append(tables, jnp.array([4, 4, 2]) * BLOCK_SIZE, max_new_blocks=MAX_SEQS * MAX_BLOCKS)
    check_invariants(tables)
    assert int(tables.block_tables[2, 1]) == 2, "the prompt's end is taken first"
    assert hits(tables, [*prompt(1, 2), 9]) == [1]


def test_reset_is_refused_while_blocks_are_used() -> None:
    tables = add(create(), {0: prompt(1)})
    pool, info = reset_prefix_cache(tables.pool)
    assert int(info.status) == Status.BLOCKS_IN_USE
    assert hits(dataclasses.replace(tables, pool=pool), [*prompt(1), 9]) == [1]
    tables, _ = free_rows(tables, np.ones(MAX_SEQS, bool))
    pool, info = reset_prefix_cache(tables.pool)
    assert int(info.status) == Status.OK
    tables = dataclasses.replace(tables, pool=pool)
    check_invariants(tables)
    assert hits(tables, [*prompt(1), 9]) == []


def test_a_pool_full_of_different_content_is_cached_whole() -> None:
    num_blocks = 2049
    cache = prefix_cache.create(num_blocks, 1)
    root = prefix_cache.root(cache, jnp.arange(num_blocks - 1))
    rows = jnp.arange(num_blocks - 1)
    cache, chain = jax.jit(prefix_cache.insert)(
        cache, root, jnp.ones_like(rows), rows, rows + 1, jnp.zeros((num_blocks - 1, 1), jnp.int32)
    )
    assert not jnp.any(chain.slot == PrefixCache.BROKEN)
    check_invariants(block_pool.create(num_blocks, LRU, prefix_cache=cache))


def test_state_is_at_most_64_bytes_a_block() -> None:
    num_blocks = 1 << 16
    cache = prefix_cache.create(num_blocks, 16)
    pool = block_pool.create(num_blocks, LRU, prefix_cache=cache)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(pool)) - cache.token_ids.nbytes
    assert num_bytes / num_blocks <= 64


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("slot", lambda slot: slot.at[3].set(0), "have content that cannot be found"),
        ("slot", lambda slot: slot.at[1].set(-1), "is in slot"),
        ("last", lambda last: jnp.zeros_like(last), "have content that cannot be found"),
        ("token_ids", lambda ids: ids.at[2].add(1), "are one node, but their token_ids"),
        ("parent", lambda parent: parent.at[1, 0].add(1), "are one node, but their parent"),
        ("hash", lambda hash: hash.at[:3].add(4), "in neither bucket"),
        ("neighbours", lambda n: n.at[1, 0].set(1), "the ring of slot"),
    ],
)
def test_invariants_notice_what_is_wrong(name: str, change: object, message: str) -> None:
    tables = add(create(), {0: prompt(1), 1: prompt(1)})
    cache = tables.pool.prefix_cache
    broken = dataclasses.replace(cache, **{name: change(getattr(cache, name))})
    pool = dataclasses.replace(tables.pool, prefix_cache=broken)
    with pytest.raises(InvariantError, match=message):
        check_invariants(dataclasses.replace(tables, pool=pool))
