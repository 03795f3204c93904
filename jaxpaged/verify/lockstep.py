"""Functional block tables and their oracle, driven through one history side by side, compared at every step.

A history is JSON: what the two were made with, and a list of [verb, arguments]. `tests.replay` repeats one.
"""

import dataclasses
import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory import block_pool, block_table, policies, prefix_cache, swap
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.invariants import check_invariants, free_block_ids
from jaxpaged.memory.policies import Policy
from jaxpaged.status import Status
from jaxpaged.verify import quick
from jaxpaged.verify.generations import ORACLES, Refused

MAX_SEQS = 4
MAX_BLOCKS = 5  # of a row
NUM_BLOCKS = 11  # too few for four full rows
NUM_HOST_BLOCKS = NUM_BLOCKS  # the same shape: nothing is compiled twice
MAX_EVICTED = 4  # ids named in one call


class Disagreement(AssertionError):
    """The two sides differ. The message names the verb and what differs."""


def tokens_of(token_ids: Any) -> Callable[..., jax.Array]:
    """What gives the prefix cache an array's tokens: of one line by position, of several by row as well."""
    return lambda *at: jnp.asarray(token_ids)[at]


def look_up(cache: prefix_cache.PrefixCache, line: Any, num_tokens: Any, salt: Any) -> prefix_cache.Hit:
    return prefix_cache.lookup(cache, tokens_of(line), num_tokens, salt, max_tokens=len(line))


def commit(tables: BlockTables, token_ids: Any, num_tokens: Any, *, max_blocks: int) -> Any:
    return block_table.cache_full_blocks(tables, tokens_of(token_ids), num_tokens, max_blocks=max_blocks)


def transitions(policy: Policy) -> dict[str, Callable[..., Any]]:
    """Every verb with its static sizes, each of which makes one shape."""

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
def jitted(policy: str, block_size: int, collide: bool = False) -> Traced:
    return Traced(policies.named(policy))


def same_hash(token_ids: jax.Array, index: jax.Array) -> jax.Array:
    """The worst hash there is; as its words differ it has two buckets, enough for all blocks."""
    return jnp.broadcast_to(jnp.array([0, 1], jnp.uint32), (*index.shape, 2)) * (index == -1)[..., None]


