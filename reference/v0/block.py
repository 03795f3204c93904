"""Blocks as vLLM v0 sees them: logical ones hold a sequence's tokens, physical ones a place in the cache."""

import enum
from collections.abc import Sequence

_BLANK_TOKEN_ID = -1


class Device(enum.Enum):
    """Place of a physical block's memory."""

    GPU = enum.auto()
    CPU = enum.auto()


class LogicalTokenBlock:
    """`block_size` neighbouring tokens of one sequence, filled from left to right.

    block_number: the block's place in its sequence, from 0.
    token_ids: `[block_size]` tokens; places not yet filled hold -1.
    """

    def __init__(self, block_number: int, block_size: int) -> None:
        self.block_number = block_number
        self.block_size = block_size
        self.token_ids = [_BLANK_TOKEN_ID] * block_size
        self.num_tokens = 0

    def is_empty(self) -> bool:
        return self.num_tokens == 0

    def get_num_empty_slots(self) -> int:
        return self.block_size - self.num_tokens

    def is_full(self) -> bool:
        return self.num_tokens == self.block_size

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Add tokens; AssertionError when they do not all fit."""
        num_empty_slots = self.get_num_empty_slots()
        assert len(token_ids) <= num_empty_slots, f"{len(token_ids)=} must be at most {num_empty_slots=}"
        for token_id in token_ids:
            self.token_ids[self.num_tokens] = token_id
            self.num_tokens += 1

    def get_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_tokens]

    def get_last_token_id(self) -> int:
        """Return the newest token; AssertionError when there is none."""
        assert self.num_tokens > 0, "an empty block has no last token"
        return self.token_ids[self.num_tokens - 1]


class PhysicalTokenBlock:
    """One block of a device's cache. Two blocks are the same only if they are the same object.

    block_number: the block's place in its device's cache, from 0.
    ref_count: how many holders the block has; 0 means free.
    """

    def __init__(self, device: Device, block_number: int, block_size: int) -> None:
        self.device = device
        self.block_number = block_number
        self.block_size = block_size
        self.ref_count = 0

    def __repr__(self) -> str:
        return (
            f"PhysicalTokenBlock(device={self.device}, block_number={self.block_number}, "
            f"ref_count={self.ref_count})"
        )


# A sequence's physical blocks, by logical block number.
BlockTable = list[PhysicalTokenBlock]
