"""Eviction policies for cached blocks, one block at a time, in plain Python.

A policy sees five things: blocks that are taken (their content is forgotten), content that is made
findable, blocks that are found again (hits), the free ones among these that leave (revived), and the blocks
of a prompt that nobody holds any more, the prompt's last first. It says which free block is taken next.

`prompts.Prompts` sends prompts through a cache under a policy.
"""

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
    """Policy of vLLM V1: the least recently used block goes first, with content or without."""

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


class PlainLfu(Ranked):
    """LFU as textbooks have it: the least used first, without ageing."""

    def rank(self, block: int) -> tuple[int, int]:
        return self.hits[block], self.now


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

    While the main queue has more than nine tenths of the free blocks with content, its first goes, else the
    small one's. A block of the small queue that was found twice goes to the main one's end instead, and the
    next one of the small queue is looked at. A block of the main queue that was found goes to its end again,
    with a hit less of at most three. Contents that were evicted from the small queue are remembered, first in
    first out: nine tenths as many as there are free blocks with content. A remembered content that comes back
    begins in the main queue, and is no longer remembered. Contents beyond that number are forgotten when the
    next block is taken. When the first block with content is taken, only the first tenth of the free ones
    stay in the small queue. All this is as in the authors' simulator, libCacheSim.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.is_main: dict[int, bool] = {}
        self.place: dict[int, int] = {}
        self.content: dict[int, int] = {}
        self.ghosts: list[int] = []
        self.is_full = False  # has a block with content been taken?

    def publish(self, block: int, depth: int, content: int) -> None:
        super().publish(block, depth, content)
        self.place.pop(block, None)
        self.content[block] = content
        self.is_main[block] = content in self.ghosts
        if self.is_main[block]:
            self.ghosts.remove(content)

    def rank(self, block: int) -> tuple[int, int]:
        return 0, self.place.setdefault(block, self.now)

    def take(self) -> int:
        if self.empty:
            return self.empty.pop(0)
        num_free = len(self.ranks)
        if not self.is_full:
            self.is_full = True
            for block in sorted(self.ranks, key=self.ranks.__getitem__)[num_free // 10 :]:
                self.is_main[block] = True
        del self.ghosts[: max(0, len(self.ghosts) - 9 * num_free // 10)]
        from_small = False
        while True:
            small = {block: rank for block, rank in self.ranks.items() if not self.is_main[block]}
            main = {block: rank for block, rank in self.ranks.items() if self.is_main[block]}
            from_small = bool(small) and (from_small or len(main) <= num_free - num_free // 10)
            queue = small if from_small else main
            block = min(queue, key=queue.__getitem__)
            hits = min(3, self.hits[block])
            if hits <= (1 if from_small else 0):
                if from_small and self.content[block] not in self.ghosts:
                    self.ghosts.append(self.content[block])
                del self.ranks[block]
                return block
            self.is_main[block] = True
            self.hits[block] = 0 if from_small else hits - 1
            self.now += 1
            self.place[block] = self.now
            self.ranks[block] = self.rank(block)


class GreedyDual(Ranked):
    """GreedyDual (Young, 1994; Cao and Irani, 1997) for prompts: what costs more to compute stays longer.

    A block that is given back is worth the floor and the mean cost of a block of its prompt. That cost grows
    with the prompt, because attention looks at all tokens before. A block that is worth more already keeps
    that: so no block is worth less than one behind it, and what is behind always goes first. A prompt is a
    run of blocks given back one after the other, each just before the last one in depth.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        super().__init__(num_blocks)
        self.block_size = block_size
        self.worth: dict[int, int] = {}
        self.last_depth, self.length = -1, 0  # of the block given back last, and of its prompt, in blocks

    def publish(self, block: int, depth: int, content: int) -> None:
        super().publish(block, depth, content)
        self.worth.pop(block, None)

    def rank(self, block: int) -> tuple[int, int]:
        depth = self.depth[block]
        if depth != self.last_depth - 1:
            self.length = depth + 1
        self.last_depth = depth
        cost = 16 + self.length * self.block_size // 4096
        self.worth[block] = max(self.worth.get(block, self.floor), self.floor + cost)
        return self.worth[block], self.now


class TinyLfu(Ranked):
    """W-TinyLFU (Einziger, Friedman and Manes, 2017): a window for new blocks, and a main part that a block
    must earn.

    The window holds a hundredth, and the main part the rest, of the most free blocks with content that there
    were. Both are in the order of use. While the main part has room, the window's first moves on. Else it
    meets the main part's first. Who was used less often goes; the window's also where both are equal. The
    main part has two halves: a block that was found there is protected, and is of the other half again when
    more than four fifths are protected. Uses are estimated by a count-min sketch of four rows, up to 15, and
    halved after every ten uses for each block. A row of the sketch has `row_size` counts, a power of two.
    """

    def __init__(self, num_blocks: int, row_size: int | None = None) -> None:
        super().__init__(num_blocks)
        self.part: dict[int, str] = {}  # window, probation or protected; of each block with content
        self.content: dict[int, int] = {}
        self.most = 0  # free blocks with content
        self.width = row_size or 2 << (num_blocks - 1).bit_length()
        self.counts = [[0] * self.width for _ in self.FACTORS]
        self.num_uses = 0

    FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)

    def places(self, content: int) -> list[int]:
        bits = self.width.bit_length() - 1
        return [(content * factor % 2**32) >> (32 - bits) for factor in self.FACTORS]

    def use(self, content: int) -> None:
        self.num_uses += 1
        for row, place in zip(self.counts, self.places(content), strict=True):
            row[place] = min(15, row[place] + 1)

    def num_used(self, block: int) -> int:
        return min(
            row[place] for row, place in zip(self.counts, self.places(self.content[block]), strict=True)
        )

    def publish(self, block: int, depth: int, content: int) -> None:
        super().publish(block, depth, content)
        self.content[block], self.part[block] = content, "window"
        self.use(content)

    def hit(self, block: int) -> None:
        super().hit(block)
        self.use(self.content[block])
        if self.part[block] == "probation":
            self.part[block] = "protected"

    def rank(self, block: int) -> tuple[int, int]:
        return 0, self.now

    def free(self, blocks: Sequence[tuple[int, bool]]) -> None:
        super().free(blocks)
        for block, has_content in blocks:
            if not has_content:
                self.part.pop(block, None)
        self.most = max(self.most, len(self.ranks))

    def take(self) -> int:
        while not self.empty:
            order = sorted(self.ranks, key=self.ranks.__getitem__)
            window = [block for block in order if self.part[block] == "window"]
            protected = [block for block in order if self.part[block] == "protected"]
            main = [block for block in order if self.part[block] == "probation"] + protected
            smallest = max(1, self.most // 100)
            room = self.most - smallest - sum(part != "window" for part in self.part.values())
            moves = window and room > 0 and len(window) > smallest
            if window and main and room >= 0:
                moves = moves or self.num_used(window[0]) > self.num_used(main[0])
            if 5 * len(protected) > 4 * len(main):
                self._move_to_probation(protected[0])
            elif moves:
                self._move_to_probation(window[0])
            else:
                block = window[0] if window and (room >= 0 or not main) else main[0]
                del self.ranks[block], self.part[block]
                if self.num_uses >= 10 * self.most:
                    self.num_uses //= 2
                    self.counts = [[count // 2 for count in row] for row in self.counts]
                return block
        return self.empty.pop(0)

    def _move_to_probation(self, block: int) -> None:
        self.now += 1
        self.part[block], self.ranks[block] = "probation", (0, self.now)


class QueueLru(Ranked):
    """Queue-informed LRU (vLLM issue 48485): blocks that waiting requests will hit go last.

    Among these blocks what only later ones in the queue want goes first. All others go first, the least
    recently used at first. `wait` says who waits: of each block that the first of them finds, the number is
    the length of the queue, of the second's one less, and so on.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.wanted: dict[int, int] = {}
        self.used: dict[int, int] = {}

    def publish(self, block: int, depth: int, content: int) -> None:
        super().publish(block, depth, content)
        self.wanted.pop(block, None)

    def wait(self, wanted: dict[int, int]) -> None:
        self.wanted = wanted
        self.ranks = {block: (wanted.get(block, 0), self.used[block]) for block in self.ranks}

    def rank(self, block: int) -> tuple[int, int]:
        self.used[block] = self.now
        return self.wanted.get(block, 0), self.now


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
    "plain_lfu": PlainLfu,
    "greedy_dual": GreedyDual,
    "tinylfu": TinyLfu,
    "queue_lru": QueueLru,
    "belady": Belady,
}