def _eager(verb: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return verb(*jax.tree.map(jnp.asarray, args))

    return run


class Lockstep:
    """One history under way. Every verb returns whether it was done (False: both refused)."""

    def __init__(
        self, policy: str, block_size: int, use_jit: bool = True, collide: bool = False, save: bool = True
    ) -> None:
        """`collide`: every hash is the same. `save`: write the history down when it fails."""
        self.made_with = {"policy": policy, "block_size": block_size, "use_jit": use_jit, "collide": collide}
        self.save_failures, self.collide = save, collide
        self.history: list[tuple[str, list[Any]]] = []
        self.policy, self.block_size, self.use_jit = policies.named(policy), block_size, use_jit
        hash_fn = same_hash if collide else prefix_cache.hash_block
        cache = None
        if self.policy.keeps_content:
            cache = prefix_cache.create(NUM_BLOCKS, block_size, hash_fn)
        self.device, self.host = (
            block_table.create(
                block_pool.create(num_blocks, self.policy, prefix_cache=cache),
                MAX_SEQS,
                MAX_BLOCKS,
                block_size,
            )
            for num_blocks in (NUM_BLOCKS, NUM_HOST_BLOCKS)
        )
        self.oracle: Any = ORACLES[policy](block_size, NUM_BLOCKS, NUM_HOST_BLOCKS, MAX_BLOCKS)
        verbs = transitions(self.policy)
        self.verbs = (
            jitted(policy, block_size, collide).verbs if use_jit else {k: _eager(v) for k, v in verbs.items()}
        )
        self.compare()

    # One step: a history's line.

    def run(self, verb: str, *args: Any) -> bool:
        """Do one verb on both sides and compare everything; on disagreement, save the history."""
        self.history.append((verb, list(args)))
        before = jax.tree.leaves((self.device, self.host))
        values = [leaf.tobytes() for leaf in jax.device_get(before)]
        try:
            done = getattr(self, verb)(*args)
            self.compare()
            if values != [leaf.tobytes() for leaf in jax.device_get(before)]:
                raise Disagreement(f"{verb} changed the value that it was given")
            after = jax.device_get(jax.tree.leaves((self.device, self.host)))
            if not done and values != [leaf.tobytes() for leaf in after]:
                raise Disagreement(f"{verb} was refused, but changed the state")
        except Exception as error:
            if self.save_failures:
                error.add_note(f"after {verb}{tuple(args)}; python -m tests.replay {self.save()}")
            raise
        return done

    def save(self) -> pathlib.Path:
        folder = pathlib.Path(os.environ.get("JAXPAGED_TRACES", tempfile.gettempdir()))
        path = folder / f"history-{self.policy.name}-{self.block_size}-{os.getpid()}.json"
        path.write_text(json.dumps({"made_with": self.made_with, "history": self.history}))
        return path

    def _expect(self, status: Any, expected: Status, verb: str) -> bool:
        found = Status(int(status))
        if found != expected:
            raise Disagreement(f"{verb}: status is {found!r}, the oracle says {expected!r}")
        return expected == Status.OK

    def _on_oracle(self, do: Callable[[Any], Any]) -> tuple[Status, Any]:
        """Try on a copy; keep it if nothing was refused."""
        trial = self.oracle.trial()
        try:
            result = do(trial)
        except Refused as refused:
            return refused.status, None
        self.oracle = trial
        return Status.OK, result

    # The verbs. Arguments are JSON.

    def append(self, num_new_tokens: list[int], token: int) -> bool:
        rows = [row for row, num in enumerate(num_new_tokens) if num]

        def do(oracle: Any) -> dict[int, list[tuple[int, int]]]:
            return {row: oracle.append(row, [token] * num_new_tokens[row]) for row in rows}

        lengths = [len(self.oracle.tokens.get(row, [])) + num_new_tokens[row] for row in rows]
        pairs: Any
        if any(length > MAX_BLOCKS * self.block_size for length in lengths):
            expected, pairs = Status.TABLE_FULL, None
        else:
            expected, pairs = self._on_oracle(do)
        self.device, info = self.verbs["append"](self.device, np.array(num_new_tokens, np.int32))
        if not self._expect(info.status, expected, "append"):
            return False
        info = jax.device_get(info)
        for row in range(MAX_SEQS):
            pair = (int(info.copy_sources[row]), int(info.copy_destinations[row]))
            want = (pairs.get(row) or [(0, 0)])[0]
            if pair != want:
                raise Disagreement(f"append: row {row} copies {pair}, the oracle {want}")
        return True

    def fork(self, sources: list[int], destinations: list[int]) -> bool:
        known = self.oracle.device_rows()
        expected = Status.OK
        if any(row not in known for row in sources):
            expected |= Status.UNKNOWN_ROW
        if any(row in known for row in destinations) or len(set(destinations)) < len(destinations):
            expected |= Status.ROW_IN_USE
        # Two forks have one shape: the second may be masked out.
        padded = [np.array([*rows, *rows][:2], np.int32) for rows in (sources, destinations)]
        self.device, info = self.verbs["fork"](self.device, *padded, np.array([True, len(sources) > 1]))
        if not self._expect(info.status, expected, "fork"):
            return False
        for source, destination in zip(sources, destinations, strict=True):
            self.oracle.fork(source, destination)
        return True

    def free(self, rows: list[int]) -> bool:
        self.device, info = self.verbs["free"](self.device, self._mask(rows))
        self._expect(info.status, Status.OK, "free")
        free_before = len(self.oracle.free_order(on_host=False))
        for row in rows:
            if row in self.oracle.device_rows():
                self.oracle.free(row)
        freed = len(self.oracle.free_order(on_host=False)) - free_before
        if int(info.num_freed) != freed:
            raise Disagreement(f"free: {info.num_freed} blocks, the oracle {freed}")
        return True

    def free_host(self, rows: list[int]) -> bool:
        self.host, info = self.verbs["free"](self.host, self._mask(rows))
        self._expect(info.status, Status.OK, "free")
        for row in rows:
            if row in self.oracle.on_host:
                self.oracle.free(row)
        return True

    def free_twice(self, row: int) -> bool:
        """Name all blocks of a row once more than they are held."""
        ids = np.asarray(self.device.block_tables)[row]
        times = 1 + int(np.max(self.device.pool.ref_count))
        expected = Status.DOUBLE_FREE if ids.any() else Status.OK
        ids = np.resize(np.tile(ids, times), (MAX_SEQS + 1) * MAX_BLOCKS)
        mask = np.arange(ids.shape[0]) < times * MAX_BLOCKS
        self.device, info = self.verbs["free_blocks"](self.device, ids, mask)
        return self._expect(info.status, expected, "free_blocks")

    def truncate(self, num_tokens: list[int]) -> bool:
        held = {row: len(self.oracle.tokens[row]) for row in self.oracle.device_rows()}
        skipped = np.asarray(self.device.num_skipped) * self.block_size
        too_few = any(
            num > held.get(row, 0) or 0 < held.get(row, 0) - num < skipped[row]
            for row, num in enumerate(num_tokens)
        )
        self.device, info = self.verbs["truncate"](self.device, np.array(num_tokens, np.int32))
        if not self._expect(info.status, Status.TOO_FEW_TOKENS if too_few else Status.OK, "truncate"):
            return False
        for row, num in enumerate(num_tokens):
            if num:
                self.oracle.truncate(row, num)
        return True

    def window(self, num_skipped_tokens: list[int]) -> bool:
        held = {row: len(self.oracle.tokens[row]) for row in self.oracle.device_rows()}
        too_few = any(num > held.get(row, 0) for row, num in enumerate(num_skipped_tokens))
        self.device, info = self.verbs["window"](self.device, np.array(num_skipped_tokens, np.int32))
        if not self._expect(info.status, Status.TOO_FEW_TOKENS if too_few else Status.OK, "window"):
            return False
        for row, num in enumerate(num_skipped_tokens):
            if num >= self.block_size:
                self.oracle.window(row, num)
        return True

    def swap_out(self, rows: list[int]) -> bool:
        rows = [row for row in rows if row in self.oracle.device_rows()]
        return self._swap("swap_out", rows)

    def swap_in(self, rows: list[int]) -> bool:
        rows = [row for row in rows if row in self.oracle.on_host]
        if rows and hasattr(self.oracle, "can_swap_in"):
            self._compare_can_swap_in(rows)
        return self._swap("swap_in", rows)

    def _swap(self, verb: str, rows: list[int]) -> bool:
        expected, pairs = self._on_oracle(lambda oracle: getattr(oracle, verb)(rows) if rows else [])
        # `swap_in` is `swap_out` with the tables exchanged: it needs no compilation of its own.
        tables = (self.device, self.host) if verb == "swap_out" else (self.host, self.device)
        *tables, info = self.verbs["swap_out"](*tables, self._mask(rows))
        self.device, self.host = tables if verb == "swap_out" else tables[::-1]
        if not self._expect(info.status, expected, verb):
            return False
        info = jax.device_get(info)
        found = [(int(a), int(b)) for a, b in zip(info.sources, info.destinations, strict=True) if a]
        if found != pairs:
            raise Disagreement(f"{verb}: copies {found}, the oracle {pairs}")
        return True

    def _compare_can_swap_in(self, rows: list[int]) -> None:
        """v0 wants room for the blocks of these rows, and one more for each of them."""
        count = len({block for row in rows for block in self.oracle.table(row)}) + len(rows)
        found = block_pool.can_allocate(self.device.pool, jnp.int32(count), self.oracle.watermark_blocks)
        if (int(found) == block_pool.AllocStatus.OK) != self.oracle.can_swap_in(rows):
            raise Disagreement(f"can_allocate({count}) is {found}, but can_swap_in differs")

    def can_allocate(self, num_tokens: int) -> bool:
        count = jnp.int32(cdiv(num_tokens, self.block_size))
        found = block_pool.can_allocate(self.device.pool, count, self.oracle.watermark_blocks)
        if int(found) != self.oracle.can_allocate(num_tokens):
            raise Disagreement(f"can_allocate({num_tokens} tokens) is {found}")
        return True

    def reset(self) -> bool:
        """`block_table.reset` frees all rows: it needs no compilation of its own."""
        everybody = self._mask(list(range(MAX_SEQS)))
        self.host, info = self.verbs["free"](self.host, everybody)
        self._expect(info.status, Status.OK, "free")
        self.device, info = self.verbs["free"](self.device, everybody)
        self._expect(info.status, Status.OK, "free")
        self.oracle.reset()
        return True

    # With a prefix cache.

    def admit(self, row: int, tokens: list[int], salt: int) -> bool:
        """What an engine does with a new prompt: look it up, pin what is found, take blocks for the rest."""
        line = np.zeros(MAX_BLOCKS * self.block_size, np.int32)
        line[: len(tokens)] = tokens
        hit = self.verbs["lookup"](self.device, line, np.int32(len(tokens)), np.int32(salt))
        num_hits = int(hit.chain.num_blocks)
        found, want = hit.block_ids[:num_hits].tolist(), self.oracle.hits(tokens, salt)
        if found != want or hit.block_ids[num_hits:].any():
            raise Disagreement(f"lookup: finds {found}, the oracle {want}")
        if row in self.oracle.tokens:
            self.device, info = self._adopt(row, hit)
            return self._expect(info.status, Status.ROW_IN_USE, "adopt")

        expected, _ = self._on_oracle(lambda oracle: oracle.admit(row, tokens, salt))
        adopted, info = self._adopt(row, hit)
        self._expect(info.status, Status.OK, "adopt")
        num_new = np.zeros(MAX_SEQS, np.int32)
        num_new[row] = len(tokens) - num_hits * self.block_size
        admitted, info = self.verbs["append"](adopted, num_new)
        if not self._expect(info.status, expected, "admit"):
            return False  # an engine drops what it tried
        self.device = admitted
        return True

    def _adopt(self, row: int, hit: prefix_cache.Hit) -> Any:
        chain = jax.tree.map(lambda x: x[None], hit.chain)
        return self.verbs["adopt"](
            self.device, jnp.array([row]), hit.block_ids[None], chain, jnp.array([True])
        )

    def commit(self, num_tokens: list[int]) -> bool:
        held = {row: len(self.oracle.tokens[row]) for row in self.oracle.device_rows()}
        too_few = any(num > held.get(row, 0) for row, num in enumerate(num_tokens))
        if not self.collide or too_few:
            return self._commit(num_tokens)
        # New blocks of one call that collide with each other are not cached (not all of them), so that they
        # go one by one.
        for row, num in enumerate(num_tokens):
            for n in range(self.block_size, num + 1, self.block_size):
                self._commit([n * (i == row) for i in range(MAX_SEQS)])
        return True

    def _commit(self, num_tokens: list[int]) -> bool:
        tokens = np.zeros((MAX_SEQS, MAX_BLOCKS * self.block_size), np.int32)
        held = {row: self.oracle.tokens[row] for row in self.oracle.device_rows()}
        for row, line in held.items():
            tokens[row, : len(line)] = line
        too_few = any(num > len(held.get(row, [])) for row, num in enumerate(num_tokens))
        self.device, info = self.verbs["commit"](self.device, tokens, np.array(num_tokens, np.int32))
        if not self._expect(info.status, Status.TOO_FEW_TOKENS if too_few else Status.OK, "commit"):
            return False
        for row, num in enumerate(num_tokens):
            if num:
                self.oracle.commit(row, num)
        return True

    def touch(self, block_ids: list[int]) -> bool:
        """One more holder for blocks from wherever they are; compare; and let go of them again."""
        ids, mask = self._padded(block_ids)
        expected = Status.OK if all(0 <= i < NUM_BLOCKS for i in block_ids) else Status.UNKNOWN_BLOCK
        self.device, info = self.verbs["touch"](self.device, ids, mask)
        if not self._expect(info.status, expected, "touch"):
            return False
        self.oracle.touch(block_ids)
        self._compare_pool(self.device, on_host=False)
        size = (MAX_SEQS + 1) * MAX_BLOCKS
        self.device, info = self.verbs["free_blocks"](
            self.device, np.resize(ids, size), np.arange(size) < len(block_ids)
        )
        self._expect(info.status, Status.OK, "free_blocks")
        self.oracle.untouch(block_ids)
        return True

    def evict(self, block_ids: list[int]) -> bool:
        expected = Status.OK if all(0 <= i < NUM_BLOCKS for i in block_ids) else Status.UNKNOWN_BLOCK
        self.device, info = self.verbs["evict"](self.device, *self._padded(block_ids))
        if not self._expect(info.status, expected, "evict"):
            return False
        self.oracle.evict(block_ids)
        return True

    def reset_cache(self) -> bool:
        expected, _ = self._on_oracle(lambda oracle: oracle.reset_cache())
        self.device, info = self.verbs["reset_cache"](self.device)
        return self._expect(info.status, expected, "reset_cache")

    def _mask(self, rows: list[int]) -> np.ndarray:
        return np.array([row in rows for row in range(MAX_SEQS)])

    def _padded(self, block_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        padded = [*block_ids, *[0] * MAX_EVICTED][:MAX_EVICTED]
        return np.array(padded, np.int32), np.arange(MAX_EVICTED) < len(block_ids)

    # The comparison.

    def compare(self) -> None:
        for on_host in (False, True):
            tables = self.host if on_host else self.device
            self._compare_pool(tables, on_host)
            check_invariants(tables)
            seq_lens, lines = np.asarray(tables.seq_lens), np.asarray(tables.block_tables)
            for row in range(MAX_SEQS):
                here = row in self.oracle.tokens and (row in self.oracle.on_host) == on_host
                num_tokens = len(self.oracle.tokens[row]) if here else 0
                if seq_lens[row] != num_tokens:
                    raise Disagreement(f"row {row} has {seq_lens[row]} tokens, the oracle's {num_tokens}")
                found = lines[row, : cdiv(num_tokens, self.block_size)].tolist()
                want = self.oracle.table(row) if here else []
                if found != want:
                    raise Disagreement(f"row {row} holds blocks {found}, the oracle's {want}")

    def _compare_pool(self, tables: BlockTables, on_host: bool) -> None:
        pool = jax.device_get(tables.pool)
        found, want = free_block_ids(pool), self.oracle.free_order(on_host)
        if found != want:
            raise Disagreement(f"free blocks are {found}, the oracle's {want}")
        found, want = tables.pool.ref_count.tolist(), self.oracle.ref_counts(on_host)
        if found != want:
            raise Disagreement(f"reference counts are {found}, the oracle's {want}")
        num_used = pool.num_blocks - 1 - len(self.oracle.free_order(on_host))
        usage = tables.pool.usage
        if not np.isclose(usage, num_used / (pool.num_blocks - 1)):
            raise Disagreement(f"usage is {usage}, with {num_used} blocks in use")
        if pool.prefix_cache is not None:
            rings, theirs = contents(pool.prefix_cache), [] if on_host else self.oracle.contents()
            if rings != theirs:
                raise Disagreement(f"blocks of the same content are {rings}, the oracle's {theirs}")


def contents(cache: prefix_cache.PrefixCache) -> list[list[int]]:
    """The blocks of each node, oldest first."""
    last, after = np.asarray(cache.last), np.asarray(cache.neighbours)[:, 0]
    rings = []
    for block_id in last[last != 0]:
        ring = [int(after[block_id])]
        while ring[-1] != block_id:
            ring.append(int(after[ring[-1]]))
        rings.append(ring)
    return sorted(rings)
