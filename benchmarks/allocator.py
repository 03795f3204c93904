"""Times of the memory's transitions, beside the Python loops of vLLM's managers (our oracles of them).

    python -m benchmarks.allocator [--policy lru] [--num_blocks 1024 --num_blocks 65536] [--repeats 30]

JSON lines on stdout. `us` are microseconds of one jitted call, its dispatch included; `in_loop_us` of one
append inside a compiled loop, as the engine has it. The state is donated, so nothing of the pool's size may
be copied. With `lru` all blocks hold cached content, so that each allocation evicts (so they do at first with
`lru_split`, which then takes those without content again and again). The oracle's time is
that of its manager alone: tokens and hashes are ready. On a CPU, JAX runs in the thread that calls: else most
of a call is the waking of another one, and varies with it (`--async_dispatch` leaves it as JAX has it).

The lines "in a loop" are what an engine's decode step needs of the memory: 64 sequences in 128 rows, 4,096
blocks; microseconds of one transition inside a compiled `while_loop`, without an oracle.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from benchmarks import record
from jaxpaged.memory import block_pool, block_table, policies, prefix_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.invariants import check_invariants
from jaxpaged.memory.policies import POLICIES, Policy
from jaxpaged.memory.prefix_cache import Hit, PrefixCache
from reference.v0.block_manager import BlockSpaceManager
from reference.v0.sequence import Sequence, SequenceGroup
from reference.v063 import block_manager as v063_manager
from reference.v063 import sequence as v063_sequence
from reference.v1.kv_cache_manager import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager
from reference.v1.kv_cache_utils import (
    BlockHash,
    Request,
    get_request_block_hasher,
    make_block_hash_with_group_id,
    sha256,
)

_POLICY = flags.DEFINE_multi_enum("policy", [*POLICIES], [*POLICIES], "A policy; may be given several times.")
_NUM_BLOCKS = flags.DEFINE_multi_integer(
    "num_blocks", [1024, 65536, 1048576], "Blocks of a pool; may be given several times."
)
_REPEATS = flags.DEFINE_integer("repeats", 30, "Runs that are counted.", lower_bound=1)
_ASYNC_DISPATCH = flags.DEFINE_boolean("async_dispatch", False, "Leave dispatching on a CPU as JAX has it.")

BLOCK_SIZE = 16
NUM_ROWS = 256
PROMPT_BLOCKS = 1000  # in the prompt that is allocated and freed
HIT_BLOCKS = 500  # of it that are looked up
MAX_BLOCKS_PER_ROW = 1024
STEPS = 16  # decode steps in one history: each row takes one block
FILL = 4096  # blocks that are filled with content at a time

# What an engine's loop has.
LOOP_ROWS = 128
LOOP_SEQS = 64
LOOP_BLOCKS = 4096
LOOP_BLOCKS_PER_ROW = 64
LOOP_STEPS = 64
LOOP_PROMPT = 512  # tokens


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    jax.config.update("jax_cpu_enable_async_dispatch", _ASYNC_DISPATCH.value)
    context = record.context("benchmarks.allocator")
    context |= {
        "device": jax.devices()[0].device_kind,
        "block_size": BLOCK_SIZE,
        "async_dispatch": _ASYNC_DISPATCH.value,
    }
    for policy in map(policies.named, _POLICY.value):
        append_us = {}
        for line in measure_loops(policy, _REPEATS.value):
            shape = {
                "policy": policy.name,
                "num_blocks": LOOP_BLOCKS,
                "num_rows": LOOP_ROWS,
                "num_seqs": LOOP_SEQS,
            }
            print(json.dumps(context | shape | line), flush=True)
        for num_blocks in _NUM_BLOCKS.value:
            for line in measure(policy, num_blocks, _REPEATS.value):
                if line["operation"] == "append":
                    append_us[num_blocks] = line["us"]["median"], line["in_loop_us"]["median"]
                shape = {"policy": policy.name, "num_blocks": num_blocks, "num_rows": NUM_ROWS}
                print(json.dumps(context | shape | line), flush=True)
        smallest, largest = append_us[min(append_us)], append_us[max(append_us)]
        growth = [round(b / a, 2) for a, b in zip(smallest, largest, strict=True)]
        line = {"operation": "append", "growth": dict(zip(["us", "in_loop_us"], growth, strict=True))}
        print(json.dumps(context | {"policy": policy.name, "num_blocks": [*append_us]} | line), flush=True)


def measure(policy: Policy, num_blocks: int, repeats: int) -> list[dict[str, Any]]:
    """Return one line for each operation."""
    subject = SUBJECTS[policy.name](policy, num_blocks)
    lines = []
    for operation, (ours, theirs) in subject.operations().items():
        runs = [ours() for _ in range(repeats + 3)][3:]
        theirs_runs = [theirs() for _ in range(max(repeats // 3, 3) + 1)][1:]
        line: dict[str, Any] = {"operation": operation}
        for name in runs[0]:
            line[name] = record.spread([run[name] for run in runs])
        line["oracle_us"] = record.spread(theirs_runs)
        line["oracle_over_ours"] = round(line["oracle_us"]["median"] / line["us"]["median"], 2)
        line["state_bytes_per_block"] = round(subject.state_bytes / num_blocks, 1)
        lines.append(line)
    return lines


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the microseconds until the result is there, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return (time.perf_counter() - start) * 1e6, result


def measure_loops(policy: Policy, repeats: int) -> list[dict[str, Any]]:
    """Return one line for each transition that an engine's loop has."""
    cache = prefix_cache.create(LOOP_BLOCKS, BLOCK_SIZE) if policy.keeps_content else None
    pool = block_pool.create(LOOP_BLOCKS, policy, prefix_cache=cache)
    tables = block_table.create(pool, LOOP_ROWS, LOOP_BLOCKS_PER_ROW, BLOCK_SIZE)
    row = jnp.arange(LOOP_ROWS, dtype=jnp.int32)
    one_token = (row < LOOP_SEQS).astype(jnp.int32)
    shape = (LOOP_ROWS, LOOP_BLOCKS_PER_ROW * BLOCK_SIZE)
    token_ids = jnp.asarray(np.random.default_rng(0).integers(0, 1 << 15, shape), jnp.int32)
    append_prompts = jax.jit(functools.partial(block_table.append, max_new_blocks=LOOP_BLOCKS))
    # One sequence in 16 begins a block at every step.
    tables, info = append_prompts(tables, one_token * (LOOP_PROMPT + row % BLOCK_SIZE))
    assert int(info.status) == 0

    def append(tables: BlockTables, _: jax.Array) -> tuple[BlockTables, jax.Array]:
        tables, info = block_table.append(tables, one_token, max_new_blocks=LOOP_SEQS)
        return tables, info.status

    def free(tables: BlockTables, step: jax.Array) -> tuple[BlockTables, jax.Array]:
        tables, info = block_table.free_rows(tables, row == step)
        return tables, info.status

    loops = {"append": append, "free_rows of one row": free}
    if policy.keeps_content:
        publish = functools.partial(_publish, max_blocks=LOOP_SEQS)
        publish_prompts = jax.jit(functools.partial(_publish, max_blocks=LOOP_BLOCKS))
        tables, info = publish_prompts(tables, token_ids, tables.seq_lens)
        assert int(info.status) == 0

        def append_and_publish(tables: BlockTables, step: jax.Array) -> tuple[BlockTables, jax.Array]:
            tables, status = append(tables, step)
            tables, info = publish(tables, token_ids, tables.seq_lens)
            return tables, status | info.status

        def publish_nothing(tables: BlockTables, _: jax.Array) -> tuple[BlockTables, jax.Array]:
            tables, info = publish(tables, token_ids, tables.seq_lens)
            return tables, info.status

        def lookup(tables: BlockTables, step: jax.Array) -> tuple[BlockTables, jax.Array]:
            cache, line = tables.pool.prefix_cache, token_ids[step, :LOOP_PROMPT]
            assert cache is not None
            hit = _look_up(cache, line, jnp.int32(LOOP_PROMPT), jnp.int32(0))
            return tables, hit.chain.num_blocks - (LOOP_PROMPT - 1) // BLOCK_SIZE

        loops |= {
            "append and cache_full_blocks, 4 of 64 new": append_and_publish,
            "cache_full_blocks, none new": publish_nothing,
            "lookup of 512 tokens": lookup,
        }
    lines = []
    for name, transition in loops.items():
        loop = jax.jit(functools.partial(_loop, transition))
        runs = []
        for _ in range(repeats + 3):
            us, wrong = timed(functools.partial(loop, tables))
            assert int(wrong[1]) == 0
            runs.append(us / LOOP_STEPS)
        lines.append({"operation": f"in a loop: {name}", "in_loop_us": record.spread(runs[3:])})
    return lines


