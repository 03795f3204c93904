"""Blocks handed from one pool to another by their content: what one has computed, another finds.

A chain is the full blocks of a sequence from its beginning on. To adopt one is to do to a pool what a request
does that finds what is there of it, computes the rest, and finishes; only that K and V are not computed, but
brought.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .v1.block_pool import BlockPool
from .v1.kv_cache_utils import BlockHash, KVCacheBlock
from .v1.kv_cache_utils import Request as V1Request


@dataclass(frozen=True)
class Content:
    """A block on its way: its tokens, and its K and V, whatever those are."""

    tokens: tuple[int, ...]
    kv: Hashable


class Cache:
    """V1's pool, what each of its blocks holds, and its contents, named exactly as in `reference.engine`.

    A block's name stands for its parent's name (the salt, if it is the first) and its tokens, and dies with
    the last block that has it; a name is never used again.
    """

    def __init__(self, num_blocks: int, block_size: int, free_profile: str = "classic") -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks, True, block_size, free_profile=free_profile)
        self.names: dict[tuple[BlockHash | int, tuple[int, ...]], BlockHash] = {}
        self.num_names = 0
        self.kv: dict[int, Hashable] = {}  # by block

    def export(self, contents: Sequence[tuple[int, ...]], salt: int) -> list[Content]:
        """Return the longest prefix of a chain of these tokens that can be found."""
        return [
            Content(tokens, self.kv[block.block_id])
            for tokens, block in zip(contents, self._lookup(contents, salt)[1], strict=False)
        ]

    def adopt(self, chain: Sequence[Content], salt: int) -> list[int] | None:
        """Make a chain findable, in blocks that nobody holds; None, and no change, if there is no room.

        Returns: the blocks that K and V were written to.
        """
        contents = [content.tokens for content in chain]
        names, held = self._lookup(contents, salt)
        num_revived = sum(block.ref_cnt == 0 for block in held)
        num_new = len(chain) - len(held)
        if num_new > self.pool.get_num_free_blocks() - num_revived:
            return None
        self.pool.touch(held)
        new = self.pool.get_new_blocks(num_new)
        for block, content in zip(new, chain[len(held) :], strict=True):
            self.kv[block.block_id] = content.kv
        self._publish(contents, salt, names, [*held, *new])
        self.finish([*held, *new])
        return [block.block_id for block in new]

    def compute(
        self, contents: Sequence[tuple[int, ...]], salt: int, kv: Sequence[Hashable]
    ) -> list[KVCacheBlock] | None:
        """Start a request that looks nothing up and computes these blocks; return None if they do not fit."""
        if len(contents) > self.pool.get_num_free_blocks():
            return None
        blocks = self.pool.get_new_blocks(len(contents))
        self.kv |= {block.block_id: its for block, its in zip(blocks, kv, strict=True)}
        self._publish(contents, salt, [], blocks)
        return blocks

    def finish(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give a request's blocks back, the last first."""
        self.pool.free_blocks(reversed(blocks))

    def _lookup(
        self, contents: Sequence[tuple[int, ...]], salt: int
    ) -> tuple[list[BlockHash], list[KVCacheBlock]]:
        names: list[BlockHash] = []
        blocks: list[KVCacheBlock] = []
        for tokens in contents:
            name = self.names.get((names[-1] if names else salt, tokens))
            found = None if name is None else self.pool.get_cached_block(name, [0])
            if name is None or found is None:
                break
            names.append(name)
            blocks.append(found[0])
        return names, blocks

    def _publish(
        self,
        contents: Sequence[tuple[int, ...]],
        salt: int,
        names: list[BlockHash],
        blocks: Sequence[KVCacheBlock],
    ) -> None:
        """Make blocks findable behind the first ones, which have these names."""
        first = len(names)
        for tokens in contents[first:]:
            key = names[-1] if names else salt, tokens
            name = self.names.get(key)
            if name is None or self.pool.get_cached_block(name, [0]) is None:
                self.num_names += 1
                self.names[key] = BlockHash(self.num_names.to_bytes(32, "big"))
            names = [*names, self.names[key]]
        request = V1Request("", [token for tokens in contents for token in tokens])
        request.block_hashes = names
        self.pool.cache_full_blocks(request, blocks, first, len(contents), self.block_size, 0)
