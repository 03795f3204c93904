"""Two allocators side by side, one for the device and one for the host, and the swap between them."""

from .allocator import NaiveBlockAllocator
from .block import Block, Device
from .prefix_caching import PrefixCachingBlockAllocator


class CpuGpuBlockAllocator:
    """One allocator for each device, over different ids: an id tells which device it belongs to.

    The GPU has the ids 0 ... num_gpu_blocks - 1, the CPU the num_cpu_blocks that follow.

    Attributes:
        allocators: the allocator of each device.
        null_block: the block that stands in a table where the sliding window has dropped a block; None before
            it was first asked for.
    """

    def __init__(
        self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int, enable_caching: bool = False
    ) -> None:
        make = PrefixCachingBlockAllocator if enable_caching else NaiveBlockAllocator
        self.allocators: dict[Device, NaiveBlockAllocator] = {
            Device.GPU: make(range(num_gpu_blocks), block_size),
            Device.CPU: make(range(num_gpu_blocks, num_gpu_blocks + num_cpu_blocks), block_size),
        }
        self.null_block: Block | None = None

    @property
    def gpu(self) -> NaiveBlockAllocator:
        return self.allocators[Device.GPU]

    def allocate_or_get_null_block(self) -> Block:
        """Return the null block. The first call takes a GPU block for it, for good."""
        if self.null_block is None:
            self.null_block = self.gpu.allocate_mutable_block(None)
        return self.null_block

    def _allocator_of(self, block: Block) -> NaiveBlockAllocator:
        assert block.block_id is not None, "the block is not allocated"
        return next(each for each in self.allocators.values() if block.block_id in each.block_ids)

    def append_token_ids(self, block: Block, token_ids: list[int]) -> None:
        """Add tokens to a block, on the device that its id belongs to."""
        assert block is not self.null_block, "the null block cannot be changed"
        self._allocator_of(block).append_token_ids(block, token_ids)

    def free(self, block: Block) -> None:
        """Free a block on the device that its id belongs to. The null block stays."""
        if block is not self.null_block:
            self._allocator_of(block).free(block)

    def fork(self, last_block: Block) -> list[Block]:
        """Return blocks that share the memory of the sequence that ends in `last_block`."""
        return self._allocator_of(last_block).fork(last_block)

    def swap(self, blocks: list[Block], source: Device, target: Device) -> list[tuple[int, int]]:
        """Move blocks to another device; return (old, new) places to copy, counted from 0 on each device.

        ValueError: a null block; nothing is moved. NoFreeBlocksError: the target is full; the blocks have
            left the source by then.
        """
        if any(block is self.null_block for block in blocks):
            raise ValueError("the null block cannot be changed")
        old = self._places(blocks, source)
        self.allocators[source].swap_out(blocks)
        self.allocators[target].swap_in(blocks)
        return list(dict(zip(old, self._places(blocks, target), strict=True)).items())

    def _places(self, blocks: list[Block], device: Device) -> list[int]:
        """Return where the blocks lie in the memory of a device."""
        first_id = self.allocators[device].block_ids.start
        return [block.block_id - first_id for block in blocks if block.block_id is not None]
