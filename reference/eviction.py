"""Eviction policies for cached blocks, one block at a time, in plain Python.

A policy sees five things: blocks that are taken (their content is forgotten), content that is made
findable, blocks that are found again (hits), the free ones among these that leave (revived), and the blocks
of a prompt that nobody holds any more, the prompt's last first. It says which free block is taken next.

`Prompts` sends prompts through a cache under a policy, one after the other: what `jaxpaged lab` must find.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol


class Policy(Protocol):
    """Blocks 1 to `num_blocks - 1`, all of them free at first and without content."""

    def take(self) -> int: ...
    def publish(self, block: int, depth: int, content: int) -> None: ...
    def hit(self, block: int) -> None: ...
    def revive(self, block: int) -> None: ...
    def free(self, blocks: Sequence[tuple[int, bool]]) -> None: ...  # with whether each has content


class Lru:
    """The longest unused goes first, whether it has content or not: vLLM V1's."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = list(range(1, num_blocks))

    def take(self) -> int:
        return self.queue.pop(0)

    def publish(self, block: int, depth: int, content: int) -> None:
        pass

    def hit(self, block: int) -> None:
        pass

    def revive(self, block: int) -> None:
        self.queue.remove(block)

    def free(self, blocks: Sequence[tuple[int, bool]]) -> None:
        self.queue += [block for block, _ in blocks]


class LruSplit(Lru):
    """Least recently used first, after blocks without content: vLLM V1's policy since mid-2026.

    A prompt's last block, if it has no content, goes first at once.
    """

    def free(self, blocks: Sequence[tuple[int, bool]]) -> None:
        without = [block for block, has_content in blocks if not has_content]
        self.queue = without + self.queue + [block for block, has_content in blocks if has_content]


class Ranked:
    """Blocks without content first, in the order given back; the others by the number that `rank` gives."""

    def __init__(self, num_blocks: int) -> None:
        self.empty = list(range(1, num_blocks))
        self.ranks: dict[int, tuple[int, int]] = {}  # of the free ones with content
        self.hits: dict[int, int] = {}
        self.depth: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.floor = 0  # the first part of the rank of the last one taken with content
        self.now = 0

    def rank(self, block: int) -> tuple[int, int]:
        raise NotImplementedError

    def take(self) -> int:
        if self.empty:
            return self.empty.pop(0)
        block = min(self.ranks, key=self.ranks.__getitem__)
        self.floor = self.ranks.pop(block)[0]
        return block

    def publish(self, block: int, depth: int, content: int) -> None:
        self.hits[block], self.depth[block] = 0, depth
        self.born.pop(block, None)

    def hit(self, block: int) -> None:
        self.hits[block] += 1

    def revive(self, block: int) -> None:
        del self.ranks[block]

    def free(self, blocks: Sequence[tuple[int, bool]]) -> None:
        for block in [block for block, has_content in blocks if has_content]:
            self.now += 1
            self.born.setdefault(block, self.now)
            self.ranks[block] = self.rank(block)
        self.empty += [block for block, has_content in blocks if not has_content]


class Fifo(Ranked):
    """First in, first out: in the order in which blocks were first given back."""

    def rank(self, block: int) -> tuple[int, int]:
        return self.floor, self.born[block]


class Lfu(Ranked):
    """The least used first, where uses count from the floor, so that what was used long ago grows old."""

    def rank(self, block: int) -> tuple[int, int]:
        return self.floor + 1 + self.hits[block], self.now


class Depth(Ranked):
    """The deepest in their prompts first, by powers of two, with the ageing of `Lfu`."""

    def rank(self, block: int) -> tuple[int, int]:
        return self.floor + 16 - min(16, self.depth[block].bit_length()), self.now


