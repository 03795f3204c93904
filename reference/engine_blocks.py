"""Blocks and cache of `reference.engine`: what a row takes, shares, writes, finds and gives back."""

import collections
from collections.abc import Sequence

from .engine_state import EngineConfig, Phase, Reach, Row, Step
from .v1.block_pool import BlockPool
from .v1.kv_cache_utils import BlockHash, KVCacheBlock
from .v1.kv_cache_utils import Request as V1Request


class Blocks:
    """A block pool of V1, beside it a pool on the host, which caches no content, and the cache of both.

    Groups of layers have lines of blocks of their own, all from the one pool. A row takes, shares and gives
    back line by line. The first group names content; what another group has of it is found by the same name.

    Content is named exactly: a full block's name stands for its parent's name (the salt, if it is the first)
    and its tokens, and dies with the last block that has it. A name is never used again, so that the children
    of an evicted block are not found even if its content returns. vLLM's hash would find them.

    In place of K and V the cache holds what they depend on, `marked_tokens` up to the position, and is
    checked whenever it is read: a wrong block cannot go unnoticed.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool, self.host_pool = (
            BlockPool(num_blocks, caching, config.block_size, free_profile=config.free_profile)
            for num_blocks, caching in (
                (config.num_blocks, config.prefix_caching),
                (max(config.num_host_blocks, 1), False),
            )
        )
        # By block, of either pool, and offset.
        self.cache: dict[tuple[KVCacheBlock, int], tuple[int, ...]] = {}
        # By parent or salt, and tokens.
        self.names: dict[tuple[BlockHash | int, tuple[int, ...]], BlockHash] = {}
        self.num_names = 0

    def grow(self, row: Row, num_new: int, step: Step) -> None:
        """Take the blocks that the row's next tokens need; a shared one is copied before it is written to."""
        for line in row.lines:
            if num_new and row.computed % self.config.block_size and line[-1].ref_cnt > 1:
                shared, [own] = line[-1], self.pool.get_new_blocks(1)
                self._copy(shared, own)
                self.pool.free_blocks([shared])
                line[-1] = own
                step.copies.append((shared.block_id, own.block_id))
            num_blocks = cdiv(row.computed + num_new, self.config.block_size) - len(line)
            line += self.pool.get_new_blocks(num_blocks)

    def fork(self, row: Row, leader: Row) -> None:
        """Let a row hold another one's blocks too, but for those that its own next token does not see."""
        self.pool.touch(leader.held)
        row.lines = [[*line] for line in leader.lines]
        row.names, row.computed = [*leader.names], leader.computed
        self.slide(row)

    def move(self, row: Row, source: BlockPool, target: BlockPool) -> list[tuple[int, int]]:
        """Take new blocks of the other pool, copy, and free the old ones. What others hold they keep."""
        held = row.held
        twins = dict(zip(held, target.get_new_blocks(len(held)), strict=True))
        for block, twin in twins.items():
            self._copy(block, twin)
        for line in row.lines:
            source.free_blocks(reversed(line))
        row.lines = [[twins.get(block, target.null_block) for block in line] for line in row.lines]
        return [(block.block_id, twin.block_id) for block, twin in twins.items()]

    def free(self, row: Row) -> None:
        """Free all blocks, the last first, so that the beginning, which others may share, is evicted last."""
        pool = self.host_pool if row.phase is Phase.SWAPPED else self.pool
        for line in row.lines:
            pool.free_blocks(reversed(line))
        row.lines, row.names, row.computed = self.no_blocks, [], 0

    def slide(self, row: Row) -> None:
        """Free the blocks that no coming token reads."""
        for line, reach in zip(row.lines, self.config.reaches, strict=True):
            skipped = reach.skipped(row.computed, self.config.block_size)[: len(line)]
            self.pool.free_blocks(line[index] for index in reversed(skipped))
            for index in skipped:
                line[index] = self.pool.null_block

    def num_copies(self, writers: list[Row]) -> int:
        """Return how many blocks are copied when rows write into shared ones; the last holder keeps it."""
        blocks = collections.Counter(
            line[-1] for row in writers if row.computed % self.config.block_size for line in row.lines
        )
        return sum(min(num_writers, block.ref_cnt - 1) for block, num_writers in blocks.items())

    def most_held(self, num_tokens: int) -> int:
        """Return how many blocks a row may hold at once, until it has computed so many tokens."""
        config, total = self.config, 0
        for reach in config.reaches:
            most = reach.most_kept(config.num_tiles * config.tile_len)
            num_blocks, first = (cdiv(n, config.block_size) for n in (num_tokens, reach.first_tokens))
            total += (
                num_blocks if most is None else min(num_blocks, cdiv(most, config.block_size) + 1 + first)
            )
        return total

    def sure_to_be_kept(self, num_tokens: int) -> int:
        """Return how many full blocks of so many tokens never go out of reach."""
        return num_tokens // self.config.block_size * sum(reach.is_full for reach in self.config.reaches)

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
                found = list(self.cache[self._place(line, position)])
                wanted = marked[: position + 1]
                if self.config.reuse_answers:  # their shape may differ
                    found, wanted = unmarked(found), unmarked(wanted)
                assert found == wanted, f"{row} finds {found} at {position=}"

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
        blocks = None if name is None else self.pool.get_cached_block(name, [0])
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
            found = self._find(parent, self._content(row, index))
            if found is None:
                break
            parent = found[0]
            names.append(found[0])
            blocks.append(found[1])
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
            found = [self.pool.null_block] if index in skipped else self.pool.get_cached_block(name, [group])
            if found is None:
                return None
            line += found
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
            self.pool.cache_full_blocks(named, line, first, end, self.config.block_size, group)


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
