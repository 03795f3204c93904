"""Subjects of a lock-step: our own block tables, or a user's functional allocator."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.memory import block_pool, block_table, policies, prefix_cache, swap
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.invariants import check_invariants, free_block_ids
from jaxpaged.memory.policies import Policy
from jaxpaged.research.verify import hints, quick
from jaxpaged.research.verify.history import MAX_BLOCKS, MAX_SEQS, Disagreement, Unusable

VERBS = (
    "append", "fork", "free", "truncate", "window", "swap_out", "free_blocks", "lookup", "adopt", "commit",
    "touch", "evict", "reset_cache",
)  # fmt: skip


def tokens_of(token_ids: Any) -> Callable[..., jax.Array]:
    """Return a function that gives the prefix cache an array's tokens: by position, or by row and
    position.
    """
    return lambda *at: jnp.asarray(token_ids)[at]


def look_up(cache: prefix_cache.PrefixCache, line: Any, num_tokens: Any, salt: Any) -> prefix_cache.Hit:
    return prefix_cache.lookup(cache, tokens_of(line), num_tokens, salt, max_tokens=len(line))


def commit(tables: BlockTables, token_ids: Any, num_tokens: Any, *, max_blocks: int) -> Any:
    return block_table.cache_full_blocks(tables, tokens_of(token_ids), num_tokens, max_blocks=max_blocks)


def transitions(policy: Policy) -> dict[str, Callable[..., Any]]:
    """Return every verb with its static sizes, one shape each."""

    def on_pool(verb: Callable[..., Any]) -> Callable[..., Any]:
        def run(tables: BlockTables, *args: Any) -> Any:
            pool, info = verb(tables.pool, *args)
            return dataclasses.replace(tables, pool=pool), info

        return run

    verbs: dict[str, Callable[..., Any]] = {
        "append": functools.partial(block_table.append, max_new_blocks=MAX_SEQS * MAX_BLOCKS),
        "fork": block_table.fork,
        "free": block_table.free_rows,
        "truncate": block_table.truncate,
        "window": block_table.slide_window,
        "swap_out": swap.swap_out,
        "free_blocks": on_pool(block_pool.free),
    }
    if policy.keeps_content:
        verbs |= {
            "lookup": lambda tables, *args: look_up(tables.pool.prefix_cache, *args),
            "adopt": block_table.adopt,
            "commit": functools.partial(commit, max_blocks=MAX_SEQS * MAX_BLOCKS),
            "touch": on_pool(block_pool.touch),
            "evict": on_pool(block_pool.evict),
            "reset_cache": on_pool(block_pool.reset_prefix_cache),
        }
    return verbs


class Traced:
    """Transitions under jit, once for each shape, with the number of times each was traced."""

    def __init__(self, policy: Policy) -> None:
        self.num_traces: dict[str, int] = {}
        self.verbs = {name: quick.jit(self._count(name, verb)) for name, verb in transitions(policy).items()}

    def _count(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.num_traces[name] = self.num_traces.get(name, 0) + 1
            return verb(*args)

        return counted


@functools.cache
def jitted(policy: str | Policy, block_size: int, collide: bool = False) -> Traced:
    return Traced(policies.named(policy) if isinstance(policy, str) else policy)


def same_hash(token_ids: jax.Array, index: jax.Array) -> jax.Array:
    """Return the worst hash: all blocks fall into two buckets, which hold enough for all."""
    return jnp.broadcast_to(jnp.array([0, 1], jnp.uint32), (*index.shape, 2)) * (index == -1)[..., None]


def _eager(verb: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return verb(*jax.tree.map(jnp.asarray, args))

    return run


def values(state: Any) -> list[bytes]:
    """Return the bytes of all arrays in a state of pytrees and other dataclasses."""
    leaves = [vars(leaf) if dataclasses.is_dataclass(leaf) else leaf for leaf in jax.tree.leaves(state)]
    return [np.asarray(leaf).tobytes() for leaf in jax.device_get(jax.tree.leaves(leaves))]


class AllocStatus(enum.IntEnum):
    """Answers of `can_allocate`: now; not now, but when all blocks are free; not even then."""

    OK = 0
    LATER = 1
    NEVER = 2


def can_allocate(pool: block_pool.BlockPool, count: int, watermark_blocks: int = 0) -> AllocStatus:
    """Return whether `count` blocks can be taken so that `watermark_blocks` stay free."""
    if pool.num_blocks - 1 - count < watermark_blocks:
        return AllocStatus.NEVER
    return AllocStatus.LATER if pool.num_free - count < watermark_blocks else AllocStatus.OK


class Seen(NamedTuple):
    """View of functional tables; None for what they do not show."""

    block_tables: Any  # [max_seqs, max_blocks_per_seq] block ids
    seq_lens: Any  # [max_seqs] tokens
    ref_count: Any = None  # [num_blocks] holders
    free: list[int] | None = None  # free blocks, in the order in which they will be given out
    usage: float | None = None  # the share of blocks in use, the null block apart
    contents: list[list[int]] | None = None  # the blocks of each content that can be found, oldest first


class Ours:
    """Our own tables of a policy, as `Lockstep` drives them."""

    def __init__(self, policy: Policy, block_size: int, use_jit: bool, collide: bool) -> None:
        self.policy, self.block_size = policy, block_size
        self.hash_fn = same_hash if collide else prefix_cache.hash_block
        key = policy.name if policies.POLICIES.get(policy.name) is policy else policy
        self.verbs = (
            jitted(key, block_size, collide).verbs
            if use_jit
            else {name: _eager(verb) for name, verb in transitions(policy).items()}
        )

    def create(self, num_blocks: int) -> BlockTables:
        cache = None
        if self.policy.keeps_content:
            cache = prefix_cache.create(num_blocks, self.block_size, self.hash_fn)
        pool = block_pool.create(num_blocks, self.policy, prefix_cache=cache)
        return block_table.create(pool, MAX_SEQS, MAX_BLOCKS, self.block_size)

    def observe(self, tables: BlockTables) -> Seen:
        pool = jax.device_get(tables.pool)
        return Seen(
            np.asarray(tables.block_tables),
            np.asarray(tables.seq_lens),
            tables.pool.ref_count,
            free_block_ids(pool),
            1 - int(tables.pool.num_free) / (pool.num_blocks - 1),
            None if pool.prefix_cache is None else contents(pool.prefix_cache),
        )

    def check(self, tables: BlockTables) -> None:
        check_invariants(tables)

    def can_allocate(self, tables: BlockTables, count: Any, watermark_blocks: int) -> int:
        return can_allocate(tables.pool, int(count), watermark_blocks)


class Theirs:
    """Somebody's functional allocator: an object with `create`, `observe` and verbs of `Lockstep`'s names.

    `create(num_blocks, max_seqs, max_blocks_per_seq, block_size)` makes a state; block 0 is the null block,
    with which tables are padded. `observe(state)` gives a mapping or an object with what of `Seen` there is.
    Verbs take NumPy arrays, and give back the new state and an info with `status` and what `Lockstep` reads
    besides; a verb that there is not, or `can_allocate(state, count, watermark_blocks)`, is not asked for.
    """

    def __init__(self, functions: Any, block_size: int) -> None:
        self.functions, self.block_size = functions, block_size
        for name in ("create", "observe"):
            if not callable(getattr(functions, name, None)):
                raise Unusable(f"the allocator has no function {name}")
        functions_of_verbs = {name: getattr(functions, name, None) for name in VERBS}
        self.verbs = {
            name: self._caught(name, verb) for name, verb in functions_of_verbs.items() if callable(verb)
        }
        if hasattr(functions, "can_allocate"):
            self.can_allocate = functions.can_allocate

    def _caught(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            try:
                return verb(*args)
            except Exception as error:  # whatever a user's functions raise
                raise Disagreement(f"{name} raises {hints.raised(error)}") from error

        return run

    def check(self, state: Any) -> None:
        """Check the user's own invariants, if there is a `check(state)`, which raises."""
        getattr(self.functions, "check", lambda state: None)(state)

    def create(self, num_blocks: int) -> Any:
        sizes = (num_blocks, MAX_SEQS, MAX_BLOCKS, self.block_size)
        try:
            return self.functions.create(*sizes)
        except Exception as error:  # whatever a user's functions raise
            reason = hints.raised(error)
            raise Unusable(f"a state cannot be made: create{sizes} raises {reason}") from error

    def observe(self, state: Any) -> Seen:
        seen = self._caught("observe", self.functions.observe)(state)
        given = seen if isinstance(seen, Mapping) else {n: getattr(seen, n, None) for n in Seen._fields}
        arrays = {name: np.asarray(given[name]) for name in ("block_tables", "seq_lens")}
        return Seen(**dict(given) | arrays)


def contents(cache: prefix_cache.PrefixCache) -> list[list[int]]:
    """Return the blocks of each node, oldest first."""
    last, after = np.asarray(cache.last), np.asarray(cache.neighbours)[:, 0]
    rings = []
    for block_id in last[last != 0]:
        ring = [int(after[block_id])]
        while ring[-1] != block_id:
            ring.append(int(after[ring[-1]]))
        rings.append(ring)
    return sorted(rings)
