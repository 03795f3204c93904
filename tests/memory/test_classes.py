"""Size classes: random histories of tables whose groups take blocks of different sizes, beside an oracle.

The oracle keeps a plain pool for each class: a list of free numbers, and the holders of the others.
"""

import copy
import dataclasses
import functools
import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.memory import block_pool, block_table, group_content, kv_cache, prefix_cache, swap, transfer
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.cache_specs import FULL, SlidingWindow
from jaxpaged.memory.eviction import EVICTION_POLICIES
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.invariants import InvariantError, check_invariants, free_block_ids
from jaxpaged.memory.policies import LRU, POLICIES
from jaxpaged.research.verify import quick
from jaxpaged.status import Status
from tests.marks import slow_and_nightly

BLOCK_SIZE, ROWS, MAX_BLOCKS = 2, 3, 4
MAX_TOKENS = BLOCK_SIZE * MAX_BLOCKS
SPECS = (FULL, SlidingWindow(3), FULL)
CLASSES = (0, 1, 0)
SIZES = (14, 6)  # blocks of each class, the null block included
HOST_SIZES = (14, 6)
GROUPS = len(SPECS)

append = quick.jit(functools.partial(block_table.append, max_new_blocks=ROWS * MAX_BLOCKS * GROUPS))
fork, truncate, free_rows = map(quick.jit, (block_table.fork, block_table.truncate, block_table.free_rows))
slide = quick.jit(functools.partial(block_table.slide_windows, specs=SPECS))
swap_out, swap_in = quick.jit(swap.swap_out), quick.jit(swap.swap_in)


@quick.jit
def publish(tables: BlockTables, tokens: Any, num_tokens: Any) -> Any:
    most = ROWS * MAX_BLOCKS
    return block_table.cache_full_blocks(tables, lambda *at: tokens[at], num_tokens, max_blocks=most)


@quick.jit
def adopt(tables: BlockTables, row: Any, tokens: Any, num_tokens: Any) -> Any:
    cache = tables.pool.prefix_cache
    hit = prefix_cache.lookup(
        cache, lambda at: tokens.at[at].get(mode="clip"), num_tokens, jnp.int32(0), max_tokens=MAX_TOKENS
    )
    hit = group_content.lookup(cache, hit, SPECS)
    chain = jax.tree.map(lambda x: x[None], hit.chain)
    tables, info = block_table.adopt(tables, row[None], hit.block_ids, chain, jnp.array([True]))
    tables, slid = block_table.slide_windows(tables, jnp.arange(ROWS) == row, SPECS)
    return tables, info.status | slid.status, hit.block_ids, hit.chain.num_blocks


# Each sweep of a policy: whether freed blocks go to the tail, whether a line's last block is first, and
# whether it takes blocks with content, those without, or all.
SWEEPS = {
    "lifo": [(False, False, None)],
    "naive": [(False, False, None)],
    "lru": [(True, True, None)],
    "lru_split": [(True, True, True), (False, False, False)],
}


class PlainPool:
    """A pool of blocks of one size: free numbers in the order in which they are taken, holders, contents."""

    def __init__(self, policy: str, size: int) -> None:
        numbers = range(1, size)
        self.sweeps = SWEEPS[policy]
        self.free = list(reversed(numbers) if policy == "lifo" else numbers)
        self.holders: Counter[int] = Counter()
        self.contents: dict[int, Any] = {}  # by number: what can be found

    def take(self) -> int:
        """Take the first free block. Raises `IndexError` where none is."""
        number = self.free.pop(0)
        self.contents.pop(number, None)
        self.holders[number] = 1
        return number

    def hold(self, number: int) -> None:
        if number in self.free:
            self.free.remove(number)
        self.holders[number] += 1

    def give_back(self, lines: list[list[int]]) -> None:
        for to_tail, last_first, content in self.sweeps:
            takes = [n for line in lines for n in (line[::-1] if last_first else line)]
            for number in takes if content is None else [n for n in takes if (n in self.contents) == content]:
                self.holders[number] -= 1
                if not self.holders[number]:
                    self.free.insert(len(self.free) if to_tail else 0, number)


