"""Eviction policies of anybody's: in compiled block tables they must take the blocks that plain Python takes.

The oracle is a class with the methods of `reference.eviction.Policy`. Without one, the functions of a
`Ranking` are called for one block at a time over plain lists. This finds functions that look at other blocks
of a call, at the order of its ids, or at the queue's clock in place of their arguments.

verify_policy(MY_RANKING)
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.memory import eviction
from jaxpaged.memory.policies import Policy
from jaxpaged.memory.ranked_queue import WITHOUT_CONTENT, RankedQueue, Ranking
from jaxpaged.research.lab import loop
from jaxpaged.research.verify.oracles import eviction as oracles
from jaxpaged.research.verify.oracles.prompts import Prompts

NUM_BLOCKS = 17  # of all pools, so that all share one program; the null block included
LONGEST = 6  # blocks of a prompt
NUM_ROWS = 2  # prompts that hold their blocks at the same time
MOST_PARENTS = 3  # prompts that share a beginning


@dataclasses.dataclass(frozen=True)
class PolicyReport:
    """Results of a policy over random traces."""

    name: str
    by: str  # what it was compared with
    num_traces: int
    num_requests: int
    num_hits: int  # blocks
    num_evictions: int
    broken: str | None = None  # a sentence on the first trace that fails, the shortest traces first

    @property
    def ok(self) -> bool:
        """Whether blocks were evicted and found, and all were the right ones."""
        return self.broken is None and self.num_hits > 0 and self.num_evictions > 0

    def __str__(self) -> str:
        line = (
            f"{self.name}: {self.num_traces} traces of {self.num_requests} prompts, {self.num_hits} blocks "
            f"hit, {self.num_evictions} evicted, compared with {self.by}"
        )
        return line if self.broken is None else f"{line}\nFAILED {self.broken}"


class OneByOne:
    """A ranking's functions, for one block at a time, over plain lists in place of the tournament."""

    def __init__(self, ranking: Ranking, num_blocks: int) -> None:
        self.ranking = ranking
        zeros = np.zeros(num_blocks, np.int32)
        self.rank = np.stack([zeros - WITHOUT_CONTENT, np.arange(num_blocks, dtype=np.int32)], axis=1)
        self.kind, self.notes = zeros.copy(), np.zeros((num_blocks, 5), np.int32)
        self.floor, self.now = 0, num_blocks
        self.free_blocks = list(range(1, num_blocks))
        self.has_content: set[int] = set()

    def queue(self) -> RankedQueue:
        """Return the queue as the ranking's functions see it."""
        counts = [self._count(kind) for kind in range(self.ranking.num_kinds)]
        nothing = jnp.zeros(0, jnp.int32)
        return RankedQueue(
            ring=nothing,
            place=nothing,
            counters=jnp.array([0, 0, len(self.free_blocks)], jnp.int32),
            rank=jnp.asarray(self.rank),
            kind=jnp.asarray(self.kind),
            winners=jnp.zeros((0, self.ranking.num_kinds), jnp.int32),
            notes=jnp.asarray(self.notes),
            clock=jnp.array([self.floor, self.now], jnp.int32),
            num_queued=jnp.array(counts, jnp.int32),
            marks=nothing,
        )

    def _count(self, kind: int) -> int:
        return sum(self.kind[block] == kind for block in self.free_blocks if block in self.has_content)

    def _first(self, kind: int) -> int:
        """Return the first free block of a kind in rank; 0 if there is none."""
        blocks_of_kind = [block for block in self.free_blocks if self.kind[block] == kind]
        return min(
            blocks_of_kind,
            key=lambda block: (self.rank[block, 0] - self.floor, self.rank[block, 1]),
            default=0,
        )

    def take(self) -> int:
        """Take the first block that is not spared."""
        ranking = self.ranking
        while True:
            heads = [self._first(kind) for kind in range(ranking.num_kinds)]
            kind = 0
            if ranking.choose is not None:
                kind = int(ranking.choose(self.queue(), jnp.array(heads, jnp.int32)))
            block = heads[kind]
            is_full = block in self.has_content
            if is_full and ranking.spare is not None:
                spared, rank, new_kind, hits = ranking.spare(self.queue(), jnp.int32(block))
                if bool(spared):
                    self.rank[block], self.kind[block] = np.asarray(rank), int(new_kind)
                    self.notes[block, RankedQueue.HITS] = int(hits)
                    self.now += 1
                    continue
            self.free_blocks.remove(block)
            self.has_content.discard(block)
            if is_full:
                self.floor = int(self.rank[block, 0])
                if ranking.floor_follows_lowest and (lowest := self._first(0)) in self.has_content:
                    self.floor = max(self.floor, int(self.rank[lowest, 0]))
            self.kind[block], self.notes[block] = 0, 0
            return block

    def publish(self, block: int, depth: int, content: int) -> None:
        """Note that a block, which is held, has content."""
        self.notes[block] = (0, 0, depth + 1, content, 0)

    def hit(self, block: int) -> None:
        """Note that a block was found."""
        self.notes[block, RankedQueue.HITS] += 1

    def revive(self, block: int) -> None:
        """Take a block that was found out of the queue."""
        self.free_blocks.remove(block)
        self.has_content.discard(block)

    def free(self, blocks: Sequence[tuple[int, bool]]) -> None:
        """Give blocks back, those with content first."""
        for block in [block for block, has_content in blocks if has_content]:
            queue, now = self.queue(), self.now + 1
            is_first = not self.notes[block, RankedQueue.BORN]
            if is_first:
                self.notes[block, RankedQueue.BORN] = now
                queue = self.queue()
            ids, nows = jnp.array([block], jnp.int32), jnp.array([now], jnp.int32)
            major, minor = self.ranking.rank(queue, ids, jnp.array([is_first]), nows)
            self.rank[block] = int(major[0]), int(minor[0])
            self.now = now
            self.free_blocks.append(block)
            self.has_content.add(block)
        for block in [block for block, has_content in blocks if not has_content]:
            self.now += 1
            self.rank[block], self.kind[block] = (self.floor - WITHOUT_CONTENT, self.now), 0
            self.free_blocks.append(block)


