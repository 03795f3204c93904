"""Examples to follow by hand, refusals, invariants and traces. The rest: see the lock-step tests."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import cli
from jaxpaged.memory import block_pool, block_table, prefix_cache, swap
from jaxpaged.memory.block_pool import HELD_ONCE
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.free_queue import FreeQueue
from jaxpaged.memory.invariants import InvariantError, check_invariants, free_block_ids
from jaxpaged.memory.policies import LIFO, LRU, LRU_SPLIT, NAIVE, POLICIES, Policy, Sweep, named, to_tail
from jaxpaged.research.verify import quick
from jaxpaged.research.verify.history import Disagreement
from jaxpaged.research.verify.lockstep import Lockstep
from jaxpaged.research.verify.subjects import AllocStatus, can_allocate, commit
from jaxpaged.status import PagedMemoryError, Status, raise_if_error

BLOCK_SIZE = 4
MAX_SEQS = 3
MAX_BLOCKS = 4


def create(policy: Policy = NAIVE, num_blocks: int = 9) -> BlockTables:
    return block_table.create(block_pool.create(num_blocks, policy), MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE)


# A program a verb and shape: without, each of their operations would be one.
fork, free_rows, truncate, slide_window, slot_mapping, reset = (
    quick.jit(getattr(block_table, verb))
    for verb in ("fork", "free_rows", "truncate", "slide_window", "slot_mapping", "reset")
)
swap_out, swap_in = quick.jit(swap.swap_out, static_argnames="max_blocks"), quick.jit(swap.swap_in)
free = quick.jit(block_pool.free)
committed = quick.jit(functools.partial(commit, max_blocks=4))


@functools.partial(quick.jit, static_argnames="max_new_blocks")
def append(tables: BlockTables, num: Any, max_new_blocks: int = 12) -> Any:
    return block_table.append(tables, num, max_new_blocks=max_new_blocks)


def taken(tables: BlockTables, *num_new_tokens: int) -> BlockTables:
    tables, info = append(tables, jnp.array(num_new_tokens))
    assert int(info.status) == Status.OK
    check_invariants(tables)
    return tables


def assert_equal_states(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


# The policies, on a walk that a reader can follow: two rows of two blocks, the first freed.


WALKS = {
    "lifo": ([[8, 7], [6, 5]], [7, 8, 4, 3, 2, 1]),
    "naive": ([[1, 2], [3, 4]], [2, 1, 5, 6, 7, 8]),
    "lru": ([[1, 2], [3, 4]], [5, 6, 7, 8, 2, 1]),
    "lru_split": ([[1, 2], [3, 4]], [2, 1, 5, 6, 7, 8]),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy: str) -> None:
    rows, free = WALKS[policy]
    tables = taken(create(named(policy)), 8, 5, 0)
    assert tables.block_tables[:2, :2].tolist() == rows
    tables, info = free_rows(tables, jnp.array([True, False, False]))
    assert int(info.num_freed) == 2
    assert free_block_ids(tables.pool) == free
    check_invariants(tables)


@pytest.mark.slow
def test_split_keeps_groups_and_content_apart() -> None:
    """Freed: row 0 (blocks 1, 2, of which 1 is cached), then row 1 (3, 4; cached 3)."""
    cache = prefix_cache.create(9, BLOCK_SIZE)
    pool = block_pool.create(9, LRU_SPLIT, prefix_cache=cache)
    tables = taken(block_table.create(pool, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE), 7, 6, 0)
    tokens = jnp.arange(48).reshape(3, 16)
    tables, _ = committed(tables, tokens, jnp.array([7, 6, 0]))
    tables, _ = free_rows(tables, jnp.array([True, True, False]))
    assert free_block_ids(tables.pool) == [4, 2, 5, 6, 7, 8, 1, 3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountingQueue(FreeQueue):
    times_freed: jax.Array


def test_a_policy_of_ones_own_may_remember_more_of_each_block() -> None:
    def new_queue(num_blocks: int) -> FreeQueue:
        queue = LRU.new_queue(num_blocks)
        return CountingQueue(queue.ring, queue.place, queue.counters, jnp.zeros(num_blocks, jnp.int32))

    def push(queue: FreeQueue, block_ids: jax.Array, mask: jax.Array) -> FreeQueue:
        times_freed = queue.times_freed.at[block_ids].add(mask)
        return dataclasses.replace(to_tail(queue, block_ids, mask), times_freed=times_freed)

    def life(tables: BlockTables) -> BlockTables:
        for num_tokens in ([8, 5, 0], [16, 0, 8]):
            tables, _ = block_table.append(tables, jnp.array(num_tokens), max_new_blocks=12)
            tables, _ = block_table.free_rows(tables, jnp.array([True, False, True]))
        return tables

    tables = jax.jit(life)(create(Policy("counting", new_queue, (Sweep(push),))))
    assert tables.pool.free_queue.times_freed.tolist() == [0, 2, 2, 0, 0, 1, 1, 1, 1]
    assert free_block_ids(tables.pool) == [5, 6, 7, 8, 1, 2]
    check_invariants(tables)


@pytest.mark.parametrize(
    ("policy", "table", "pair"),
    [(LIFO, [8, 6, 5], (7, 6)), (NAIVE, [1, 4, 3], (2, 4)), (LRU, [1, 3, 4], (2, 3))],
    ids=lambda value: getattr(value, "name", ""),
)
def test_copy_on_write_comes_first_but_for_naive(
    policy: Policy, table: list[int], pair: tuple[int, int]
) -> None:
    tables = taken(create(policy), 6, 0, 0)
    tables, info = fork(tables, jnp.array([0]), jnp.array([2]), jnp.array([True]))
    assert int(info.status) == Status.OK
    tables, info = append(tables, jnp.array([3, 0, 0]))
    assert tables.block_tables[0, :3].tolist() == table
    assert (int(info.copy_sources[0]), int(info.copy_destinations[0])) == pair
    assert info.num_new_blocks.tolist() == [2, 0, 0]
    check_invariants(tables)


def test_the_last_holder_writes_in_place() -> None:
    tables = taken(create(), 6, 0, 0)
    both = jnp.array([0, 0]), jnp.array([1, 2]), jnp.array([True, True])
    tables, _ = fork(tables, *both)
    tables, info = append(tables, jnp.array([1, 1, 1]))
    assert info.copy_sources.tolist() == [2, 2, 0]
    assert info.copy_destinations.tolist() == [3, 4, 0]
    assert tables.block_tables[:, 1].tolist() == [3, 4, 2]
    tables, info = append(tables, jnp.array([1, 1, 1]))
    assert not info.copy_sources.any()
    # Forked again, and only one of them writes: it copies, though nobody else does.
    tables, _ = free_rows(tables, jnp.array([False, True, True]))
    tables, _ = truncate(tables, jnp.array([1, 0, 0]))
    tables, _ = fork(tables, *both)
    tables, info = append(tables, jnp.array([0, 1, 0]))
    assert info.copy_sources.tolist() == [0, 3, 0]
    check_invariants(tables)


def test_slots() -> None:
    tables = taken(create(), 6, 3, 0)
    rows, positions = jnp.array([0, 0, 1, 2]), jnp.array([3, 5, 2, 0])
    slots = slot_mapping(tables, rows, positions, jnp.array([True, True, True, False]))
    assert slots.tolist() == [1 * 4 + 3, 2 * 4 + 1, 3 * 4 + 2, 0]


def test_a_row_passes_its_window_and_is_freed() -> None:
    tables = taken(create(), 14, 0, 0)
    tables, _ = slide_window(tables, jnp.array([9, 0, 0]))
    assert tables.block_tables[0].tolist() == [0, 0, 3, 4]
    assert free_block_ids(tables.pool) == [2, 1, 5, 6, 7, 8]
    again, info = slide_window(tables, jnp.array([4, 0, 0]))
    assert int(info.status) == Status.OK, "a window never moves back, and asking is no error"
    assert_equal_states(again, tables)
    tables, info = free_rows(tables, jnp.array([True, False, False]))
    assert int(info.num_freed) == 2
    check_invariants(tables)


def test_swap_in_undoes_swap_out() -> None:
    tables, host = taken(create(LIFO), 6, 3, 0), create(LIFO)
    tables, _ = fork(tables, jnp.array([0]), jnp.array([2]), jnp.array([True]))
    rows = jnp.array([True, False, True])
    device, host, out = swap_out(tables, host, rows)
    assert [(int(a), int(b)) for a, b in zip(out.sources, out.destinations, strict=True) if a] == [
        (8, 8),
        (7, 7),
    ]
    assert host.block_tables[:, :2].tolist() == [[8, 7], [0, 0], [8, 7]]
    assert device.seq_lens.tolist() == [0, 3, 0]
    assert host.seq_lens.tolist() == [6, 0, 6]
    back, empty, into = swap_in(device, host, rows)
    assert int(into.status) == Status.OK
    assert back.seq_lens.tolist() == [6, 3, 6]
    assert empty.seq_lens.tolist() == [0, 0, 0]
    pairs = [(int(a), int(b)) for a, b in zip(into.sources, into.destinations, strict=True) if a]
    assert pairs == [(8, 7), (7, 8)], "the last freed is the first taken"
    for state in (device, host, back, empty):
        check_invariants(state)


def test_reset_frees_every_row() -> None:
    tables, info = reset(taken(create(), 6, 3, 16))
    assert int(info.num_freed) == 7
    assert not tables.block_tables.any()
    assert int(tables.pool.num_free) == 8
    check_invariants(tables)


def test_admission() -> None:
    pool = taken(create(), 8, 4, 0).pool
    assert int(pool.num_free) == 5
    assert [can_allocate(pool, n, 1) for n in (4, 5, 7, 8)] == [
        AllocStatus.OK, AllocStatus.LATER, AllocStatus.LATER, AllocStatus.NEVER,
    ]  # fmt: skip


# Refusals: the state comes back unchanged, bit for bit, and the status says why.


def forked(tables: BlockTables, source: int, destination: int) -> Any:
    return fork(tables, jnp.array([source]), jnp.array([destination]), jnp.array([True]))


def freed(tables: BlockTables, *block_ids: int) -> Any:
    ids = np.pad(np.array(block_ids, np.int32), (0, 3 - len(block_ids)))
    pool, info = free(tables.pool, ids, np.arange(3) < len(block_ids))
    return dataclasses.replace(tables, pool=pool), info


def swapped(tables: BlockTables, host: BlockTables, **limits: int) -> Any:
    device, after, info = swap_out(tables, host, jnp.array([True, False, False]), **limits)
    assert_equal_states(after, host)
    return device, info


def as_it_is(tables: BlockTables) -> BlockTables:
    return tables


Refusal = tuple[Status, Callable[[BlockTables], BlockTables], Callable[[BlockTables], Any]]
# What is expected, what is done before, and what is refused.
REFUSALS: dict[str, Refusal] = {
    "append: out of blocks": (Status.OUT_OF_BLOCKS, as_it_is, lambda t: append(t, jnp.array([8, 4, 16]))),
    "append: no block for the copy": (
        Status.OUT_OF_BLOCKS,
        lambda t: taken(forked(t, 0, 2)[0], 0, 13, 0),
        lambda t: append(t, jnp.array([7, 0, 0])),
    ),
    "append: row full": (Status.TABLE_FULL, as_it_is, lambda t: append(t, jnp.array([11, 0, 0]))),
    "append: too many": (
        Status.TOO_MANY_BLOCKS,
        as_it_is,
        lambda t: append(t, jnp.array([8, 4, 0]), max_new_blocks=2),
    ),
    "append: row full, too many": (
        Status.TABLE_FULL,
        as_it_is,
        lambda t: append(t, jnp.array([11, 4, 0]), max_new_blocks=2),
    ),
    "fork: empty source": (Status.UNKNOWN_ROW, as_it_is, lambda t: forked(t, 2, 2)),
    "fork: no such source": (Status.UNKNOWN_ROW, as_it_is, lambda t: forked(t, -1, 2)),
    "fork: no such destination": (Status.UNKNOWN_ROW, as_it_is, lambda t: forked(t, 0, 3)),
    "fork: destination in use": (Status.ROW_IN_USE, as_it_is, lambda t: forked(t, 0, 1)),
    "fork: one destination twice": (
        Status.ROW_IN_USE,
        as_it_is,
        lambda t: fork(t, jnp.array([0, 1]), jnp.array([2, 2]), jnp.array([True, True])),
    ),
    "free: twice": (Status.DOUBLE_FREE, as_it_is, lambda t: freed(t, 1, 2, 1)),
    "free: not held": (Status.DOUBLE_FREE, as_it_is, lambda t: freed(t, 1, 5)),
    "free: no such block": (Status.UNKNOWN_BLOCK, as_it_is, lambda t: freed(t, 1, 9)),
    "free: negative": (Status.UNKNOWN_BLOCK, as_it_is, lambda t: freed(t, -1)),
    "truncate: too few": (
        Status.TOO_FEW_TOKENS,
        as_it_is,
        lambda t: truncate(t, jnp.array([1, 4, 0])),
    ),
    "truncate: behind the window": (
        Status.TOO_FEW_TOKENS,
        lambda t: slide_window(t, jnp.array([5, 0, 0]))[0],
        lambda t: truncate(t, jnp.array([3, 0, 0])),
    ),
    "window: too few": (
        Status.TOO_FEW_TOKENS,
        as_it_is,
        lambda t: slide_window(t, jnp.array([7, 0, 0])),
    ),
    "swap: no room": (Status.OUT_OF_BLOCKS, as_it_is, lambda t: swapped(t, create(num_blocks=2))),
    "swap: row in use": (Status.ROW_IN_USE, as_it_is, lambda t: swapped(t, taken(create(), 1, 0, 0))),
    "swap: too many": (Status.TOO_MANY_BLOCKS, as_it_is, lambda t: swapped(t, create(), max_blocks=1)),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_changes_nothing(case: str) -> None:
    status, prepare, refused = REFUSALS[case]
    before = prepare(taken(create(), 6, 3, 0))  # row 0: blocks 1, 2; row 1: block 3
    after, info = refused(before)
    assert Status(int(info.status)) == status
    assert_equal_states(after, before)
    with pytest.raises(PagedMemoryError):
        raise_if_error(int(info.status))


def test_every_status_has_a_sentence() -> None:
    raise_if_error(Status.OK)
    for bit in Status:
        with pytest.raises(PagedMemoryError, match=r"\w+ \w+") as caught:
            raise_if_error(int(bit))
        assert caught.value.status == bit
    with pytest.raises(PagedMemoryError, match=r"out of blocks.*; double free"):
        raise_if_error(Status.OUT_OF_BLOCKS | Status.DOUBLE_FREE)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: block_pool.create(1, LRU), "num_blocks=1 must be at least 2"),
        (
            lambda: block_pool.create(4, LRU, prefix_cache=prefix_cache.create(5, 4)),
            "must equal num_blocks=4",
        ),
        (lambda: named("mru"), "policy='mru' must be one of lifo, naive, lru, lru_split"),
        (lambda: prefix_cache.create(5, 0), "block_size=0 must be at least 1"),
        (lambda: block_table.create(block_pool.create(4, LRU), 0, 1, 1), "max_seqs=0 must be at least 1"),
        (
            lambda: block_table.create(
                block_pool.create(4, LRU, prefix_cache=prefix_cache.create(4, 2)), 1, 1, 4
            ),
            "cache.block_size=2 must equal block_size=4",
        ),
        (
            lambda: commit(create(), jnp.zeros((3, 16), jnp.int32), jnp.zeros(3, jnp.int32), max_blocks=1),
            "must have a prefix cache",
        ),
        (
            lambda: swap_out(
                create(), block_table.create(block_pool.create(4, LRU), 3, 5, 4), jnp.zeros(3, bool)
            ),
            "must equal",
        ),
    ],
)
def test_wrong_sizes_are_refused_at_once(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# Invariants and traces.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: dataclasses.replace(t, seq_lens=t.seq_lens.at[0].add(4)), "row 0 has 3 blocks"),
        (
            lambda t: dataclasses.replace(t, num_skipped=t.num_skipped.at[0].add(1)),
            "1 of them out of its window",
        ),
        (lambda t: dataclasses.replace(t, block_tables=t.block_tables.at[1, 0].set(1)), "2 rows name it"),
        (lambda t: with_queue(t, counters=t.pool.free_queue.counters.at[2].add(1)), "num_free is"),
        (lambda t: with_place(t, 5, 0), "block 5 should be at place 0"),
        (lambda t: with_queue(t, ring=t.pool.free_queue.ring.at[5].set(5)), "in the queue twice"),
        (
            lambda t: with_queue(t, ring=t.pool.free_queue.ring.at[5].set(1)),
            "block 1 has 1 holders, and is free: True",
        ),
        (lambda t: with_place(t, 1, HELD_ONCE - 1), "block 1 has 2 holders, but 1 rows"),
        (lambda t: with_place(t, 1, FreeQueue.NOT_QUEUED), "block 1 has 0 holders, and is free: False"),
        (lambda t: with_place(t, 1, 0), "block 1 is not free, but its place is 0"),
        (lambda t: with_place(t, 0, HELD_ONCE), "the null block has 1 holders"),
    ],
)
def test_invariants_notice_what_is_wrong(change: Callable[[BlockTables], BlockTables], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        check_invariants(change(taken(create(), 6, 3, 0)))


def with_queue(tables: BlockTables, **parts: Any) -> BlockTables:
    queue = dataclasses.replace(tables.pool.free_queue, **parts)
    return dataclasses.replace(tables, pool=dataclasses.replace(tables.pool, free_queue=queue))


def with_place(tables: BlockTables, block_id: int, place: int) -> BlockTables:
    return with_queue(tables, place=tables.pool.free_queue.place.at[block_id].set(place))


@pytest.mark.slow
def test_a_failing_history_is_saved_and_replayed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXPAGED_TRACES", str(tmp_path))
    lockstep = Lockstep("naive", 4)
    lockstep.run("append", [6, 3, 0, 0], 1)
    lockstep.oracle.tokens[1].append(1)  # make them disagree
    with pytest.raises(Disagreement, match="row 1 has 3 tokens and must have 4") as caught:
        lockstep.run("free", [0])
    [path] = tmp_path.iterdir()
    replay = ["verify", "allocator", "--replay", str(path)]
    assert str(path) in caught.value.__notes__[0]
    assert cli.main(replay) == 0, "on sound code the history passes"
    said = capsys.readouterr().out
    assert "0: append([6, 3, 0, 0], 1) done\n   [[1, 2, 0, 0, 0], [3, 0, 0, 0, 0]," in said
    assert said.endswith("the two sides agree\n")
    trace = json.loads(path.read_text())
    assert trace["history"] == [["append", [[6, 3, 0, 0], 1]], ["free", [[0]]]]
    # A history in which the two really disagree: the functional side is told to use another policy.
    trace["history"].append(["append", [[0, 1, 0, 0], 1]])
    trace["made_with"]["use_jit"] = False
    path.write_text(json.dumps(trace))
    monkeypatch.setattr(block_pool.free_queue, "push_front", block_pool.free_queue.push_back)
    assert cli.main(replay) == 1
    assert "disagreement: entry 0 of the free queue is" in capsys.readouterr().out
