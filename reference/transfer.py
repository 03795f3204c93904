"""Blocks handed from one pool to another by their content: what one has computed, another finds.

A chain is the full blocks of a sequence from its beginning on. To adopt one is to do to a pool what a request
does that finds what is there of it, computes the rest, and finishes; only that K and V are not computed, but
brought.

Each group of layers has a line of blocks. The first group's blocks are all on their way; of the others those
that a prompt of these tokens reads next, or a longer one that begins so.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from .engine_state import Reach
from .v1.block_pool import BlockPool
from .v1.kv_cache_utils import BlockHash, KVCacheBlock
from .v1.kv_cache_utils import Request as V1Request


@dataclass(frozen=True)
class Content:
    """Blocks of one content on their way, one for each group: the tokens, and each group's K and V of any
    type.

    kv: None for a group whose block stays behind.
    """

    tokens: tuple[int, ...]
    kv: tuple[Hashable | None, ...]


type Lines = list[list[KVCacheBlock | None]]  # of each group; None where it has no block


class Cache:
    """V1's pool, what each of its blocks holds, and its contents, named exactly as in `reference.engine`.

    A block's name stands for its parent's name (the salt, if it is the first) and its tokens, and dies with
    the last block of the first group that has it; a name is never used again. Other groups' blocks are found
    by the same name.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        free_profile: str = "classic",
        reaches: tuple[Reach, ...] = (Reach(),),
    ) -> None:
        self.block_size, self.reaches = block_size, reaches
        self.pool = BlockPool(num_blocks, True, block_size, free_profile=free_profile)
        self.names: dict[tuple[BlockHash | int, tuple[int, ...]], BlockHash] = {}
        self.num_names = 0
        self.kv: dict[int, Hashable] = {}  # by block

    def export(self, contents: Sequence[tuple[int, ...]], salt: int) -> list[Content]:
        """Return the longest prefix of a chain of these tokens that every group can serve."""
        names, lines = self._lookup(contents, salt)
        num_blocks = len(names)
        while not self._serves(lines, num_blocks):
            num_blocks -= 1
        left_out = [self._skipped(reach, num_blocks - 1) for reach in self.reaches]
        return [
            Content(
                contents[i],
                tuple(
                    None if block is None or (group > 0 and i in left_out[group]) else self.kv[block.block_id]
                    for group, block in enumerate(line[i] for line in lines)
                ),
            )
            for i in range(num_blocks)
        ]

    def adopt(self, chain: Sequence[Content], salt: int) -> list[int] | None:
        """Make a chain findable, in blocks that nobody holds; None, and no change, if there is no room.

        Returns: the blocks that K and V were written to, group by group.
        """
        contents = [content.tokens for content in chain]
        names, lines_found = self._lookup(contents, salt)
        lines: Lines = [
            [
                block if content.kv[group] is not None else None
                for block, content in zip(line + [None] * (len(chain) - len(line)), chain, strict=True)
            ]
            for group, line in enumerate(lines_found)
        ]
        held = [block for line in lines for block in line if block is not None]
        wanted = [
            (group, i)
            for group, line in enumerate(lines)
            for i, (block, content) in enumerate(zip(line, chain, strict=True))
            if block is None and content.kv[group] is not None
        ]
        num_revived = sum(block.ref_cnt == 0 for block in held)
        if len(wanted) > self.pool.get_num_free_blocks() - num_revived:
            return None
        self.pool.touch(held)
        new = self.pool.get_new_blocks(len(wanted))
        for block, (group, i) in zip(new, wanted, strict=True):
            lines[group][i] = block
            self.kv[block.block_id] = chain[i].kv[group]
        self._publish(contents, salt, names, lines)
        self.finish(lines)
        return [block.block_id for block in new]

    def compute(
        self, contents: Sequence[tuple[int, ...]], salt: int, kv: Sequence[Sequence[Hashable]]
    ) -> Lines | None:
        """Start a request that looks nothing up and computes these blocks; return None if they do not fit.

        kv: of each block, by groups.
        """
        num_blocks = len(contents)
        if num_blocks * len(self.reaches) > self.pool.get_num_free_blocks():
            return None
        lines: Lines = []
        for group in range(len(self.reaches)):
            lines.append([*self.pool.get_new_blocks(num_blocks)])
            for block, block_kv in zip(lines[-1], kv, strict=True):
                assert block is not None
                self.kv[block.block_id] = block_kv[group]
        self._publish(contents, salt, [], lines)
        return lines

    def slide(self, lines: Lines) -> None:
        """Free the blocks that no later token reads, the last first."""
        for reach, line in zip(self.reaches, lines, strict=True):
            for i in reversed(self._skipped(reach, len(line))):
                if (block := line[i]) is not None:
                    self.pool.free_blocks([block])
                line[i] = None

    def finish(self, lines: Lines) -> None:
        """Give a request's blocks back, group by group, the last first."""
        for line in lines:
            self.pool.free_blocks([block for block in reversed(line) if block is not None])

    def _skipped(self, reach: Reach, num_blocks: int) -> range:
        """Return the blocks that are not read after so many blocks."""
        return reach.skipped(max(num_blocks, 0) * self.block_size, self.block_size)

    def _serves(self, lines: Lines, num_blocks: int) -> bool:
        return all(
            line[i] is not None
            for reach, line in zip(self.reaches, lines, strict=True)
            for i in range(num_blocks)
            if i not in self._skipped(reach, num_blocks)
        )

    def _lookup(self, contents: Sequence[tuple[int, ...]], salt: int) -> tuple[list[BlockHash], Lines]:
        """Return the names of what the first group has from the beginning on, and all groups' blocks."""
        names: list[BlockHash] = []
        lines: Lines = [[] for _ in self.reaches]
        for tokens in contents:
            name = self.names.get((names[-1] if names else salt, tokens))
            if name is None or self.pool.get_cached_block(name, [0]) is None:
                break
            names.append(name)
            for group, line in enumerate(lines):
                cached = self.pool.get_cached_block(name, [group])
                line.append(None if cached is None else cached[0])
        return names, lines

    def _publish(
        self, contents: Sequence[tuple[int, ...]], salt: int, names: list[BlockHash], lines: Lines
    ) -> None:
        """Make blocks findable. The first ones of the first group are, and have these names."""
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
        for group, line in enumerate(lines):
            for i, block in enumerate(line):
                if block is not None and block.block_hash is None:
                    its_line = [self.pool.null_block] * i + [block]
                    self.pool.cache_full_blocks(request, its_line, i, i + 1, self.block_size, group)
