"""Blocks and cache of `reference.engine`: what a row takes, shares, writes, finds and gives back."""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .engine_state import EngineConfig, Phase, Reach, Row, Step
from .v1.block_pool import BlockPool
from .v1.kv_cache_utils import BlockHash, KVCacheBlock
from .v1.kv_cache_utils import Request as V1Request

Needs = np.ndarray[Any, np.dtype[np.int64]]  # numbers of blocks, one for each size class


class Blocks:
    """A block pool of V1, beside it a pool on the host, which caches no content, and the cache of both.

    Groups of layers have lines of blocks of their own, all from the one pool; or, where blocks have several
    sizes, from the pool of their size class. Needs are then arrays of one number for each class. A row takes,
    shares and gives back line by line. The first group names content; what another group has of it is found
    by the same name.

    Content is named exactly: a full block's name stands for its parent's name (the salt, if it is the first)
    and its tokens, and dies with the last block that has it. A name is never used again, so that the children
    of an evicted block are not found even if its content returns. vLLM's hash would find them.

    In place of K and V the cache holds what they depend on, `marked_tokens` up to the position, and is
    checked whenever it is read: a wrong block cannot go unnoticed.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pools = self._new_pools(config.pool_sizes, config.prefix_caching)
        host_sizes = max(config.num_host_blocks, 1), *config.more_host_blocks
        self.host_pools = self._new_pools((*host_sizes, *[1] * (len(self.pools) - len(host_sizes))), False)
        # By block, of either pool, and offset.
        self.cache: dict[tuple[KVCacheBlock, int], tuple[int, ...]] = {}
        # By parent or salt, and tokens.
        self.names: dict[tuple[BlockHash | int, tuple[int, ...]], BlockHash] = {}
        self.num_names = 0

    def _new_pools(self, sizes: Sequence[int], caching: bool) -> list[BlockPool]:
        """Return a pool for each size class, whose blocks' numbers go on where those of the last one end."""
        pools: list[BlockPool] = []
        offset = 0
        for size in sizes:
            pools.append(
                BlockPool(size, caching, self.config.block_size, free_profile=self.config.free_profile)
            )
            for block in pools[-1].blocks[1:]:
                block.block_id += offset
            offset += size - 1
        return pools

    def pool_of(self, group: int, on_host: bool = False) -> BlockPool:
        return (self.host_pools if on_host else self.pools)[self.config.class_of[group]]

    def of_classes(self, of_groups: Iterable[int]) -> Needs:
        """Return the sum of the groups' numbers for each size class."""
        sums = np.zeros(len(self.pools), int)
        np.add.at(sums, list(self.config.class_of), list(of_groups))
        return sums

    def num_held(self, row: Row) -> Needs:
        return self.of_classes(sum(not block.is_null for block in line) for line in row.lines)

    @property
    def num_free(self) -> Needs:
        return np.array([pool.get_num_free_blocks() for pool in self.pools])

    def free_block_ids(self, on_host: bool = False) -> list[int]:
        """Return the free blocks in the order in which they will be taken, class by class."""
        pools = self.host_pools if on_host else self.pools
        return [i for pool in pools for i in ids(pool.free_block_queue.get_all_free_blocks())]

    def grow(self, row: Row, num_new: int, step: Step) -> None:
        """Take the blocks that the row's next tokens need; a shared one is copied before it is written to."""
        for group, line in enumerate(row.lines):
            pool = self.pool_of(group)
            if num_new and row.computed % self.config.block_size and line[-1].ref_cnt > 1:
                shared, [new_block] = line[-1], pool.get_new_blocks(1)
                self._copy(shared, new_block)
                pool.free_blocks([shared])
                line[-1] = new_block
                step.copies.append((shared.block_id, new_block.block_id))
            num_blocks = cdiv(row.computed + num_new, self.config.block_size) - len(line)
            line += pool.get_new_blocks(num_blocks)

    def fork(self, row: Row, leader: Row) -> None:
        """Let a row hold another one's blocks too, but for those that its own next token does not see."""
        for group, line in enumerate(leader.lines):
            self.pool_of(group).touch([block for block in line if not block.is_null])
        row.lines = [[*line] for line in leader.lines]
        row.names, row.computed = [*leader.names], leader.computed
        self.slide(row)

    def move(self, row: Row, *, to_host: bool) -> list[tuple[int, int]]:
        """Take new blocks of the other pools, copy, and free the old ones. What others hold they keep."""
        lines, copies = [], []
        for group, line in enumerate(row.lines):
            held, target = [block for block in line if not block.is_null], self.pool_of(group, to_host)
            twins = dict(zip(held, target.get_new_blocks(len(held)), strict=True))
            for block, twin in twins.items():
                self._copy(block, twin)
            lines.append([twins.get(block, target.null_block) for block in line])
            copies += [(block.block_id, twin.block_id) for block, twin in twins.items()]
        for group, line in enumerate(row.lines):
            self.pool_of(group, not to_host).free_blocks(reversed(line))
        row.lines = lines
        return copies

    def free(self, row: Row) -> None:
        """Free all blocks, the last first, so that the beginning, which others may share, is evicted last."""
        for group, line in enumerate(row.lines):
            self.pool_of(group, row.phase is Phase.SWAPPED).free_blocks(reversed(line))
        row.lines, row.names, row.computed = self.no_blocks, [], 0

    def slide(self, row: Row) -> None:
        """Free the blocks that no coming token reads."""
        for group, (line, reach) in enumerate(zip(row.lines, self.config.reaches, strict=True)):
            skipped, pool = (
                reach.skipped(row.computed, self.config.block_size)[: len(line)],
                self.pool_of(group),
            )
            pool.free_blocks(line[index] for index in reversed(skipped))
            for index in skipped:
                line[index] = pool.null_block

    def num_copies(self, writers: list[Row]) -> Needs:
        """Return how many blocks are copied when rows write into shared ones; the last holder keeps it."""
        writers = [row for row in writers if row.computed % self.config.block_size]
        of_groups = []
        for group in range(len(self.config.reaches)):
            blocks = collections.Counter(row.lines[group][-1] for row in writers)
            of_groups.append(sum(min(num, block.ref_cnt - 1) for block, num in blocks.items()))
        return self.of_classes(of_groups)

    def most_held(self, num_tokens: int) -> int:
        """Return how many blocks a row may hold at once, until it has computed so many tokens."""
        return int(sum(self.most_by_class(num_tokens)))

    def most_by_class(self, num_tokens: int) -> Needs:
        """Return the numbers of `most_held` for each size class."""
        config, of_groups = self.config, []
        for reach in config.reaches:
            max_kept = reach.most_kept(config.num_tiles * config.tile_len)
            num_blocks, first = (cdiv(n, config.block_size) for n in (num_tokens, reach.first_tokens))
            of_groups.append(
                num_blocks
                if max_kept is None
                else min(num_blocks, cdiv(max_kept, config.block_size) + 1 + first)
            )
        return self.of_classes(of_groups)

    def num_growing(self, running: Sequence[Row]) -> Needs:
        """Return how many of these rows may come to hold another block, of each size class.

        In a pool for all sizes every row counts as one that may.
        """
        if len(self.pools) == 1:
            return np.array([len(running)])
        grows = np.zeros(len(self.pools), int)
        for row in running:
            later = self.most_by_class(row.num_tokens + self.config.block_size)
            grows += later > self.most_by_class(row.num_tokens)
        return grows

    def sure_to_be_kept(self, num_tokens: int) -> Needs:
        """Return the number of full blocks of `num_tokens` tokens that stay in reach for ever."""
        return self.of_classes(
            num_tokens // self.config.block_size * reach.is_full for reach in self.config.reaches
        )

    def read(self, line: list[KVCacheBlock], reach: Reach, computed: int) -> list[KVCacheBlock]:
        """Return the blocks of a line that the token after so many, or one behind it, attends to."""
        skipped = reach.skipped(computed, self.config.block_size)
        return [block for index, block in enumerate(line) if index not in skipped]

    @property
    def no_blocks(self) -> list[list[KVCacheBlock]]:
        """Lines of a row without blocks."""
        return [[] for _ in self.config.reaches]

    # The cache.

    def write(self, row: Row, num_new: int) -> None:
        """Put the next tokens' K and V, so to speak, into the cache."""
        marked = row.marked_tokens
        for position in range(row.computed, row.computed + num_new):
            for line in row.lines:
                self.cache[self._place(line, position)] = tuple(marked[: position + 1])

    def check(self, row: Row, num_new: int) -> None:
        """Check that the new tokens attend to what this row would have written, or raise AssertionError."""
        marked = row.marked_tokens
        for line, reach in zip(row.lines, self.config.reaches, strict=True):
            for position in reach.reads(row.computed, row.computed + num_new) if num_new else ():
                content = list(self.cache[self._place(line, position)])
                wanted = marked[: position + 1]
                if self.config.reuse_answers:  # their shape may differ
                    content, wanted = unmarked(content), unmarked(wanted)
                assert content == wanted, f"{row} finds {content} at {position=}"

    def _place(self, line: list[KVCacheBlock], position: int) -> tuple[KVCacheBlock, int]:
        """Return the block and the offset in the cache of a position."""
        return line[position // self.config.block_size], position % self.config.block_size

    def _copy(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        for offset in range(self.config.block_size):
            if (source, offset) in self.cache:
                self.cache[target, offset] = self.cache[source, offset]

    # Content.

    def _content(self, row: Row, index: int) -> tuple[int, ...]:
        """Return the tokens of a row's block as the prefix cache sees them."""
        tokens = row.tokens if self.config.reuse_answers else row.marked_tokens
        return tuple(tokens[index * self.config.block_size : (index + 1) * self.config.block_size])

    def _find(
        self, parent: BlockHash | int, content: tuple[int, ...]
    ) -> tuple[BlockHash, KVCacheBlock] | None:
        """Return the name of this content and the block that got it first, if any block still has it."""
        name = self.names.get((parent, content))
        blocks = None if name is None else self.pool_of(0).get_cached_block(name, [0])
        return (name, blocks[0]) if name is not None and blocks is not None else None

    def lookup(self, row: Row) -> tuple[list[BlockHash], list[list[KVCacheBlock]]]:
        """Return the longest prefix of a row's tokens of which every group has what the next token reads.

        One token is left to compute. Returns the content's names, and each group's blocks; in the lines of
        further groups the null block stands for one that need not be there.
        """
        names: list[BlockHash] = []
        blocks: list[KVCacheBlock] = []
        parent: BlockHash | int = row.request.salt
        for index in range((row.num_findable - 1) // self.config.block_size):
            hit = self._find(parent, self._content(row, index))
            if hit is None:
                break
            parent = hit[0]
            names.append(hit[0])
            blocks.append(hit[1])
        while True:
            lines = [self._line(group, names) for group in range(1, len(self.config.reaches))]
            served = [line for line in lines if line is not None]
            if len(served) == len(lines):
                return names, [blocks[: len(names)], *served]
            names = names[:-1]

    def _line(self, group: int, names: list[BlockHash]) -> list[KVCacheBlock] | None:
        """Return a group's blocks of a prefix with this content; None if one is missing that is read."""
        line = []
        computed = len(names) * self.config.block_size
        skipped = self.config.reaches[group].skipped(computed, self.config.block_size)
        for index, name in enumerate(names):
            pool = self.pool_of(group)
            blocks = [pool.null_block] if index in skipped else pool.get_cached_block(name, [group])
            if blocks is None:
                return None
            line += blocks
        return line

    def publish(self, row: Row) -> None:
        """Make the full blocks of the computed tokens findable, behind others with the same content."""
        if not self.config.prefix_caching:
            return
        first, end = len(row.names), row.computed // self.config.block_size
        for index in range(first, end):
            parent = row.names[-1] if row.names else row.request.salt
            content = self._content(row, index)
            if self._find(parent, content) is None:
                self.num_names += 1
                self.names[parent, content] = BlockHash(self.num_names.to_bytes(32, "big"))
            row.names.append(self.names[parent, content])
        named = V1Request(str(row.request.arrival), row.tokens)
        named.block_hashes = row.names
        while first < end and row.blocks[first].block_hash is not None:
            first += 1  # beams of one search share it, and another one was first
        for group, line in enumerate(row.lines):
            self.pool_of(group).cache_full_blocks(named, line, first, end, self.config.block_size, group)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def unmarked(tokens: list[int]) -> list[int]:
    return [token if token >= 0 else -1 - token for token in tokens]


def ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