def verify_policy(
    asked: Any,
    oracle: Callable[[int], Any] | None = None,
    *,
    name: str | None = None,
    traces: int = 20,
    requests: int = 40,
    seed: int = 0,
) -> PolicyReport:
    """Send random prompts through block tables under a policy, and through plain Python beside them.

    Args:
        asked: a `Policy`, a `Ranking`, or "package.module:Name" of one.
        oracle: a class of the number of blocks, with `take`, `publish`, `hit`, `revive` and `free`; None: the
            ranking's own functions, for one block at a time.

    Raises: InputError for a policy that is neither a ranking nor has an oracle.
    """
    policy = eviction.named(asked)
    make = oracle or _one_by_one(policy)
    counts, broken = [0, 0], None
    for number in range(traces):
        # Short traces first, so that the first that fails is one of the shortest.
        length = 4 + (requests - 4) * number // max(traces - 1, 1)
        broken = _differs(policy, make, np.random.default_rng((seed, number)), length, counts)
        if broken is not None:
            break
    by = "its oracle" if oracle is not None else "its own functions, a block at a time"
    return PolicyReport(name or policy.name, by, traces, requests, counts[0], counts[1], broken)


def _is_plain(policy: Policy, ranking: Ranking) -> bool:
    """Return whether a policy consists of its ranking alone, without functions of its own."""
    made = eviction.policy("", ranking)
    same = ("take", "remove", "note_hits", "note_content", "note_waiting", "sweeps")
    return str([getattr(policy, name) for name in same]) == str([getattr(made, name) for name in same])


def _one_by_one(policy: Policy) -> Callable[[int], Any]:
    if policy.name in oracles.POLICIES:
        return oracles.POLICIES[policy.name]
    ranking = getattr(policy.new_queue, "keywords", {}).get("ranking")
    if isinstance(ranking, Ranking) and ranking.memory is None and _is_plain(policy, ranking):
        return lambda num_blocks: OneByOne(ranking, num_blocks)
    raise InputError(f"policy {policy.name!r} must be a Ranking, or have an oracle: --oracle MODULE:CLASS")


def prompts(rng: np.random.Generator, length: int) -> Iterator[list[int]]:
    """Yield prompts of up to LONGEST symbols, many of which begin as an earlier one."""
    earlier: list[list[int]] = []
    for _ in range(length):
        begin: list[int] = []
        if earlier and rng.random() < 0.7:
            old = earlier[rng.integers(max(0, len(earlier) - 2 * MOST_PARENTS), len(earlier))]
            begin = old[: rng.integers(1, len(old) + 1)]
        prompt = [*begin, *rng.integers(0, 50, LONGEST).tolist()][: rng.integers(1, LONGEST + 1)]
        earlier.append(prompt)
        yield prompt


def _differs(
    policy: Policy, make: Callable[[int], Any], rng: np.random.Generator, length: int, counts: list[int]
) -> str | None:
    """Return where a trace's blocks differ, in a sentence; None if they do not. Add hits and evictions."""
    usable = int(rng.integers(2 * LONGEST, NUM_BLOCKS))
    cache = loop.create(
        np.int32(usable), policy=policy, num_blocks=NUM_BLOCKS, max_blocks=LONGEST, num_rows=NUM_ROWS
    )
    names: dict[tuple[int, ...], int] = {}
    plain = Prompts(
        make(usable + 1),
        usable + 1,
        NUM_ROWS,
        lambda symbols: names.setdefault(tuple(symbols), len(names) + 1),
    )
    offset, sent = NUM_BLOCKS - 1 - usable, list[list[int]]()
    for number, prompt in enumerate(prompts(rng, length), start=1):
        sent.append(prompt)
        had = len(plain.node_of)
        want = plain.send(prompt, len(prompt) - 1, len(prompt))
        symbols = np.pad(np.array(prompt, np.int32), (0, LONGEST - len(prompt)))
        one = [0, len(prompt), len(prompt) - 1, len(prompt), number]
        request = loop.Requests(*(jnp.array([each], jnp.int32) for each in one))
        row = int(cache.next_row)
        cache, hits = loop.replay(cache, jnp.asarray(symbols), None, request)
        counts[0] += want
        counts[1] += had + len(prompt) - want - len(plain.node_of)
        where = f"with {usable} blocks, prompt {number} of {sent}"
        if status := int(cache.status):
            return f"{where} ends with status {status}, and must with 0"
        got = np.asarray(cache.tables.block_tables)[row][: len(prompt)] - offset
        for place, (block, right) in enumerate(zip(got.tolist(), plain.rows[-1], strict=True)):
            if block != right:
                what = "finds" if place < want else "takes"
                return f"{where} {what} block {block} for its symbol {place}, and must take block {right}"
        if int(hits[0]) != want:
            return f"{where} hits {int(hits[0])} blocks, and must hit {want}"
    return None