class Oracle:
    """Tables over a plain pool for each size class."""

    def __init__(self, policy: str, sizes: tuple[int, ...]) -> None:
        self.policy, self.pools = policy, [PlainPool(policy, size) for size in sizes]
        self.lines: list[list[list[int]]] = [[[] for _ in SPECS] for _ in range(ROWS)]  # 0: out of reach
        self.lens, self.named = [0] * ROWS, [0] * ROWS
        self.is_broken = [
            False
        ] * ROWS  # whether the row's last full block has no content, so no later one gets any
        self.num_shared = 0  # blocks that came from other tables and stayed shared

    def pool_of(self, group: int) -> PlainPool:
        return self.pools[CLASSES[group]]

    def append(self, counts: list[int]) -> None:
        """Take blocks for so many tokens of each row. Raises `IndexError` where a class has too few."""
        for row, count in enumerate(counts):
            is_partly = count > 0 and self.lens[row] % BLOCK_SIZE != 0
            self.lens[row] += count
            end = -(-self.lens[row] // BLOCK_SIZE)
            for group, line in enumerate(self.lines[row]):
                pool, copies = self.pool_of(group), False
                if is_partly and pool.holders[line[-1]] > 1:
                    pool.holders[line[-1]] -= 1
                    copies = True
                elif is_partly:
                    pool.contents.pop(line[-1], None)
                taken = [pool.take() for _ in range(end - len(line) + copies)]
                if copies:
                    line[-1] = taken.pop(-1 if self.policy == "naive" else 0)
                line += taken

    def begin(
        self, row: int, lines: list[list[int]], num_tokens: int, num_named: int, is_broken: bool = False
    ) -> None:
        """Let an empty row hold these blocks."""
        self.is_broken[row] = is_broken
        self.lines[row], self.lens[row], self.named[row] = copy.deepcopy(lines), num_tokens, num_named
        for group, line in enumerate(lines):
            for number in filter(None, line):
                self.pool_of(group).hold(number)

    def truncate(self, lens: list[int]) -> None:
        """Give back what lies behind so many tokens of each row."""
        gone: list[list[list[int]]] = [[] for _ in self.pools]
        for row, num_tokens in enumerate(lens):
            first = -(-num_tokens // BLOCK_SIZE)
            for group, line in enumerate(self.lines[row]):
                gone[CLASSES[group]].append([number for number in line[first:] if number])
                del line[first:]
            self.lens[row], num_full = num_tokens, num_tokens // BLOCK_SIZE
            if num_full < self.named[row] or num_full == 0:
                last = self.lines[row][0][:num_full][-1:]
                self.is_broken[row] = bool(last) and last[0] not in self.pool_of(0).contents
                self.named[row] = min(self.named[row], num_full)
        self._give_back(gone)

    def slide(self, rows: range) -> None:
        gone: list[list[list[int]]] = [[] for _ in self.pools]
        for row in rows:
            for group, spec in enumerate(SPECS):
                line, end = self.lines[row][group], int(spec.first_read(self.lens[row])) // BLOCK_SIZE
                gone[CLASSES[group]].append([number for number in line[:end] if number])
                line[:end] = [0] * len(line[:end])
        self._give_back(gone)

    def _give_back(self, gone: list[list[list[int]]]) -> None:
        for pool, lines in zip(self.pools, gone, strict=True):
            pool.give_back(lines)

    def publish(self, tokens: np.ndarray) -> None:
        for row in range(ROWS):
            for place in range(self.named[row], self.lens[row] // BLOCK_SIZE):
                for group, line in enumerate(self.lines[row]):
                    if line[place] and not self.is_broken[row]:
                        content = group, *tokens[row, : (place + 1) * BLOCK_SIZE].tolist()
                        self.pool_of(group).contents.setdefault(line[place], content)
            self.named[row] = self.lens[row] // BLOCK_SIZE

    def move(self, other: "Oracle", rows: list[int]) -> None:
        """Move rows to the other tables. Raises `IndexError` where a class of those has too few blocks."""
        twins: dict[tuple[int, int], int] = {}
        for row in rows:
            for group, line in enumerate(self.lines[row]):
                pool, size_class = other.pool_of(group), CLASSES[group]
                for place, number in enumerate(line):
                    twin = twins.get((size_class, number)) if self.policy != "naive" else None
                    if number and twin is not None:
                        pool.hold(twin)
                        other.num_shared += 1
                    elif number:
                        twin = twins[size_class, number] = pool.take()
                    other.lines[row][group].insert(place, twin or 0)
            other.lens[row], other.named[row] = self.lens[row], self.named[row]
            other.is_broken[row] = self.is_broken[row]
        self.truncate([0 if row in rows else num for row, num in enumerate(self.lens)])


class History:
    """Random operations on tables and their oracle, compared after each."""

    def __init__(self, policy: str, seed: int) -> None:
        self.random, caches = random.Random(seed), EVICTION_POLICIES.keys() & {policy}
        self.device, self.host = (tables(policy, sizes, caches=bool(caches)) for sizes in (SIZES, HOST_SIZES))
        self.oracle, self.host_oracle = (Oracle(policy, sizes) for sizes in (SIZES, HOST_SIZES))
        self.caches, self.tokens = bool(caches), np.zeros((ROWS, MAX_TOKENS), np.int32)
        self.seen: Counter[str] = Counter()

    def run(self, num_operations: int) -> None:
        names = ["append"] * 4 + ["fork"] * 2 + ["truncate", "slide", "free", "swap", "swap"]
        names += ["publish", "publish", "adopt", "adopt"] if self.caches else []
        for number in range(num_operations):
            name = self.random.choice(names)
            getattr(self, name)()
            self.seen[name] += 1
            self.compare(self.device, self.oracle)
            self.compare(self.host, self.host_oracle)
            if number % 10 == 0:
                check_invariants(self.device)
                check_invariants(self.host)

    def compare(self, got: BlockTables, want: Oracle) -> None:
        offsets = got.pool.offsets
        lines = np.asarray(got.block_tables).reshape(ROWS, GROUPS, MAX_BLOCKS)
        for row, group in np.ndindex(ROWS, GROUPS):
            its = [number and number + offsets[CLASSES[group]] for number in want.lines[row][group]]
            assert lines[row, group].tolist() == its + [0] * (MAX_BLOCKS - len(its)), (row, group)
        assert got.seq_lens.tolist() == want.lens
        numbers = [
            number + offset for pool, offset in zip(want.pools, offsets, strict=True) for number in pool.free
        ]
        assert free_block_ids(got.pool) == numbers
        assert got.pool.num_free.tolist() == [len(pool.free) for pool in want.pools]
        if got.pool.prefix_cache is not None:
            has = block_pool.has_content(got.pool, jnp.arange(got.pool.num_blocks))
            pairs = zip(want.pools, offsets, strict=True)
            assert np.flatnonzero(has).tolist() == sorted(
                n + offset for pool, offset in pairs for n in pool.contents
            )

    def rows(self, *, empty: bool) -> list[int]:
        """Return the rows that hold tokens nowhere, or on the device."""
        host = self.host_oracle.lens
        return [row for row, num in enumerate(self.oracle.lens) if (num == 0) == empty and not host[row]]

    def append(self) -> None:
        lens, most = self.oracle.lens, min(MAX_TOKENS, 5)
        begins = [row for row in self.rows(empty=True) if self.random.random() < 0.5]
        may = {*self.rows(empty=False), *begins}
        counts = [
            self.random.randrange(min(most, MAX_TOKENS - num) + 1) if row in may else 0
            for row, num in enumerate(lens)
        ]
        after = copy.deepcopy(self.oracle)
        try:
            after.append(counts)
        except IndexError:
            self.seen["refused"] += 1
            self.device, info = append(self.device, jnp.array(counts))
            assert int(info.status) == Status.OUT_OF_BLOCKS
            return
        for row, count in enumerate(counts):
            its = [self.random.choice((1, 2)) for _ in range(count)]
            self.tokens[row, lens[row] : lens[row] + count] = its
        self.device, info = append(self.device, jnp.array(counts))
        assert int(info.status) == Status.OK
        self.seen["copied"] += int(np.count_nonzero(info.copy_sources))
        self.oracle = after

    def fork(self) -> None:
        if (sources := self.rows(empty=False)) and (targets := self.rows(empty=True)):
            partly = [row for row in sources if self.oracle.lens[row] % BLOCK_SIZE]
            source, target = self.random.choice(partly or sources), self.random.choice(targets)
            its = (of[source] for of in (self.oracle.lens, self.oracle.named, self.oracle.is_broken))
            self.oracle.begin(target, self.oracle.lines[source], *its)
            self.tokens[target] = self.tokens[source]
            arrays = (jnp.array([row], jnp.int32) for row in (source, target))
            self.device, info = fork(self.device, *arrays, jnp.array([True]))
            assert int(info.status) == Status.OK

    def truncate(self) -> None:
        lens = list(self.oracle.lens)
        for row in self.rows(empty=False):
            begins = max(line.count(0) for line in self.oracle.lines[row]) * BLOCK_SIZE
            lens[row] = self.random.choice([0, *range(begins, lens[row] + 1)])
        counts = np.subtract(self.oracle.lens, lens)
        self.oracle.truncate(lens)
        self.device, info = truncate(self.device, jnp.array(counts, jnp.int32))
        assert int(info.status) == Status.OK

    def slide(self) -> None:
        self.oracle.slide(range(ROWS))
        self.device, info = slide(self.device, jnp.ones(ROWS, bool))
        assert int(info.status) == Status.OK

    def free(self) -> None:
        rows = [row for row in self.rows(empty=False) if self.random.random() < 0.6]
        self.oracle.truncate([0 if row in rows else num for row, num in enumerate(self.oracle.lens)])
        self.device, info = free_rows(self.device, mask(rows))
        assert int(info.status) == Status.OK

    def swap(self) -> None:
        """Move rows to the host, or back."""
        out = not any(self.host_oracle.lens)
        of = self.rows(empty=False) if out else [row for row, num in enumerate(self.host_oracle.lens) if num]
        rows = [row for row in of if self.random.random() < 0.8]
        pair = copy.deepcopy((self.oracle, self.host_oracle))
        status = Status.OK
        try:
            pair[not out].move(pair[out], rows)
        except IndexError:
            status, pair = Status.OUT_OF_BLOCKS, (self.oracle, self.host_oracle)
        self.device, self.host, info = (swap_out if out else swap_in)(self.device, self.host, mask(rows))
        assert int(info.status) == status
        self.oracle, self.host_oracle = pair
        self.seen["shared"] = self.oracle.num_shared + self.host_oracle.num_shared

    def publish(self) -> None:
        self.oracle.publish(self.tokens)
        self.device, info = publish(self.device, self.tokens, self.device.seq_lens)
        assert int(info.status) == Status.OK

    def adopt(self) -> None:
        if not (rows := self.rows(empty=True)):
            return
        row, like = self.random.choice(rows), self.random.randrange(ROWS)
        self.tokens[row] = self.tokens[like]
        self.device, status, block_ids, num = adopt(
            self.device, jnp.int32(row), jnp.array(self.tokens[row]), jnp.int32(MAX_TOKENS)
        )
        assert int(status) == Status.OK
        num, lines = int(num), []
        for group, ids in enumerate(np.asarray(block_ids).tolist()):
            offset = self.device.pool.offsets[CLASSES[group]]
            lines.append([block_id and block_id - offset for block_id in ids[:num]])
            for place, number in enumerate(lines[-1]):
                content = group, *self.tokens[row, : (place + 1) * BLOCK_SIZE].tolist()
                assert not number or self.oracle.pool_of(group).contents[number] == content
        self.seen["hits"] += num
        self.oracle.begin(row, lines, num * BLOCK_SIZE, num)
        self.oracle.slide(range(row, row + 1))


def mask(rows: list[int]) -> jax.Array:
    return jnp.array([row in rows for row in range(ROWS)])


def tables(policy: str, sizes: tuple[int, ...], *, caches: bool = False) -> BlockTables:
    total = block_pool.total_blocks(sizes[0], sizes[1:])
    cache = prefix_cache.create(total, BLOCK_SIZE) if caches else None
    pool = block_pool.create(sizes[0], POLICIES[policy], prefix_cache=cache, more_blocks=sizes[1:])
    return block_table.create(pool, ROWS, MAX_BLOCKS, BLOCK_SIZE, GROUPS, classes=CLASSES)


allocate = quick.jit(block_pool.allocate, static_argnames="max_count")


def test_blocks_come_from_their_classes_all_or_none() -> None:
    pool = block_pool.create(4, LRU, more_blocks=(3,))
    assert (pool.num_blocks, pool.offsets) == (6, (0, 3))
    pool, info = allocate(pool, np.int32(3), 4, np.array([1, 0, 0, 1], np.int32))
    assert (info.block_ids.tolist(), int(info.status)) == ([4, 1, 2, 0], Status.OK)
    check_invariants(pool)
    assert pool.num_free.tolist() == [1, 1]
    same, info = allocate(pool, np.int32(3), 4, np.array([1, 0, 1, 0], np.int32))
    assert (info.block_ids.tolist(), int(info.status)) == ([0] * 4, Status.OUT_OF_BLOCKS)
    jax.tree.map(np.testing.assert_array_equal, same, pool)
    with pytest.raises(ValueError, match="classes must be given: the pool has 2 size classes"):
        block_pool.allocate(pool, jnp.int32(1), 4)


def test_a_line_with_a_block_of_another_class_is_noticed() -> None:
    made = tables("lru", SIZES)
    block_tables = np.array(made.block_tables)
    block_tables[0, 0] = SIZES[0]  # the first block of class 1
    broken = dataclasses.replace(made, block_tables=block_tables, seq_lens=np.array([2, 0, 0]))
    with pytest.raises(InvariantError, match="row 0, group 0, names block 14, which is not of class 0"):
        check_invariants(broken)


def test_classes_must_fit_the_groups() -> None:
    pool = block_pool.create(4, LRU, more_blocks=(3,))
    rule = r"must be the size class of each of num_groups=2 groups, from 0 to 1"
    for classes in ((), (0, 0), (0, 1, 1), (0, 2)):
        with pytest.raises(InputError, match=rule):
            block_table.create(pool, 1, 1, 1, 2, classes=classes)
    with pytest.raises(InputError, match=r"classes=\(0, 2\) must be empty, or 2 numbers"):
        Grouping((FULL, FULL), ((0,), (1,)), classes=(0, 2))
    with pytest.raises(InputError, match=r"more_blocks=\(1,\) must be each at least 2"):
        block_pool.create(4, LRU, more_blocks=(1,))
    grouping = Grouping((FULL, FULL, FULL), ((0,), (1,), (2,)), classes=(0, 1, 0))
    assert Grouping.of_words(grouping.words()) == grouping
    assert [grouping.groups_of_class(each) for each in range(grouping.num_classes)] == [(0, 2), (1,)]


@pytest.mark.parametrize("policy", slow_and_nightly(POLICIES, ["naive"]))
def test_classes_equal_plain_pools(policy: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(1, 6 if POLICIES[policy].keeps_content else 3):
        history = History(policy, seed)
        history.run(150)
        seen += history.seen
    wanted = {"refused", "copied", "swap", *(["hits"] if history.caches else [])}
    wanted |= {"shared"} - ({"shared"} if policy == "naive" else set())
    assert wanted <= seen.keys(), seen


def test_blocks_of_each_class_are_read_and_written_where_they_lie() -> None:
    """K and V of five blocks, and states of three, whose ids follow: each array has those of its class."""
    rng, float32 = np.random.default_rng(0), jnp.dtype("float32")
    empty = kv_cache.create(2, 5, BLOCK_SIZE, 1, 4, float32)
    empty = kv_cache.with_states(empty, {"s": ((3,), float32)}, 2, 3)
    drawn = {name: jnp.asarray(rng.random(x.shape, np.float32)) for name, x in empty.movable.items()}
    cache = empty.with_movable(drawn)
    assert (empty.num_classes, [*empty.movable_of(1)]) == (2, ["state s"])
    assert (empty.block_bytes(0), empty.block_bytes(1)) == (2 * 2 * BLOCK_SIZE * 4 * 4, 2 * 3 * 4)
    for size_class, ids, places in ((0, [4, 1], [4, 1]), (1, [6, 5], [2, 1])):
        read = transfer.read(cache, jnp.array(ids), size_class)
        assert read.keys() == cache.movable_of(size_class).keys()
        for name, x in read.items():
            np.testing.assert_array_equal(x, drawn[name][np.array(places)])
        written = transfer.write(empty, jnp.array([ids[1], 0]), read).movable
        for name, x in written.items():
            want = np.zeros_like(x)
            if name in read:
                want[places[1]] = read[name][0]
            np.testing.assert_array_equal(x, want)
    # A copy between pools of other sizes; ids of states in the one are no blocks of K and V in the other.
    larger = kv_cache.create(2, 9, BLOCK_SIZE, 1, 4, float32)
    larger = kv_cache.with_states(larger, {"s": ((3,), float32)}, 2, 4)
    copied = kv_cache.copy_blocks(cache, larger, jnp.array([6, 2, 0]), jnp.array([11, 8, 3])).movable
    for name, x in copied.items():
        want = np.zeros_like(x)
        [source, target] = (2, 3) if name == "state s" else (2, 8)
        want[target] = drawn[name][source]
        np.testing.assert_array_equal(x, want)


@pytest.mark.nightly
def test_a_chain_is_adopted_by_each_class_for_itself() -> None:
    """Each group's blocks come from its class, and are found again; where one is short, none is taken."""
    adopt_chain = quick.jit(functools.partial(transfer.adopt, classes=CLASSES))
    pool = tables("lru", (SIZES[0], 4), caches=True).pool
    tokens = jnp.arange(MAX_TOKENS, dtype=jnp.int32).reshape(MAX_BLOCKS, BLOCK_SIZE)
    present = np.array([[True] * 4, [False, False, True, True], [True] * 4])
    count, salt = jnp.int32(MAX_BLOCKS), jnp.int32(0)
    pool, info = adopt_chain(pool, tokens, count, salt, jnp.array(present))
    assert int(info.status) == Status.OK
    first = SIZES[0]  # block of class 1
    want = [[1, 2, 3, 4], [0, 0, first, first + 1], [5, 6, 7, 8]]
    assert info.destinations.tolist() == want
    check_invariants(pool)
    found = quick.jit(functools.partial(transfer.locate, specs=SPECS))(pool, tokens, count, salt)
    assert found.block_ids.tolist() == want
    same, info = adopt_chain(pool, tokens, count, salt + 1, jnp.ones(present.shape, bool))
    assert (int(info.status), int(info.destinations.sum())) == (Status.OUT_OF_BLOCKS, 0)
    jax.tree.map(np.testing.assert_array_equal, same, pool)
    with pytest.raises(ValueError, match=r"classes=\(\) must have the size class of each of 3 groups"):
        jax.eval_shape(transfer.adopt, pool, tokens, count, salt, jnp.array(present))
