"""Kinds of caches as `memory.cache_specs` describes them: five that differ, each through the real tables.

Each kind is a double for what a layer could keep. It allocates, forks, is truncated and found again, and what
its tokens read is what they read in their sequence alone.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.memory import block_pool, block_table, group_content, prefix_cache
from jaxpaged.memory.cache_specs import FULL, CacheSpec, ChunkState, SlidingWindow
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.memory.policies import LRU
from jaxpaged.research.verify import quick, subjects

BLOCK, ROWS, MAX_BLOCKS, VOCABULARY = 4, 3, 8, 5
MAX_LEN, NUM_BLOCKS = MAX_BLOCKS * BLOCK, 1 + ROWS * MAX_BLOCKS
POISON = 10**9  # in entries that nobody has written
type Cache = dict[str, np.ndarray]  # [NUM_BLOCKS, *shape of a block]

append = quick.jit(functools.partial(block_table.append, max_new_blocks=ROWS * MAX_BLOCKS))
fork = quick.jit(block_table.fork)
truncate = quick.jit(block_table.truncate)
free = quick.jit(block_table.free_rows)
slide = quick.jit(block_table.slide_windows, static_argnames="specs")
commit = quick.jit(functools.partial(subjects.commit, max_blocks=MAX_BLOCKS))


@functools.partial(quick.jit, static_argnames="spec")
def adopt(tables, tokens, row, spec):
    """Give an empty row the longest prefix of tokens that is in the prefix cache."""

    def tokens_at(positions):
        return tokens.at[positions].get(mode="clip")

    cache, most = tables.pool.prefix_cache, jnp.int32(MAX_LEN)
    hit = prefix_cache.lookup(cache, tokens_at, most, jnp.int32(0), max_tokens=MAX_LEN)
    hit = group_content.lookup(cache, hit, (spec,))
    chain = jax.tree.map(lambda x: x[None], hit.chain)
    has_some = (hit.chain.num_blocks > 0)[None]
    return block_table.adopt(tables, row[None], hit.block_ids, chain, has_some)[0]


CHUNKS = ChunkState(BLOCK)


@dataclass(frozen=True)
class State:
    """One value of a sequence, which cannot be truncated: that at a block's start, and the block's rows."""

    spec: CacheSpec = CHUNKS
    arrays: Any = field(default_factory=lambda: {"start": (), "rows": (BLOCK,)})

    def write(self, cache: Cache, ids: np.ndarray, position: int, token: int) -> None:
        block, offset = divmod(position, BLOCK)
        if offset == 0:
            cache["start"][ids[block]] = self.read(cache, ids, position - 1) if block else 1
        cache["rows"][ids[block], offset] = token

    def read(self, cache: Cache, ids: np.ndarray, position: int) -> int:
        block, offset = divmod(position, BLOCK)
        rows = cache["rows"][ids[block], : offset + 1].tolist()
        return functools.reduce(folded, rows, int(cache["start"][ids[block]]))

    def alone(self, tokens: tuple[int, ...]) -> int:
        return functools.reduce(folded, tokens, 1)


@dataclass(frozen=True)
class Latent:
    """One vector of each token for all heads: K is all of it, V its first numbers."""

    size: int = 9
    v_size: int = 8
    spec: CacheSpec = FULL

    @property
    def arrays(self) -> dict[str, tuple[int, ...]]:
        return {"latent": (BLOCK, self.size)}

    def write(self, cache: Cache, ids: np.ndarray, position: int, token: int) -> None:
        block, offset = divmod(position, BLOCK)
        cache["latent"][ids[block], offset] = token + np.arange(self.size)

    def read(self, cache: Cache, ids: np.ndarray, position: int) -> int:
        held = cache["latent"][ids].reshape(-1, self.size)[: position + 1]
        return self.attended(held, held[:, : self.v_size])

    def alone(self, tokens: tuple[int, ...]) -> int:
        held = np.array(tokens)[:, None] + np.arange(self.size)
        return self.attended(held, held[:, : self.v_size])

    def attended(self, k: np.ndarray, v: np.ndarray) -> int:
        return int((k.sum(1)[:, None] * v).sum())


@dataclass(frozen=True)
class Entries:
    """One entry for several tokens, in the block of the last of them; rows of tokens for the open group."""

    tokens_per_entry: int
    spec: CacheSpec = FULL

    @property
    def arrays(self) -> dict[str, tuple[int, ...]]:
        return {"entries": (math.ceil(BLOCK / self.tokens_per_entry),), "rows": (BLOCK,)}

    def write(self, cache: Cache, ids: np.ndarray, position: int, token: int) -> None:
        block, offset = divmod(position, BLOCK)
        cache["rows"][ids[block], offset] = token
        if (position + 1) % self.tokens_per_entry == 0:
            rows = cache["rows"][ids].reshape(-1)[position + 1 - self.tokens_per_entry : position + 1]
            cache["entries"][ids[block], offset // self.tokens_per_entry] = (rows + 1).prod()

    def read(self, cache: Cache, ids: np.ndarray, position: int) -> int:
        ends = range(self.tokens_per_entry - 1, position + 1, self.tokens_per_entry)
        entries = [cache["entries"][ids[p // BLOCK], p % BLOCK // self.tokens_per_entry] for p in ends]
        open_from = len(entries) * self.tokens_per_entry
        return int(sum(entries) + cache["rows"][ids].reshape(-1)[open_from : position + 1].sum())

    def alone(self, tokens: tuple[int, ...]) -> int:
        size = self.tokens_per_entry
        first = len(tokens) // size * size
        groups = np.array(tokens[:first], int).reshape(-1, size)
        return int((groups + 1).prod(1).sum() + sum(tokens[first:]))


@dataclass(frozen=True)
class Ring:
    """The last tokens of a sequence: a ring of blocks, of which each block behind comes back to the pool."""

    size: int = 6

    @property
    def spec(self) -> CacheSpec:
        return SlidingWindow(self.size)

    @property
    def arrays(self) -> dict[str, tuple[int, ...]]:
        return {"rows": (BLOCK,)}

    def write(self, cache: Cache, ids: np.ndarray, position: int, token: int) -> None:
        cache["rows"][ids[position // BLOCK], position % BLOCK] = token

    def read(self, cache: Cache, ids: np.ndarray, position: int) -> int:
        first = max(position + 1 - self.size, 0)
        return sum(int(cache["rows"][ids[p // BLOCK], p % BLOCK]) for p in range(first, position + 1))

    def alone(self, tokens: tuple[int, ...]) -> int:
        return sum(tokens[-self.size :])


@dataclass(frozen=True)
class Borrowed:
    """A layer that reads the cache of another, and keeps nothing itself."""

    owner: Latent = Latent()

    @property
    def spec(self) -> CacheSpec:
        return self.owner.spec

    @property
    def arrays(self) -> dict[str, tuple[int, ...]]:
        return self.owner.arrays  # these alone

    def write(self, cache: Cache, ids: np.ndarray, position: int, token: int) -> None:
        self.owner.write(cache, ids, position, token)  # as the owner does before the layer runs

    def read(self, cache: Cache, ids: np.ndarray, position: int) -> int:
        return -self.owner.read(cache, ids, position)

    def alone(self, tokens: tuple[int, ...]) -> int:
        return -self.owner.alone(tokens)


def folded(state: int, token: int) -> int:
    return (state * 31 + token) % 1_000_003


class World:
    """Rows of tokens over one pool, with the arrays of a kind, and the tokens that rows should hold."""

    def __init__(self, kind: Any) -> None:
        pool = block_pool.create(NUM_BLOCKS, LRU, prefix_cache=prefix_cache.create(NUM_BLOCKS, BLOCK))
        self.kind, self.tokens = kind, [()] * ROWS
        self.tables = block_table.create(pool, ROWS, MAX_BLOCKS, BLOCK, 1)
        self.cache = {name: np.full((NUM_BLOCKS, *shape), POISON) for name, shape in kind.arrays.items()}

    def add(self, row: int, tokens: tuple[int, ...]) -> None:
        """Append tokens to a row, and compare what each reads with what it reads in its sequence alone."""
        counts = np.zeros(ROWS, np.int32)
        counts[row] = len(tokens)
        self.tables, info = append(self.tables, counts)
        assert int(info.status) == 0
        for source, target in zip(info.copy_sources.tolist(), info.copy_destinations.tolist(), strict=True):
            for array in self.cache.values():
                array[target] = array[source]
        ids = np.asarray(self.tables.block_tables)[row]
        for token in tokens:
            position = len(self.tokens[row])
            self.tokens[row] += (token,)
            self.kind.write(self.cache, ids, position, token)
            assert self.kind.read(self.cache, ids, position) == self.kind.alone(self.tokens[row])

    def settle(self) -> None:
        """Make full blocks findable, and give back what no coming token reads."""
        held = np.zeros((ROWS, MAX_LEN), np.int32)
        for row, tokens in enumerate(self.tokens):
            held[row, : len(tokens)] = tokens
        self.tables = commit(self.tables, held, self.tables.seq_lens)[0]
        self.tables = slide(self.tables, np.ones(ROWS, bool), specs=(self.kind.spec,))[0]
        check_invariants(self.tables)

    def fork(self, source: int, target: int) -> None:
        self.tables, info = fork(self.tables, *map(np.array, ([source], [target], [True])))
        assert int(info.status) == 0
        self.tokens[target] = self.tokens[source]

    def take_back(self, row: int, num: int) -> None:
        self.tables, info = truncate(self.tables, np.where(np.arange(ROWS) == row, num, 0).astype(np.int32))
        assert int(info.status) == 0
        self.tokens[row] = self.tokens[row][: len(self.tokens[row]) - num]

    def free(self, row: int) -> None:
        self.tables = free(self.tables, np.arange(ROWS) == row)[0]
        self.tokens[row] = ()

    def find(self, row: int, tokens: tuple[int, ...]) -> int:
        """Let an empty row begin with what is found of tokens; return how many are."""
        padded = np.full(MAX_LEN, VOCABULARY, np.int32)  # a token that no sequence has
        padded[: len(tokens)] = tokens
        self.tables = adopt(self.tables, padded, np.int32(row), spec=self.kind.spec)
        found = int(self.tables.seq_lens[row])
        self.tokens[row] = tokens[:found]
        return found


KINDS = [State(), Latent(), Entries(4), Entries(2), Entries(16), Ring(), Borrowed()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_kind_allocates_forks_is_truncated_and_found_again(kind):
    """Over block ends, within groups of tokens, and with poison in everything that nobody has written."""
    world, prompt = World(kind), tuple(i * i % VOCABULARY for i in range(13))
    world.add(0, prompt)
    world.settle()
    world.fork(0, 1)
    world.add(1, (1, 2))  # into the open block, which both rows hold
    world.add(0, (4, 4, 4, 4, 4))
    world.take_back(0, 4)  # back over the end of a block
    world.add(0, (3, 2, 1, 0))
    world.settle()
    world.add(1, (2, 2, 2))
    world.free(0)
    found = world.find(0, prompt)
    assert found == 12
    world.add(0, (*prompt[found:], 1, 1, 1, 1, 1))
    assert world.find(2, prompt[:9]) == 8
    world.add(2, (0,) * 12)
    world.settle()  # at the end of a block
    world.add(2, (1,))
