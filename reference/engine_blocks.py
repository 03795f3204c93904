"""Blocks and cache of `reference.engine`: what a row takes, shares, writes, finds and gives back."""

import collections

from .engine_state import EngineConfig, Phase, Row, Step
from .v1.block_pool import BlockPool
from .v1.kv_cache_utils import BlockHash, KVCacheBlock
from .v1.kv_cache_utils import Request as V1Request


class Blocks:
    """A block pool of V1, beside it a pool on the host, which caches no content, and the cache of both.

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
        if num_new and row.computed % self.config.block_size and row.blocks[-1].ref_cnt > 1:
            shared, [own] = row.blocks[-1], self.pool.get_new_blocks(1)
            self._copy(shared, own)
            self.pool.free_blocks([shared])
            row.blocks[-1] = own
            step.copies.append((shared.block_id, own.block_id))
        num_blocks = cdiv(row.computed + num_new, self.config.block_size) - len(row.blocks)
        row.blocks += self.pool.get_new_blocks(num_blocks)

    def fork(self, row: Row, leader: Row) -> None:
        """Let a row hold another one's blocks too, but for those that its own next token does not see."""
        self.pool.touch(leader.held)
        row.blocks, row.names, row.computed = [*leader.blocks], [*leader.names], leader.computed
        self.slide(row)

    def move(self, row: Row, source: BlockPool, target: BlockPool) -> list[tuple[int, int]]:
        """Take new blocks of the other pool, copy, and free the old ones. What others hold they keep."""
        held = row.held
        twins = dict(zip(held, target.get_new_blocks(len(held)), strict=True))
        for block, twin in twins.items():
            self._copy(block, twin)
        source.free_blocks(reversed(row.blocks))
        row.blocks = [twins.get(block, target.null_block) for block in row.blocks]
        return [(block.block_id, twin.block_id) for block, twin in twins.items()]

    def free(self, row: Row) -> None:
        """Free all blocks, the last first, so that the beginning, which others may share, is evicted last."""
        pool = self.host_pool if row.phase is Phase.SWAPPED else self.pool
        pool.free_blocks(reversed(row.blocks))
        row.blocks, row.names, row.computed = [], [], 0

    def slide(self, row: Row) -> None:
        """Free the blocks that have left the window."""
        num_skipped = self.num_skipped(row.computed)
        self.pool.free_blocks(reversed(row.blocks[:num_skipped]))
        row.blocks[:num_skipped] = [self.pool.null_block] * num_skipped

    def num_copies(self, writers: list[Row]) -> int:
        """Return how many blocks are copied when rows write into shared ones; the last holder keeps it."""
        blocks = collections.Counter(
            row.blocks[-1] for row in writers if row.computed % self.config.block_size
        )
        return sum(min(num_writers, block.ref_cnt - 1) for block, num_writers in blocks.items())

    def most_held(self, num_tokens: int) -> int:
        """Return how many blocks a row may hold at once, until it has computed so many tokens."""
        config = self.config
        num_blocks = cdiv(num_tokens, config.block_size)
        if config.sliding_window is None:
            return num_blocks
        widest = config.sliding_window - 1 + config.num_tiles * config.tile_len
        return min(num_blocks, cdiv(widest, config.block_size) + 1)

    def num_skipped(self, computed: int) -> int:
        """Return how many leading blocks the token after so many does not attend to."""
        if self.config.sliding_window is None:
            return 0
        return max(computed + 1 - self.config.sliding_window, 0) // self.config.block_size

    # The cache.

    def write(self, row: Row, num_new: int) -> None:
        """Put the next tokens' K and V, so to speak, into the cache."""
        marked = row.marked_tokens
        for position in range(row.computed, row.computed + num_new):
            self.cache[self._place(row, position)] = tuple(marked[: position + 1])

    def check(self, row: Row, num_new: int) -> None:
        """Check that the new tokens attend to what this row would have written, or raise AssertionError."""
        window, marked = self.config.sliding_window, row.marked_tokens
        first = 0 if window is None else max(row.computed + 1 - window, 0)
        for position in range(first, row.computed + num_new) if num_new else ():
            found = list(self.cache[self._place(row, position)])
            wanted = marked[: position + 1]
            if self.config.reuse_answers:  # their shape may differ
                found, wanted = unmarked(found), unmarked(wanted)
            assert found == wanted, f"{row} finds {found} at {position=}"

    def _place(self, row: Row, position: int) -> tuple[KVCacheBlock, int]:
        """Return the block and the offset in the cache of a position of a row."""
        return row.blocks[position // self.config.block_size], position % self.config.block_size

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

    def lookup(self, row: Row) -> tuple[list[BlockHash], list[KVCacheBlock]]:
        """Return the longest prefix of a row's tokens that can be found; one token is left to compute."""
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
        return names, blocks

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
        while first < end and row.blocks[first].block_hash is not None:
            first += 1  # beams of one search share it, and another one was first
        named = V1Request(str(row.request.arrival), row.tokens)
        named.block_hashes = row.names
        self.pool.cache_full_blocks(named, row.blocks, first, end, self.config.block_size, 0)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def unmarked(tokens: list[int]) -> list[int]:
    return [token if token >= 0 else -1 - token for token in tokens]
