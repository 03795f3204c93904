"""Pools and oracles that `benchmarks.allocator` times: each does the same operations."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpaged.memory import block_pool, block_table, prefix_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.memory.policies import Policy
from jaxpaged.memory.prefix_cache import Hit, PrefixCache
from reference.v0.block_manager import BlockSpaceManager
from reference.v0.sequence import Sequence, SequenceGroup
from reference.v063 import block_manager as v063_manager
from reference.v063 import sequence as v063_sequence
from reference.v1.kv_cache_manager import KVCacheManager
from reference.v1.kv_cache_utils import (
    BlockHash,
    Request,
    get_request_block_hasher,
    make_block_hash_with_group_id,
    sha256,
)
from reference.v1.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

BLOCK_SIZE = 16
NUM_ROWS = 256
PROMPT_BLOCKS = 1000  # in the prompt that is allocated and freed
HIT_BLOCKS = 500  # of it that are looked up
MAX_BLOCKS_PER_ROW = 1024
STEPS = 16  # decode steps in one history: each row takes one block
FILL = 4096  # blocks that are filled with content at a time


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the microseconds until the result is there, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return (time.perf_counter() - start) * 1e6, result


def publish(tables: BlockTables, token_ids: jax.Array, num_tokens: jax.Array, *, max_blocks: int) -> Any:
    return block_table.cache_full_blocks(
        tables, lambda row, position: token_ids[row, position], num_tokens, max_blocks=max_blocks
    )


def look_up(cache: PrefixCache, line: jax.Array, num_tokens: jax.Array, salt: jax.Array) -> Hit:
    return prefix_cache.lookup(cache, lambda at: line[at], num_tokens, salt, max_tokens=line.shape[0])


class Subject:
    """One pool and one oracle, taken through the same histories again and again."""

    def __init__(self, policy: Policy, num_blocks: int) -> None:
        cache = prefix_cache.create(num_blocks, BLOCK_SIZE) if policy.keeps_content else None
        pool = block_pool.create(num_blocks, policy, prefix_cache=cache)
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
        if cache is not None:
            self.state_bytes -= cache.token_ids.nbytes
        self.num_blocks = num_blocks
        self.tables = block_table.create(pool, NUM_ROWS, MAX_BLOCKS_PER_ROW, BLOCK_SIZE)
        donated = functools.partial(jax.jit, donate_argnums=0)
        self.append = donated(functools.partial(block_table.append, max_new_blocks=NUM_ROWS))
        self.append_prompt = donated(functools.partial(block_table.append, max_new_blocks=MAX_BLOCKS_PER_ROW))
        self.free = donated(block_table.free_rows)
        self.decode = donated(_decode)
        self.everybody = jnp.ones(NUM_ROWS, bool)
        self.one_token = jnp.ones(NUM_ROWS, jnp.int32)
        # Of each 16 neighbours one begins a block at every step.
        self.first_lens = jnp.arange(NUM_ROWS, dtype=jnp.int32) % BLOCK_SIZE + 1
        self.prompt_lens = jnp.zeros(NUM_ROWS, jnp.int32).at[0].set(PROMPT_BLOCKS * BLOCK_SIZE)

    def operations(self) -> dict[str, tuple[Callable[[], dict[str, float]], Callable[[], float]]]:
        return {
            "append": (self.time_append, self.time_oracle_append),
            "prompt of 1000 blocks": (self.time_prompt, self.time_oracle_prompt),
            "free 1000 blocks": (self.time_free, self.time_oracle_free),
        }

    def _do(self, transition: Callable[..., tuple[BlockTables, Any]], *args: Any) -> float:
        """Time a transition of the tables, which are replaced."""
        us, (self.tables, info) = timed(lambda: transition(self.tables, *args))
        assert int(info.status) == 0
        return us

    def time_append(self) -> dict[str, float]:
        self._do(self.append_prompt, self.first_lens)
        us = [self._do(self.append, self.one_token) for _ in range(STEPS)]
        used = int(jnp.sum(self.tables.num_blocks))
        assert used == 2 * NUM_ROWS, f"after {STEPS} steps {used} blocks are used"
        self._do(self.free, self.everybody)
        self._do(self.append_prompt, self.first_lens)
        loop_us, (self.tables, status) = timed(lambda: self.decode(self.tables, self.one_token))
        assert int(status) == 0
        self._do(self.free, self.everybody)
        return {"us": float(np.median(us)), "in_loop_us": loop_us / STEPS}

    def time_prompt(self) -> dict[str, float]:
        us = self._do(self.append_prompt, self.prompt_lens)
        self._do(self.free, self.everybody)
        return {"us": us}

    def time_free(self) -> dict[str, float]:
        self._do(self.append_prompt, self.prompt_lens)
        return {"us": self._do(self.free, self.everybody)}

    def time_oracle_append(self) -> float:
        raise NotImplementedError

    def time_oracle_prompt(self) -> float:
        raise NotImplementedError

    def time_oracle_free(self) -> float:
        raise NotImplementedError


def _decode(tables: BlockTables, num_new_tokens: jax.Array) -> tuple[BlockTables, jax.Array]:
    def step(_: jax.Array, carry: tuple[BlockTables, jax.Array]) -> tuple[BlockTables, jax.Array]:
        tables, status = carry
        tables, info = block_table.append(tables, num_new_tokens, max_new_blocks=NUM_ROWS)
        return tables, status | info.status

    return lax.fori_loop(0, STEPS, step, (tables, jnp.int32(0)))


class LifoSubject(Subject):
    """Policy `lifo` and vLLM v0's `BlockSpaceManager`."""

    def __init__(self, policy: Policy, num_blocks: int) -> None:
        super().__init__(policy, num_blocks)
        self.manager = self._manager()
        # The two agree before either is timed.
        self.tables, _ = self.append_prompt(self.tables, self.first_lens)
        self.tables, _ = self.append(self.tables, self.one_token)
        seqs = self._begin(np.asarray(self.first_lens).tolist())
        for seq in seqs:
            self._write(seq)
            self._append(seq)
        for row, seq in enumerate(seqs):
            table = self.manager.get_block_table(seq)
            ours = self.tables.block_tables[row, : len(table)]
            assert ours.tolist() == [block + 1 for block in table]
        self._end(seqs)
        self._do(self.free, self.everybody)

    def _manager(self) -> Any:
        return BlockSpaceManager(BLOCK_SIZE, self.num_blocks - 1, 0, watermark=0.0)

    def _group(self, row: int, num_tokens: int) -> Any:
        return SequenceGroup("", [Sequence(row, None, [0] * num_tokens, BLOCK_SIZE)])

    def _begin(self, lens: list[int]) -> list[Any]:
        groups = [self._group(row, num_tokens) for row, num_tokens in enumerate(lens)]
        for group in groups:
            self.manager.allocate(group)
        seqs = [group.get_seqs()[0] for group in groups]
        for seq in seqs:
            seq.status = type(seq.status).RUNNING
        return seqs

    def _write(self, seq: Any) -> None:
        seq.append_token_id(0, {0: 0.0})

    def _append(self, seq: Any) -> None:
        self.manager.append_slot(seq)

    def _append_all(self, seqs: list[Any]) -> None:
        for seq in seqs:
            self._append(seq)

    def _end(self, seqs: list[Any]) -> None:
        for seq in reversed(seqs):
            self.manager.free(seq)

    def time_oracle_append(self) -> float:
        seqs = self._begin(np.asarray(self.first_lens).tolist())
        us = []
        for _ in range(STEPS):
            for seq in seqs:
                self._write(seq)
            us.append(timed(functools.partial(self._append_all, seqs))[0])
        self._end(seqs)
        return float(np.median(us))

    def time_oracle_prompt(self) -> float:
        group = self._group(0, PROMPT_BLOCKS * BLOCK_SIZE)
        us, _ = timed(lambda: self.manager.allocate(group))
        self._end(group.get_seqs())
        return us

    def time_oracle_free(self) -> float:
        [seq] = self._begin([PROMPT_BLOCKS * BLOCK_SIZE])
        return timed(lambda: self.manager.free(seq))[0]