def _publish(tables: BlockTables, token_ids: jax.Array, num_tokens: jax.Array, *, max_blocks: int) -> Any:
    return block_table.cache_full_blocks(
        tables, lambda row, position: token_ids[row, position], num_tokens, max_blocks=max_blocks
    )


def _look_up(cache: PrefixCache, line: jax.Array, num_tokens: jax.Array, salt: jax.Array) -> Hit:
    return prefix_cache.lookup(cache, lambda at: line[at], num_tokens, salt, max_tokens=line.shape[0])


def _loop(
    transition: Callable[[BlockTables, jax.Array], tuple[BlockTables, jax.Array]], tables: BlockTables
) -> tuple[BlockTables, jax.Array]:
    """Return the tables after LOOP_STEPS transitions, and 0 if each returned 0."""
    type Carry = tuple[jax.Array, BlockTables, jax.Array]

    def body(carry: Carry) -> Carry:
        step, tables, wrong = carry
        tables, status = transition(tables, step)
        return step + 1, tables, wrong | status

    start = (jnp.int32(0), tables, jnp.int32(0))
    return lax.while_loop(lambda carry: carry[0] < LOOP_STEPS, body, start)[1:]


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
        self.commit = jax.jit(functools.partial(_publish, max_blocks=MAX_BLOCKS_PER_ROW), donate_argnums=0)
        self.lookup = jax.jit(_look_up)
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

    def time_oracle_append(self) -> float:
        requests = self._begin(np.asarray(self.first_lens).tolist())
        us = []
        for _ in range(STEPS):
            for request in requests:
                request.append_output_token_ids(0)
            us.append(
                timed(lambda: [self.manager.allocate_slots(r, 1, delay_cache_blocks=True) for r in requests])[
                    0
                ]
            )
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


if __name__ == "__main__":
    app.run(main)
