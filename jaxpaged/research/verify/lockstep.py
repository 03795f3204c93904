"""Functional block tables and their oracle, driven through one history, compared at every step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.memory import policies, prefix_cache
from jaxpaged.memory.policies import Policy
from jaxpaged.research.verify import hints
from jaxpaged.research.verify.generations import ORACLES, Refused
from jaxpaged.research.verify.history import (
    MAX_BLOCKS,
    MAX_EVICTED,
    MAX_SEQS,
    NUM_BLOCKS,
    Disagreement,
    History,
)
from jaxpaged.research.verify.subjects import AllocStatus, Ours, Seen, Theirs, values
from jaxpaged.status import Status

NUM_HOST_BLOCKS = NUM_BLOCKS  # the same shape: nothing is compiled twice
# What of a subject's verbs each verb of a history needs, if not itself.
NEEDS = {
    "free_host": ("swap_out", "free"),
    "free_twice": ("free_blocks",),
    "swap_in": ("swap_out",),
    "can_allocate": (),
    "reset": ("free",),
    "admit": ("lookup", "adopt", "append"),
    "touch": ("touch", "free_blocks"),
}


class Lockstep(History):
    """History of calls that is made on functions and on their oracle in lockstep. Every verb returns whether
    it was done (False: both refused).
    """

    def __init__(
        self,
        policy: str | Policy,
        block_size: int,
        use_jit: bool = True,
        collide: bool = False,
        save: bool = True,
        theirs: Any = None,
        path: str | None = None,
        oracle: str | None = None,
    ) -> None:
        """Start a history of functional tables beside their oracle.

        `collide`: every hash is the same. `save`: write the history to a file when it fails.

        `theirs`: a functional allocator to be driven in the place of our own, `path` is its MODULE:NAME.
        `oracle`: the policy whose oracle it is to equal, if not that of its own name.
        """
        self.policy = policies.named(policy) if isinstance(policy, str) else policy
        made_with = {"policy": self.policy.name, "block_size": block_size}
        if path is not None:
            made_with |= {"as": "policy", "path": path, "oracle": oracle or self.policy.name}
        else:
            made_with |= {"use_jit": use_jit, "collide": collide}
        super().__init__(made_with, f"{self.policy.name}-{block_size}", save)
        self.collide, self.block_size = collide, block_size
        self.subject: Any = (
            Ours(self.policy, block_size, use_jit, collide) if theirs is None else Theirs(theirs, block_size)
        )
        self.verbs = self.subject.verbs
        self.device, self.host = (self.subject.create(num) for num in (NUM_BLOCKS, NUM_HOST_BLOCKS))
        self.oracle: Any = ORACLES[oracle or self.policy.name](
            block_size, NUM_BLOCKS, NUM_HOST_BLOCKS, MAX_BLOCKS
        )
        self.compare()

    def has(self, verb: str) -> bool:
        if verb == "can_allocate":
            return hasattr(self.subject, verb)
        return all(need in self.verbs for need in NEEDS.get(verb, (verb,)))

    @property
    def keeps_content(self) -> bool:
        return self.policy.keeps_content

    # One step: a history's line.

    def step(self, verb: str, *args: Any) -> bool:
        """Do one verb on both sides and compare everything."""
        before = self.device, self.host
        as_before = values(before)
        done = getattr(self, verb)(*args)
        self.compare()
        if as_before != values(before):
            raise Disagreement(f"{verb} changed the value that it was given")
        if not done and as_before != values((self.device, self.host)):
            raise Disagreement(f"{verb} was refused, but changed the state")
        return done

    def shown(self) -> str:
        seen = self.subject.observe(self.device)
        return f"{np.asarray(seen.block_tables).tolist()} {np.asarray(seen.seq_lens).tolist()}"

    def _expect(self, status: Any, expected: Status, verb: str) -> bool:
        actual = Status(int(status))
        if actual != expected:
            raise Disagreement(f"{verb}: the status is {actual.name} and must be {expected.name}")
        return expected == Status.OK

    def _on_oracle(self, do: Callable[[Any], Any]) -> tuple[Status, Any]:
        """Apply a change to a copy of the oracle; keep the copy if nothing was refused."""
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
            self._alike(
                f"append: copy {{}} for row {row}",
                got=[pair] if any(pair) else [],
                want=pairs.get(row) or [],
                tell=hints.copies,
            )
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
            raise Disagreement(f"free: the number of freed blocks is {info.num_freed} and must be {freed}")
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
        ids = np.asarray(self.subject.observe(self.device).block_tables)[row]
        times = 1 + max(self.oracle.ref_counts(on_host=False))
        expected = Status.DOUBLE_FREE if ids.any() else Status.OK
        ids = np.resize(np.tile(ids, times), (MAX_SEQS + 1) * MAX_BLOCKS)
        mask = np.arange(ids.shape[0]) < times * MAX_BLOCKS
        self.device, info = self.verbs["free_blocks"](self.device, ids, mask)
        return self._expect(info.status, expected, "free_blocks")

    def truncate(self, num_tokens: list[int]) -> bool:
        held = self._num_held()
        skipped = {row: self.oracle.table(row).count(0) * self.block_size for row in held}
        cuts_window = any(
            0 < held.get(row, 0) - num < skipped.get(row, 0) for row, num in enumerate(num_tokens)
        )
        return self._by_numbers("truncate", num_tokens, cuts_window or self._too_few(num_tokens))

    def window(self, num_skipped_tokens: list[int]) -> bool:
        return self._by_numbers("window", num_skipped_tokens, self._too_few(num_skipped_tokens))

    def _num_held(self) -> dict[int, int]:
        return {row: len(self.oracle.tokens[row]) for row in self.oracle.device_rows()}

    def _too_few(self, numbers: list[int]) -> bool:
        held = self._num_held()
        return any(num > held.get(row, 0) for row, num in enumerate(numbers))

    def _by_numbers(self, verb: str, numbers: list[int], too_few: bool, *more: Any) -> bool:
        """Run a verb that takes a number of each row's tokens, and expect a refusal if a row has fewer."""
        self.device, info = self.verbs[verb](self.device, *more, np.array(numbers, np.int32))
        if not self._expect(info.status, Status.TOO_FEW_TOKENS if too_few else Status.OK, verb):
            return False
        for row, num in enumerate(numbers):
            if num:
                getattr(self.oracle, verb)(row, num)
        return True

    def swap_out(self, rows: list[int]) -> bool:
        rows = [row for row in rows if row in self.oracle.device_rows()]
        return self._swap("swap_out", rows)

    def swap_in(self, rows: list[int]) -> bool:
        rows = [row for row in rows if row in self.oracle.on_host]
        if rows and hasattr(self.oracle, "can_swap_in") and self.has("can_allocate"):
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
        copies = [(int(a), int(b)) for a, b in zip(info.sources, info.destinations, strict=True) if a]
        self._alike(f"{verb}: copy {{}}", copies, pairs, tell=hints.copies)
        return True

    def _compare_can_swap_in(self, rows: list[int]) -> None:
        """Compare the answer of `can_allocate` for swapping rows in: v0 wants their blocks, and one more for
        each row.
        """
        count = len({block for row in rows for block in self.oracle.table(row)}) + len(rows)
        alloc_status = self.subject.can_allocate(self.device, count, self.oracle.watermark_blocks)
        if (int(alloc_status) == AllocStatus.OK) != self.oracle.can_swap_in(rows):
            raise Disagreement(f"can_allocate({count}) is {alloc_status}, but can_swap_in differs")

    def can_allocate(self, num_tokens: int) -> bool:
        count = cdiv(num_tokens, self.block_size)
        alloc_status = self.subject.can_allocate(self.device, count, self.oracle.watermark_blocks)
        if int(alloc_status) != self.oracle.can_allocate(num_tokens):
            right = self.oracle.can_allocate(num_tokens).name
            raise Disagreement(f"can_allocate for {num_tokens} tokens is {alloc_status} and must be {right}")
        return True

    def reset(self) -> bool:
        """Reset the tables: `block_table.reset` frees all rows, and needs no compilation of its own."""
        everybody = self._mask(list(range(MAX_SEQS)))
        self.host, info = self.verbs["free"](self.host, everybody)
        self._expect(info.status, Status.OK, "free")
        self.device, info = self.verbs["free"](self.device, everybody)
        self._expect(info.status, Status.OK, "free")
        self.oracle.reset()
        return True

    # Verbs of the prefix cache.

    def admit(self, row: int, tokens: list[int], salt: int) -> bool:
        """Admit a prompt as an engine does: look it up, pin the blocks that are found, and allocate the
        rest.
        """
        line = np.zeros(MAX_BLOCKS * self.block_size, np.int32)
        line[: len(tokens)] = tokens
        hit = self.verbs["lookup"](self.device, line, np.int32(len(tokens)), np.int32(salt))
        num_hits = int(hit.chain.num_blocks)
        hits, want = hit.block_ids[:num_hits].tolist(), self.oracle.hits(tokens, salt)
        hits += hit.block_ids[num_hits:][hit.block_ids[num_hits:] != 0].tolist()
        self._alike("lookup: hit {}", hits, want)
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
        too_few = self._too_few(num_tokens)
        if not self.collide or too_few:
            return self._commit(num_tokens, too_few)
        # New blocks of one call that collide with each other are not cached (not all of them), so that they
        # go one by one.
        for row, num in enumerate(num_tokens):
            for n in range(self.block_size, num + 1, self.block_size):
                self._commit([n * (i == row) for i in range(MAX_SEQS)], too_few)
        return True

    def _commit(self, num_tokens: list[int], too_few: bool) -> bool:
        tokens = np.zeros((MAX_SEQS, MAX_BLOCKS * self.block_size), np.int32)
        for row, length in self._num_held().items():
            tokens[row, :length] = self.oracle.tokens[row]
        return self._by_numbers("commit", num_tokens, too_few, tokens)

    def touch(self, block_ids: list[int]) -> bool:
        """Touch blocks wherever they are: add one holder, compare, and release them again."""
        ids, mask = self._padded(block_ids)
        expected = Status.OK if all(0 <= i < NUM_BLOCKS for i in block_ids) else Status.UNKNOWN_BLOCK
        self.device, info = self.verbs["touch"](self.device, ids, mask)
        if not self._expect(info.status, expected, "touch"):
            return False
        self.oracle.touch(block_ids)
        self._compare_pool(self.subject.observe(self.device), on_host=False)
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
            seen = self.subject.observe(tables)
            self._compare_pool(seen, on_host)
            self.subject.check(tables)
            for row in range(MAX_SEQS):
                here = row in self.oracle.tokens and (row in self.oracle.on_host) == on_host
                num_tokens = len(self.oracle.tokens[row]) if here else 0
                if seen.seq_lens[row] != num_tokens:
                    raise Disagreement(
                        f"row {row} has {seen.seq_lens[row]} tokens and must have {num_tokens}"
                    )
                block_ids = seen.block_tables[row][: cdiv(num_tokens, self.block_size)].tolist()
                want = self.oracle.table(row) if here else []
                self._alike(f"entry {{}} of row {row}'s block table", block_ids, want)

    def _alike(self, what: str, got: list[Any], want: list[Any], tell: Any = hints.entries) -> None:
        """Raise `Disagreement` with the first difference of two lists, if they differ; {} in `what` stands
        for the index.
        """
        if got != want and (difference := hints.difference(tell(what, got), tell(what, want))):
            raise Disagreement(difference)

    def _compare_pool(self, seen: Seen, on_host: bool) -> None:
        num_blocks = NUM_HOST_BLOCKS if on_host else NUM_BLOCKS
        where = " on the host" if on_host else ""
        free = self.oracle.free_order(on_host)
        if seen.free is not None:
            self._alike(f"entry {{}} of the free queue{where}", list(seen.free), free)
        if seen.ref_count is not None:
            ref_counts, want = np.asarray(seen.ref_count).tolist(), self.oracle.ref_counts(on_host)
            self._alike(f"the number of holders of block {{}}{where}", ref_counts, want)
        num_used = num_blocks - 1 - len(free)
        if seen.usage is not None and not np.isclose(seen.usage, num_used / (num_blocks - 1)):
            raise Disagreement(f"usage is {seen.usage}, with {num_used} blocks in use")
        if seen.contents is not None:
            rings = [] if on_host else self.oracle.contents()
            self._alike("the list of blocks of the same content at index {}", seen.contents, rings)
