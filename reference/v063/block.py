"""Blocks of one sequence, and where their memory lies.

Token ids and block ids are Python ints. Counts are in blocks unless the name says tokens or slots (a slot is
the place of one token). Broken preconditions are `AssertionError`s, as in vLLM.
"""

import enum


class Device(enum.Enum):
    """The place of a block's memory: on the accelerator, or on the host it is swapped to."""

    GPU = enum.auto()
    CPU = enum.auto()


class AllocStatus(enum.Enum):
    """Whether a request gets memory: now (OK), when others have given some back (LATER), or never."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class NoFreeBlocksError(ValueError):
    """No block is free, and none can be evicted."""


class Block:
    """Up to `block_size` tokens of one sequence, and the id of the memory that holds them.

    Attributes:
        prev_block: the block before it in its sequence; None for the first.
        token_ids: the tokens, written by the allocator that the id belongs to.
        block_id: the memory; None while there is none.
        index: how many blocks come before it in its sequence.
    """

    def __init__(
        self,
        prev_block: "Block | None",
        token_ids: list[int],
        block_size: int,
        block_id: int | None = None,
    ) -> None:
        self.prev_block = prev_block
        self.token_ids: list[int] = []
        self.block_size = block_size
        self.block_id = block_id
        self.index: int = 0 if prev_block is None else prev_block.index + 1
        self._content_hash: int | None = None
        self.write(token_ids)

    def write(self, token_ids: list[int]) -> None:
        """Add tokens. AssertionError: more than there are empty slots."""
        num_empty_slots = self.block_size - len(self.token_ids)
        assert len(token_ids) <= num_empty_slots, f"{len(token_ids)=} must be at most {num_empty_slots=}"
        self.token_ids.extend(token_ids)

    @property
    def is_full(self) -> bool:
        return len(self.token_ids) == self.block_size

    @property
    def content_hash(self) -> int | None:
        """A number for this block's tokens and all before them; None unless all these blocks are full.

        It is Python's hash of (first or not, the hash before, the tokens), kept once it is known. Equal
        hashes pass for equal content.
        """
        if self._content_hash is None and self.is_full:
            prev_hash = None if self.prev_block is None else self.prev_block.content_hash
            if self.prev_block is None or prev_hash is not None:
                self._content_hash = hash((self.prev_block is None, prev_hash, *self.token_ids))
        return self._content_hash


def blocks_up_to(last_block: Block) -> list[Block]:
    """Return all blocks of the sequence that ends in `last_block`, first to last."""
    blocks = []
    block: Block | None = last_block
    while block is not None:
        blocks.append(block)
        block = block.prev_block
    return blocks[::-1]
