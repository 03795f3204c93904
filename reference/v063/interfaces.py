"""What a block and an allocator of blocks can do.

Common contract: token ids are Python ints, block ids are Python ints, counts are in blocks unless the name
says tokens or slots (a slot is the place of one token). Broken preconditions are `AssertionError`s, as in
vLLM.
"""

import enum
from abc import ABC, abstractmethod
from typing import Protocol

BlockId = int


class Device(enum.Enum):
    """Where a block's memory lies: on the accelerator, or on the host it is swapped to."""

    GPU = enum.auto()
    CPU = enum.auto()


class AllocStatus(enum.Enum):
    """Whether a request gets memory: now (OK), when others have given some back (LATER), or never."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class Block(ABC):
    """Up to `block_size` tokens of one sequence, and the id of the memory that holds them."""

    pool_id: int  # the block's place in the BlockPool that made it
    _allocator: "BlockAllocator"

    class Factory(Protocol):
        """Makes a block; what a BlockPool is given to fill itself."""

        def __call__(
            self,
            prev_block: "Block | None",
            token_ids: list[int],
            block_size: int,
            allocator: "BlockAllocator",
            block_id: int | None = None,
        ) -> "Block": ...

    @abstractmethod
    def append_token_ids(self, token_ids: list[int]) -> None:
        """Add tokens; the block may get another id thereby (copy-on-write, or promotion)."""

    @property
    @abstractmethod
    def block_id(self) -> int | None:
        """The id of the block's memory; None while it has none."""

    @block_id.setter
    @abstractmethod
    def block_id(self, value: int | None) -> None: ...

    @property
    @abstractmethod
    def token_ids(self) -> list[int]:
        """The tokens in this block."""

    @property
    @abstractmethod
    def num_tokens_total(self) -> int:
        """Tokens from the start of the sequence to the end of this block."""

    @property
    @abstractmethod
    def num_empty_slots(self) -> int:
        """Tokens that still fit."""

    @property
    @abstractmethod
    def is_full(self) -> bool: ...

    @property
    def mutable(self) -> bool:
        """Whether tokens can still be added."""
        return not self.is_full

    @property
    @abstractmethod
    def prev_block(self) -> "Block | None":
        """The block before this one in its sequence; None for the first."""

    @property
    @abstractmethod
    def computed(self) -> bool:
        """Whether the memory already held this content when the block was tied to it."""

    @computed.setter
    @abstractmethod
    def computed(self, value: bool) -> None: ...

    @property
    @abstractmethod
    def last_accessed(self) -> float: ...

    @last_accessed.setter
    @abstractmethod
    def last_accessed(self, last_accessed_ts: float) -> None: ...

    @property
    @abstractmethod
    def content_hash(self) -> int | None:
        """Stands for this block's tokens and all before them; None unless all these blocks are full."""


