"""Two caches that hand each other blocks, and their oracles: random histories, compared at every step."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.memory import block_pool, block_table, kv_cache, prefix_cache, transfer
from jaxpaged.memory.cache_specs import FULL, ChunkedLocal, SlidingWindow
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.invariants import check_invariants, free_block_ids
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.memory.policies import LRU, POLICIES
from jaxpaged.memory.prefix_cache import PrefixCache
from jaxpaged.research.verify import quick, subjects
from jaxpaged.research.verify.generations import FREE_PROFILES
from jaxpaged.status import Status
from pallas_kernels import layouts
from reference.engine_state import Reach
from reference.transfer import Cache, Content
from tests.outsiders.layer_kind import WindowWithSinks

BLOCK_SIZE = 2
NUM_LAYERS = 2
MAX_SEQS = 3
MAX_BLOCKS = 3
NUM_BLOCKS = 10  # for each group of layers
NUM_OPERATIONS = 100
# All chains of so many blocks of two kinds, under two salts.
CHAINS = [(salt, kinds) for salt in (0, 7) for kinds in itertools.product((1, 2), repeat=MAX_BLOCKS)]

append = quick.jit(block_table.append, static_argnames="max_new_blocks")
commit = quick.jit(functools.partial(subjects.commit, max_blocks=MAX_SEQS * MAX_BLOCKS))
free_rows = quick.jit(block_table.free_rows)
evict = quick.jit(block_pool.evict)
slide = quick.jit(block_table.slide_windows, static_argnames="specs")
locate, adopt = quick.jit(transfer.locate, static_argnames="specs"), quick.jit(transfer.adopt)
write = quick.jit(transfer.write)
arrive, depart = quick.jit(transfer.arrive), quick.jit(transfer.depart, static_argnames="specs")
set_salts = quick.jit(lambda tables, salts: prefix_cache.root(tables.pool.prefix_cache, salts))


def tokens_of(kinds: tuple[int, ...]) -> np.ndarray:
    """Return token ids [num_blocks, BLOCK_SIZE]; both kinds have equal ids, in another order."""
    return np.array([[kind, 3 - kind] for kind in kinds], np.int32).reshape(len(kinds), BLOCK_SIZE)


def contents(kinds: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tuple(block) for block in tokens_of(kinds).tolist()]


@functools.cache
def kv_of(salt: int, kinds: tuple[int, ...], num_groups: int) -> tuple[int, ...]:
    """Return K of the last block's tokens in each group, which differs for every other beginning."""
    first = 1 + CHAINS.index((salt, kinds + (1,) * (MAX_BLOCKS - len(kinds)))) * MAX_BLOCKS + len(kinds)
    return tuple(first + 1000 * group for group in range(num_groups))


@jax.jit
def fill(cache: KVCache, block_ids: jax.Array, values: jax.Array) -> KVCache:
    """Write K and V of all tokens of these blocks, layer by layer; the null block's may be anything."""
    slots = (block_ids[:, None] * BLOCK_SIZE + jnp.arange(BLOCK_SIZE)).reshape(-1)
    for layer in range(NUM_LAYERS):
        x = jnp.repeat(values, BLOCK_SIZE)[:, None, None] * jnp.ones((1, 1, 2)) + layer / 4
        cache = kv_cache.write(cache, layer, x, -x, slots)
    return cache


@jax.jit
def filled(cache: KVCache) -> jax.Array:
    """Return K and V [num_blocks, NUM_LAYERS, 2, BLOCK_SIZE, 1, 2], read by the layout."""
    ids = jnp.arange(cache.num_blocks)
    pools = [cache.pool(layer).read(ids, cache.dtype) for layer in range(NUM_LAYERS)]
    return jnp.stack([jnp.stack(pool, axis=1) for pool in pools], axis=1)


