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

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from benchmarks import record
from benchmarks.allocator_subjects import BLOCK_SIZE, NUM_ROWS, SUBJECTS, look_up, publish, timed
from jaxpaged.memory import block_pool, block_table, policies, prefix_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.policies import POLICIES, Policy

_POLICY = flags.DEFINE_multi_enum("policy", [*POLICIES], [*POLICIES], "A policy; may be given several times.")
_NUM_BLOCKS = flags.DEFINE_multi_integer(
    "num_blocks", [1024, 65536, 1048576], "Blocks of a pool; may be given several times."
)
_REPEATS = flags.DEFINE_integer("repeats", 30, "Runs that are counted.", lower_bound=1)
_ASYNC_DISPATCH = flags.DEFINE_boolean("async_dispatch", False, "Leave dispatching on a CPU as JAX has it.")

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
    results = record.Results(
        "allocator",
        device=jax.devices()[0].device_kind,
        block_size=BLOCK_SIZE,
        async_dispatch=_ASYNC_DISPATCH.value,
    )
    for policy in map(policies.named, _POLICY.value):
        append_us = {}
        for line in measure_loops(policy, _REPEATS.value):
            shape = {
                "policy": policy.name,
                "num_blocks": LOOP_BLOCKS,
                "num_rows": LOOP_ROWS,
                "num_seqs": LOOP_SEQS,
            }
            results.put(shape | line)
        for num_blocks in _NUM_BLOCKS.value:
            for line in measure(policy, num_blocks, _REPEATS.value):
                if line["operation"] == "append":
                    append_us[num_blocks] = line["us"]["median"], line["in_loop_us"]["median"]
                shape = {"policy": policy.name, "num_blocks": num_blocks, "num_rows": NUM_ROWS}
                results.put(shape | line)
        smallest, largest = append_us[min(append_us)], append_us[max(append_us)]
        growth = [round(b / a, 2) for a, b in zip(smallest, largest, strict=True)]
        line = {"operation": "append", "growth": dict(zip(["us", "in_loop_us"], growth, strict=True))}
        results.put({"policy": policy.name, "num_blocks": [*append_us]} | line)


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
        publish_new = functools.partial(publish, max_blocks=LOOP_SEQS)
        publish_prompts = jax.jit(functools.partial(publish, max_blocks=LOOP_BLOCKS))
        tables, info = publish_prompts(tables, token_ids, tables.seq_lens)
        assert int(info.status) == 0

        def append_and_publish(tables: BlockTables, step: jax.Array) -> tuple[BlockTables, jax.Array]:
            tables, status = append(tables, step)
            tables, info = publish_new(tables, token_ids, tables.seq_lens)
            return tables, status | info.status

        def publish_nothing(tables: BlockTables, _: jax.Array) -> tuple[BlockTables, jax.Array]:
            tables, info = publish_new(tables, token_ids, tables.seq_lens)
            return tables, info.status

        def lookup(tables: BlockTables, step: jax.Array) -> tuple[BlockTables, jax.Array]:
            cache, line = tables.pool.prefix_cache, token_ids[step, :LOOP_PROMPT]
            assert cache is not None
            hit = look_up(cache, line, jnp.int32(LOOP_PROMPT), jnp.int32(0))
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


if __name__ == "__main__":
    app.run(main)