class BlockAllocator(ABC):
    """Gives out the blocks of one device."""

    class NoFreeBlocksError(ValueError):
        """No block is free, and none can be evicted."""

    @abstractmethod
    def allocate_mutable_block(self, prev_block: Block | None, device: Device | None = None) -> Block:
        """A new empty block to follow `prev_block`. `device` must be None: there is but one here."""

    @abstractmethod
    def allocate_immutable_block(
        self, prev_block: Block | None, token_ids: list[int], device: Device | None = None
    ) -> Block:
        """A full block holding `token_ids`, exactly `block_size` of them."""

    @abstractmethod
    def allocate_immutable_blocks(
        self, prev_block: Block | None, block_token_ids: list[list[int]], device: Device | None = None
    ) -> list[Block]:
        """Full blocks, each following the one before it."""

    @abstractmethod
    def free(self, block: Block, keep_block_object: bool = False) -> None:
        """Drop the block's reference to its memory; its object returns to the pool unless it is kept."""

    @abstractmethod
    def fork(self, last_block: Block) -> list[Block]:
        """New blocks for a second sequence that shares the memory of the one that ends in `last_block`."""

    @abstractmethod
    def get_num_total_blocks(self) -> int: ...

    @abstractmethod
    def get_num_free_blocks(self) -> int: ...

    @abstractmethod
    def get_physical_block_id(self, absolute_id: int) -> int:
        """The rank of an id among this allocator's ids: its place in this device's memory."""

    @abstractmethod
    def swap_out(self, blocks: list[Block]) -> None:
        """Release the blocks' ids; the objects and their tokens stay with the caller."""

    @abstractmethod
    def swap_in(self, blocks: list[Block]) -> None:
        """Give each block an id of this allocator, as though its tokens were allocated anew."""

    @property
    @abstractmethod
    def all_block_ids(self) -> frozenset[int]: ...

    @abstractmethod
    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """The (source, target) ids to copy since the last call, in order; the list starts anew."""

    @abstractmethod
    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None: ...

    @abstractmethod
    def mark_blocks_as_computed(self, block_ids: list[int]) -> None: ...

    @abstractmethod
    def get_computed_block_ids(
        self, prev_computed_block_ids: list[int], block_ids: list[int], skip_last_block_id: bool
    ) -> list[int]:
        """Those of `block_ids` whose content is there already, after the ones known from last time."""

    @abstractmethod
    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        """The longest run of ids with which all the non-empty lists begin."""

    @abstractmethod
    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        """The id to write to: the block's own, or a new one (recorded as a copy) if others share it.

        For Blocks only.
        """

    @abstractmethod
    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Make a block that has become full findable; returns the id it is to have from now on.

        For Blocks only.
        """

    @abstractmethod
    def get_num_full_blocks_touched(self, blocks: list[Block]) -> int:
        """How many free blocks the full ones among `blocks` would take if they were swapped in here."""

    @abstractmethod
    def get_prefix_cache_hit_rate(self) -> float:
        """Share of full blocks found in the cache, 0 to 1; -1 where there is no prefix cache."""


class DeviceAwareBlockAllocator(ABC):
    """Gives out the blocks of several devices.

    Each verb is BlockAllocator's, on the device named or the one meant.
    """

    @abstractmethod
    def allocate_mutable_block(self, prev_block: Block | None, device: Device) -> Block: ...

    @abstractmethod
    def allocate_immutable_block(
        self, prev_block: Block | None, token_ids: list[int], device: Device
    ) -> Block: ...

    @abstractmethod
    def allocate_immutable_blocks(
        self, prev_block: Block | None, block_token_ids: list[list[int]], device: Device
    ) -> list[Block]: ...

    @abstractmethod
    def get_num_free_blocks(self, device: Device) -> int: ...

    @abstractmethod
    def get_num_total_blocks(self, device: Device) -> int: ...

    @abstractmethod
    def free(self, block: Block) -> None: ...

    @abstractmethod
    def fork(self, last_block: Block) -> list[Block]: ...

    @property
    @abstractmethod
    def all_block_ids(self) -> frozenset[int]: ...

    @abstractmethod
    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]: ...

    @abstractmethod
    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None: ...

    @abstractmethod
    def mark_blocks_as_computed(self, block_ids: list[int]) -> None: ...

    @abstractmethod
    def get_computed_block_ids(
        self, prev_computed_block_ids: list[int], block_ids: list[int], skip_last_block_id: bool
    ) -> list[int]: ...

    @abstractmethod
    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]: ...

    @abstractmethod
    def get_num_full_blocks_touched(self, blocks: list[Block], device: Device) -> int: ...

    @abstractmethod
    def swap(self, blocks: list[Block], src_device: Device, dst_device: Device) -> dict[int, int]:
        """Move blocks to another device; returns {old id: new id}."""

    @abstractmethod
    def get_physical_block_id(self, device: Device, absolute_id: int) -> int: ...

    @abstractmethod
    def allocate_or_get_null_block(self) -> Block:
        """The one block that stands where the sliding window has dropped a block."""

    @abstractmethod
    def get_prefix_cache_hit_rate(self, device: Device) -> float: ...