class Side:
    """One cache, and what it must be."""

    def __init__(self, policy: str, layout: str, hash_fn: Any, specs: tuple[Any, ...]) -> None:
        self.specs, num_blocks = specs, NUM_BLOCKS * len(specs)
        cache = prefix_cache.create(num_blocks, BLOCK_SIZE, hash_fn)
        pool = block_pool.create(num_blocks, POLICIES[policy], prefix_cache=cache)
        first = Grouping(specs, ((),) * len(specs)).first_blocks(BLOCK_SIZE)
        self.tables = block_table.create(pool, MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE, len(specs), first)
        dtype = jnp.dtype("float32")
        self.kv = kv_cache.create(NUM_LAYERS, num_blocks, BLOCK_SIZE, 1, 2, dtype, layouts.named(layout))
        reaches = [
            Reach(getattr(its, "window", None), getattr(its, "chunk", None), its.first_tokens)
            for its in specs
        ]
        self.oracle = Cache(num_blocks, BLOCK_SIZE, FREE_PROFILES[policy], tuple(reaches))
        self.rows: list[Any] = [None] * MAX_SEQS

    def compute(self, salt: int, kinds: tuple[int, ...]) -> None:
        if None not in self.rows:
            return
        row = self.rows.index(None)
        wanted = [kv_of(salt, kinds[: i + 1], len(self.specs)) for i in range(len(kinds))]
        self.rows[row] = self.oracle.compute(contents(kinds), salt, wanted)
        this = np.arange(MAX_SEQS) == row
        chains = prefix_cache.where(
            jnp.array(this), set_salts(self.tables, jnp.array(this * salt)), self.tables.chains
        )
        tables, info = append(
            dataclasses.replace(self.tables, chains=chains),
            jnp.array(this * len(kinds) * BLOCK_SIZE),
            max_new_blocks=self.tables.block_tables.size,
        )
        assert (int(info.status) == Status.OK) == (self.rows[row] is not None)
        if self.rows[row] is None:
            return
        line = np.zeros((MAX_SEQS, MAX_BLOCKS * BLOCK_SIZE), np.int32)
        line[row, : len(kinds) * BLOCK_SIZE] = tokens_of(kinds).reshape(-1)
        self.tables, info = commit(tables, jnp.array(line), tables.seq_lens)
        assert int(info.status) == Status.OK
        values = np.zeros((len(self.specs), MAX_BLOCKS), np.float32)
        values[:, : len(kinds)] = np.transpose(wanted)
        lines = self.tables.block_tables.reshape(MAX_SEQS, -1)
        self.kv = fill(self.kv, lines[row], jnp.array(values.reshape(-1)))
        self.oracle.slide(self.rows[row])
        self.tables, _ = slide(self.tables, jnp.array(this), specs=self.specs)

    def finish(self, row: int) -> None:
        if self.rows[row] is not None:
            self.oracle.finish(self.rows[row])
            self.rows[row] = None
            self.tables, _ = free_rows(self.tables, jnp.arange(MAX_SEQS) == row)

    def evict(self, block_id: int) -> None:
        self.oracle.pool.evict_blocks([block_id])
        pool, _ = evict(self.tables.pool, jnp.array([block_id]), jnp.array([True]))
        self.tables = dataclasses.replace(self.tables, pool=pool)

    def export(self, salt: int, kinds: tuple[int, ...]) -> tuple[np.ndarray, Any]:
        """Return which blocks each group has, and their arrays."""
        hit = locate(self.tables.pool, *_chain(kinds), jnp.int32(salt), specs=self.specs)
        present = np.asarray(hit.block_ids)[:, : int(hit.chain.num_blocks)] != block_pool.NULL_BLOCK
        given = self.tables.pool, self.kv, *_chain(kinds), jnp.int32(salt), (jnp.arange(hit.block_ids.size),)
        [is_there], arrays = jax.device_get(depart(*given, specs=self.specs))
        assert (is_there.reshape(hit.block_ids.shape)[:, : present.shape[1]] == present).all()
        assert is_there.sum() == present.sum()
        return present, arrays

    def adopt(
        self, salt: int, kinds: tuple[int, ...], chain: list[Content], present: np.ndarray, arrays: Any
    ) -> bool:
        before = subjects.values(self.tables.pool)
        expected = self.oracle.adopt(chain, salt)
        its = np.zeros((len(self.specs), MAX_BLOCKS), bool)
        its[:, : len(chain)] = present
        pool, info = adopt(self.tables.pool, *_chain(kinds), jnp.int32(salt), jnp.array(its))
        assert int(info.status) == (Status.OUT_OF_BLOCKS if expected is None else Status.OK)
        written = [block_id for block_id in info.destinations.reshape(-1).tolist() if block_id]
        assert written == (expected or [])
        if expected is None:
            assert subjects.values(pool) == before
        kv = write(self.kv, info.destinations.reshape(-1), arrays)
        new = np.asarray(info.destinations).reshape(-1)
        self.check_arrivals(salt, kinds, its, arrays, new, pool, kv, is_adopted=expected is not None)
        self.tables, self.kv = dataclasses.replace(self.tables, pool=pool), kv
        return expected is not None

    def check_arrivals(
        self,
        salt: int,
        kinds: tuple[int, ...],
        present: np.ndarray,
        arrays: Any,
        destinations: np.ndarray,
        pool: Any,
        kv: KVCache,
        *,
        is_adopted: bool,
    ) -> None:
        """Adopt and write in one step, the blocks in another order: the same; without a new one: nothing."""
        order = np.arange(destinations.size)[::-1].copy()
        chunk = {name: array[order] for name, array in arrays.items()}
        new = np.flatnonzero(destinations)
        for left_out in (None, *new[:1]):
            places = np.where(order == left_out, -1, order) if left_out is not None else order
            line = *_chain(kinds), jnp.int32(salt), jnp.array(present), (jnp.array(places),)
            its_pool, its_kv, done = arrive(self.tables.pool, self.kv, *line, chunk)
            is_whole = left_out is None and is_adopted
            assert bool(done) == is_whole
            want = (pool, kv) if is_whole else (self.tables.pool, self.kv)
            assert subjects.values(its_pool) == subjects.values(want[0])
            for name, array in want[1].blocks.items():
                assert np.array_equal(its_kv.blocks[name], array)

    def check(self) -> None:
        check_invariants(self.tables)
        pool, oracle = jax.device_get(self.tables.pool), self.oracle.pool
        queue = [block.block_id for block in oracle.free_block_queue.get_all_free_blocks()]
        assert free_block_ids(pool) == queue
        assert np.asarray(self.tables.pool.ref_count).tolist() == [block.ref_cnt for block in oracle.blocks]
        rings: dict[Any, list[int]] = {}
        for key in oracle.cached_block_hash_to_block._cache:
            rings[key] = [b.block_id for b in oracle.cached_block_hash_to_block.get_all_blocks(key)]
        assert subjects.contents(pool.prefix_cache) == sorted(rings.values())
        numbers = np.asarray(filled(self.kv))
        for block_id in itertools.chain.from_iterable(rings.values()):
            for layer in range(NUM_LAYERS):
                k, v = numbers[block_id, layer]
                assert (k == self.oracle.kv[block_id] + layer / 4).all(), f"block {block_id}"
                assert (v == -k).all(), f"block {block_id}"