class Sieve(Ranked):
    """SIEVE (Zhang et al., NSDI 2024): a hand goes through the blocks in the order of `Fifo`, in rounds.

    It passes over a block that was found since it came by last, and takes the first other one. New blocks lie
    behind all others. When the hand has passed the last one, it goes on with the first: new blocks are then
    of the next round.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.round: dict[int, int] = {}

    def publish(self, block: int, depth: int, content: int) -> None:
        super().publish(block, depth, content)
        self.round.pop(block, None)

    def rank(self, block: int) -> tuple[int, int]:
        return self.round.setdefault(block, self.floor), self.born[block]

    def take(self) -> int:
        while not self.empty:
            block = min(self.ranks, key=self.ranks.__getitem__)
            if not self.hits[block]:
                break
            self.hits[block] = 0
            self.round[block] += 1
            self.ranks[block] = self.rank(block)
        evicts = not self.empty
        block = super().take()
        if evicts and self.ranks:
            self.floor = max(self.floor, min(self.ranks.values())[0])
        return block


class S3Fifo(Ranked):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for new blocks, a main one for the rest.

    While more than a tenth of the free blocks with content are in the small one, its first goes, else the
    main one's. A block of the small queue that was found twice goes to the main one's end instead. A block of
    the main queue that was found goes to its end again, with a hit less of at most three. Contents that were
    evicted from the small queue are remembered: as many, the last ones, as there are free blocks with
    content. A remembered content that comes back begins in the main queue.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.is_main: dict[int, bool] = {}
        self.place: dict[int, int] = {}
        self.content: dict[int, int] = {}
        self.ghosts: dict[int, int] = {}  # the number of each content's last eviction from the small queue
        self.num_ghosts = 0

    def publish(self, block: int, depth: int, content: int) -> None:
        super().publish(block, depth, content)
        self.place.pop(block, None)
        self.content[block] = content
        oldest = self.num_ghosts - len(self.ranks)
        self.is_main[block] = content in self.ghosts and self.ghosts[content] > oldest

    def rank(self, block: int) -> tuple[int, int]:
        return 0, self.place.setdefault(block, self.now)

    def take(self) -> int:
        while not self.empty:
            small = {block: rank for block, rank in self.ranks.items() if not self.is_main[block]}
            main = {block: rank for block, rank in self.ranks.items() if self.is_main[block]}
            from_small = bool(small) and (10 * len(small) > len(self.ranks) or not main)
            queue = small if from_small else main
            block = min(queue, key=queue.__getitem__)
            hits = min(3, self.hits[block])
            if hits > (1 if from_small else 0):
                self.is_main[block] = True
                self.hits[block] = 0 if from_small else hits - 1
                self.now += 1
                self.place[block] = self.now
                self.ranks[block] = self.rank(block)
                continue
            if from_small:
                self.num_ghosts += 1
                self.ghosts[self.content[block]] = self.num_ghosts
            del self.ranks[block]
            return block
        return self.empty.pop(0)


class Belady(Ranked):
    """Farthest next use first; of several, the one unused for longest."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.next_use: dict[int, int] = {}

    def rank(self, block: int) -> tuple[int, int]:
        return -self.next_use[block], self.now


POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": Lru,
    "lru_split": LruSplit,
    "fifo": Fifo,
    "lfu": Lfu,
    "depth": Depth,
    "sieve": Sieve,
    "s3fifo": S3Fifo,
    "belady": Belady,
}


class Prompts:
    """Prompts of symbols through a cache of `num_blocks - 1` blocks; the last `num_rows` hold theirs.

    A block is found by its symbol and all before it in its prompt. When the last block with some content is
    taken, what followed it cannot be found again, even if that content returns. Of several blocks with one
    content the one cached first is found. `name_of` gives a prompt's beginning a number, for policies that
    remember content.
    """

    def __init__(
        self,
        policy: Policy,
        num_blocks: int,
        num_rows: int = 1,
        name_of: Callable[[Sequence[int]], int] = lambda symbols: 0,
    ) -> None:
        self.policy, self.name_of = policy, name_of
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]  # the one that came first first
        self.holders = [0] * num_blocks
        self.names = itertools.count(1)  # of nodes; 0 is before all prompts
        self.nodes: dict[tuple[int, int], int] = {}  # by the node before it and its symbol
        self.identity: dict[int, tuple[int, int]] = {}  # the other way round
        self.blocks: dict[int, list[int]] = {}  # of each node, the one cached first first
        self.node_of: dict[int, int] = {}  # of each block with content

    def send(
        self, symbols: Sequence[int], num_lookup: int, num_held: int, next_use: Sequence[int] = ()
    ) -> int:
        """Send one prompt through the cache; return how many of its blocks are hit.

        At most the first `num_lookup` of its symbols may be hit. `num_held` blocks are held in all, those
        beyond the symbols without content. `next_use`, of each symbol, is for `Belady`.
        """
        self._give_back(self.rows.pop(0))
        held: list[int] = []
        self.rows.append(held)
        node = 0
        for symbol in symbols[:num_lookup]:
            found = self.nodes.get((node, symbol))
            if found is None:
                break
            node = found
            held.append(self.blocks[node][0])
        num_hits = len(held)
        for block in held:
            self.policy.hit(block)
            if not self.holders[block]:
                self.policy.revive(block)
            self.holders[block] += 1
        for row in self.rows[:-1]:
            if self.holders[1:].count(0) < num_held - num_hits:
                self._give_back(row)
        for _ in range(num_held - num_hits):
            block = self.policy.take()
            self._forget(block)
            self.holders[block] = 1
            held.append(block)
        for depth in range(num_hits, len(symbols)):
            node = self._cache(held[depth], node, symbols[depth])
            self.policy.publish(held[depth], depth, self.name_of(symbols[: depth + 1]))
        if isinstance(self.policy, Belady):
            self.policy.next_use.update(zip(held, next_use, strict=False))
        return num_hits

    def _give_back(self, row: list[int]) -> None:
        for block in reversed(row):
            self.holders[block] -= 1
        free = [block for block in reversed(row) if not self.holders[block]]
        self.policy.free([(block, block in self.node_of) for block in free])
        row.clear()

    def _cache(self, block: int, before: int, symbol: int) -> int:
        node = self.nodes.get((before, symbol))
        if node is None:
            node = next(self.names)
            self.nodes[before, symbol], self.identity[node] = node, (before, symbol)
        self.blocks.setdefault(node, []).append(block)
        self.node_of[block] = node
        return node

    def _forget(self, block: int) -> None:
        node = self.node_of.pop(block, None)
        if node is not None:
            self.blocks[node].remove(block)
            if not self.blocks[node]:
                del self.blocks[node], self.nodes[self.identity.pop(node)]