class NaiveSubject(LifoSubject):
    """Policy `naive` and vLLM 0.6.3's `SelfAttnBlockSpaceManager`, without prefix caching."""

    def _manager(self) -> Any:
        return v063_manager.SelfAttnBlockSpaceManager(BLOCK_SIZE, self.num_blocks - 1, 0, watermark=0.0)

    def _group(self, row: int, num_tokens: int) -> Any:
        return v063_sequence.SequenceGroup(str(row), [v063_sequence.Sequence(row, [0] * num_tokens)])

    def _write(self, seq: Any) -> None:
        seq.append_token_id(0)

    def _append(self, seq: Any) -> None:
        self.manager.append_slots(seq, 0)


class CachedSubject(Subject):
    """A policy with prefix caching and vLLM V1's `KVCacheManager`."""

    def __init__(self, policy: Policy, num_blocks: int, *, free_profile: str) -> None:
        super().__init__(policy, num_blocks)
        spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="half")
        config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, MAX_BLOCKS_PER_ROW * BLOCK_SIZE, free_profile=free_profile)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.rng = np.random.default_rng(0)
        self.commit = jax.jit(functools.partial(publish, max_blocks=MAX_BLOCKS_PER_ROW), donate_argnums=0)
        self.lookup = jax.jit(look_up)
        self._fill_with_content()

    def operations(self) -> dict[str, tuple[Callable[[], dict[str, float]], Callable[[], float]]]:
        return super().operations() | {
            "lookup of 500 blocks": (self.time_lookup, self.time_oracle_lookup),
            "cache 1000 blocks": (self.time_cache, self.time_oracle_cache),
        }

    def _fill_with_content(self) -> None:
        """Let every block hold something that nobody will look for."""

        def fill(cache: prefix_cache.PrefixCache, first: jax.Array) -> tuple[prefix_cache.PrefixCache, None]:
            block_ids = first + jnp.arange(FILL, dtype=jnp.int32)
            exists = block_ids < self.num_blocks
            chain = prefix_cache.root(cache, jnp.where(exists, -block_ids, 0))
            cache, _ = prefix_cache.insert(
                cache,
                chain,
                exists.astype(jnp.int32),
                jnp.arange(FILL, dtype=jnp.int32),
                jnp.where(exists, block_ids, 0),
                jnp.zeros((FILL, BLOCK_SIZE), jnp.int32),
            )
            return cache, None

        @functools.partial(jax.jit, donate_argnums=0)
        def fill_all(cache: prefix_cache.PrefixCache) -> prefix_cache.PrefixCache:
            return lax.scan(fill, cache, jnp.arange(1, self.num_blocks, FILL, dtype=jnp.int32))[0]

        pool = self.tables.pool
        assert pool.prefix_cache is not None
        cache = fill_all(pool.prefix_cache)
        pool = dataclasses.replace(pool, prefix_cache=cache)
        self.tables = dataclasses.replace(self.tables, pool=pool)
        cached = int(jnp.sum(prefix_cache.has_content(cache, jnp.arange(self.num_blocks))))
        assert cached == self.num_blocks - 1, f"{cached} blocks of {self.num_blocks} have content"
        if self.num_blocks <= 1024:
            check_invariants(self.tables)
        oracle_pool = self.manager.block_pool
        for block in oracle_pool.blocks[1:]:
            key = make_block_hash_with_group_id(BlockHash(sha256(block.block_id)), 0)
            block.block_hash = key
            oracle_pool.cached_block_hash_to_block.insert(key, block)

    def _begin(self, lens: list[int]) -> list[Request]:
        requests = [Request(str(row), [0] * n) for row, n in enumerate(lens)]
        for request in requests:
            self.manager.allocate_slots(request, request.num_tokens, delay_cache_blocks=True)
            request.num_computed_tokens = request.num_tokens
        return requests

    def _append_all(self, requests: list[Request]) -> None:
        for request in requests:
            self.manager.allocate_slots(request, 1, delay_cache_blocks=True)

    def time_oracle_append(self) -> float:
        requests = self._begin(np.asarray(self.first_lens).tolist())
        us = []
        for _ in range(STEPS):
            for request in requests:
                request.append_output_token_ids(0)
            us.append(timed(functools.partial(self._append_all, requests))[0])
            for request in requests:
                request.num_computed_tokens += 1
        for request in requests:
            self.manager.free(request)
        return float(np.median(us))

    def _prompt(self) -> np.ndarray:
        """Return tokens that no request has had before."""
        return self.rng.integers(0, 1 << 30, PROMPT_BLOCKS * BLOCK_SIZE).astype(np.int32)

    def _request(self, prompt: np.ndarray) -> Request:
        return Request("prompt", prompt.tolist(), block_hasher=self.hasher)

    def time_oracle_prompt(self) -> float:
        request = self._request(self._prompt())
        us, _ = timed(
            lambda: self.manager.allocate_slots(request, request.num_tokens, delay_cache_blocks=True)
        )
        self.manager.free(request)
        return us

    def time_oracle_free(self) -> float:
        request = self._request(self._prompt())
        self.manager.allocate_slots(request, request.num_tokens, delay_cache_blocks=True)
        return timed(lambda: self.manager.free(request))[0]

    def _cache_prompt(self, prompt: np.ndarray) -> float:
        """Give row 0 a prompt and cache it; time the caching."""
        self._do(self.append_prompt, self.prompt_lens)
        tokens = np.zeros((NUM_ROWS, MAX_BLOCKS_PER_ROW * BLOCK_SIZE), np.int32)
        tokens[0, : len(prompt)] = prompt
        on_device = jax.block_until_ready(jnp.asarray(tokens))
        return self._do(self.commit, on_device, self.prompt_lens)

    def time_cache(self) -> dict[str, float]:
        us = self._cache_prompt(self._prompt())
        self._do(self.free, self.everybody)
        return {"us": us}

    def time_oracle_cache(self) -> float:
        request = self._request(self._prompt())
        self.manager.allocate_slots(request, request.num_tokens, delay_cache_blocks=True)
        us, _ = timed(lambda: self.manager.cache_blocks(request, request.num_tokens))
        self.manager.free(request)
        return us

    def time_lookup(self) -> dict[str, float]:
        prompt = self._prompt()
        self._cache_prompt(prompt)
        cache = self.tables.pool.prefix_cache
        num_tokens = HIT_BLOCKS * BLOCK_SIZE + 1
        line = jax.block_until_ready(jnp.asarray(prompt[:num_tokens]))
        us, hit = timed(lambda: self.lookup(cache, line, jnp.int32(num_tokens), jnp.int32(0)))
        assert hit.block_ids.tolist() == self.tables.block_tables[0, :HIT_BLOCKS].tolist()
        self._do(self.free, self.everybody)
        return {"us": us}

    def time_oracle_lookup(self) -> float:
        """Time the oracle's lookup. Its hashes are ready; ours are made in the call."""
        prompt = self._prompt()
        request = self._request(prompt)
        self.manager.allocate_slots(request, request.num_tokens)
        again = self._request(prompt[: HIT_BLOCKS * BLOCK_SIZE + 1])
        us, (_, num_tokens) = timed(lambda: self.manager.get_computed_blocks(again))
        assert num_tokens == HIT_BLOCKS * BLOCK_SIZE
        self.manager.free(request)
        return us


# Whose manager each policy is compared with; the tests have an oracle for every policy.
SUBJECTS: dict[str, Callable[[Policy, int], Subject]] = {
    "lifo": LifoSubject,
    "naive": NaiveSubject,
    "lru": functools.partial(CachedSubject, free_profile="classic"),
    "lru_split": functools.partial(CachedSubject, free_profile="split"),
}