def _chain(kinds: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    token_ids = np.zeros((MAX_BLOCKS, BLOCK_SIZE), np.int32)
    token_ids[: len(kinds)] = tokens_of(kinds)
    return jnp.array(token_ids), jnp.int32(len(kinds))


def hash_of_place(token_ids: jax.Array, index: jax.Array) -> jax.Array:
    """Let all blocks at one index of their sequences collide; words differ, so that all fit."""
    word = (index + 1).astype(jnp.uint32)
    return jnp.stack([word, word + (index == -1)], axis=-1)


@pytest.mark.parametrize(
    ("policy", "layout", "hash_fn", "specs"),
    [
        # `make test` has engines that hand blocks over (tests/handover).
        pytest.param(
            "lru",
            "all_layers",
            prefix_cache.hash_block,
            (FULL, SlidingWindow(1)),
            marks=pytest.mark.slow,
        ),
        pytest.param("lru", "token_major", hash_of_place, (FULL,), marks=pytest.mark.slow),
        pytest.param("lru_split", "fused", prefix_cache.hash_block, (FULL,), marks=pytest.mark.nightly),
        pytest.param(
            "lru_split",
            "fused",
            prefix_cache.hash_block,
            (FULL, ChunkedLocal(4), WindowWithSinks(window=1, first_tokens=1)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "lru",
            "all_layers",
            prefix_cache.hash_block,
            (SlidingWindow(4), SlidingWindow(1)),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_caches_hand_over_what_the_oracle_says(
    policy: str, layout: str, hash_fn: Any, specs: tuple[Any, ...]
) -> None:
    rng = np.random.default_rng(0)
    sides = [Side(policy, layout, hash_fn, specs) for _ in range(2)]
    done, partly = {False: 0, True: 0}, 0
    for _ in range(NUM_OPERATIONS):
        here, there = (sides[i] for i in rng.permutation(2))
        salt, kinds = CHAINS[rng.integers(len(CHAINS))]
        kinds = kinds[: rng.integers(1, MAX_BLOCKS + 1)]
        what = rng.choice(["compute", "finish", "evict", "hand over"], p=[0.35, 0.3, 0.05, 0.3])
        if what == "compute":
            here.compute(salt, kinds)
        elif what == "finish":
            here.finish(int(rng.integers(MAX_SEQS)))
        elif what == "evict":
            here.evict(int(rng.integers(1, NUM_BLOCKS * len(specs))))
        else:
            chain = here.oracle.export(contents(kinds), salt)
            present, arrays = here.export(salt, kinds)
            assert present.T.tolist() == [[kv is not None for kv in content.kv] for content in chain]
            partly += not present.all()
            num_blocks = len(chain)
            done[there.adopt(salt, kinds[:num_blocks], chain, present, arrays) and num_blocks > 0] += 1
        for side in (here, there):
            side.check()
    assert min(done.values()) > 3
    assert len(specs) == 1 or partly > 3
    for side in sides:
        for salt, kinds in CHAINS:
            assert side.export(salt, kinds)[0].shape[1] == len(side.oracle.export(contents(kinds), salt))


def constant_hash(token_ids: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.zeros((*index.shape, 2), jnp.uint32)


def test_a_chain_that_does_not_fit_changes_nothing() -> None:
    """No place to be found by, more blocks than an operation takes, or than are free."""

    def chain(kind: int) -> jax.Array:
        return jnp.full((MAX_BLOCKS, BLOCK_SIZE), kind)

    whole = jnp.ones((1, MAX_BLOCKS), bool)
    cache = prefix_cache.create(NUM_BLOCKS, BLOCK_SIZE, constant_hash)
    pool = block_pool.create(NUM_BLOCKS, LRU, prefix_cache=cache)
    for kind in range(PrefixCache.BUCKET):  # the only one there is
        pool, info = adopt(pool, chain(kind), jnp.int32(1), jnp.int32(0), whole)
        assert int(info.status) == Status.OK
    held, _ = quick.jit(block_pool.allocate, static_argnums=2)(pool, jnp.int32(NUM_BLOCKS - 2), NUM_BLOCKS)
    for given, num_blocks, status in (
        (pool, 1, Status.UNCACHEABLE),
        (pool, MAX_BLOCKS + 1, Status.TOO_MANY_BLOCKS),
        (held, 2, Status.OUT_OF_BLOCKS),
    ):
        after, info = adopt(given, chain(99), jnp.int32(num_blocks), jnp.int32(0), whole)
        assert int(info.status) == status
        assert not info.destinations.any()
        assert subjects.values(after) == subjects.values(given)
