"""Two allocators side by side, one for the device and one for the host, and the swap between them."""

from .interfaces import Block, BlockAllocator, BlockId, Device, DeviceAwareBlockAllocator
from .naive_block import NaiveBlock, NaiveBlockAllocator
from .prefix_caching_block import PrefixCachingBlockAllocator


class CpuGpuBlockAllocator(DeviceAwareBlockAllocator):
    """One allocator for each device, over different ids: an id tells which device it belongs to.

    Copy-on-write and prefix caching are asked about on the GPU only.
    """

    @staticmethod
    def create(
        allocator_type: str, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int
    ) -> "CpuGpuBlockAllocator":
        """Both allocators, of type "naive" or "prefix_caching". ValueError: another type.

        The GPU has the ids 0 ... num_gpu_blocks - 1, the CPU the num_cpu_blocks that follow.
        """

        def allocator(block_ids: range) -> BlockAllocator:
            if allocator_type == "naive":
                return NaiveBlockAllocator(NaiveBlock, len(block_ids), block_size, block_ids)
            if allocator_type == "prefix_caching":
                return PrefixCachingBlockAllocator(len(block_ids), block_size, block_ids)
            raise ValueError(f"{allocator_type=} must be 'naive' or 'prefix_caching'")

        return CpuGpuBlockAllocator(
            cpu_block_allocator=allocator(range(num_gpu_blocks, num_gpu_blocks + num_cpu_blocks)),
            gpu_block_allocator=allocator(range(num_gpu_blocks)),
        )

    def __init__(self, cpu_block_allocator: BlockAllocator, gpu_block_allocator: BlockAllocator) -> None:
        assert not (cpu_block_allocator.all_block_ids & gpu_block_allocator.all_block_ids), (
            "the two allocators must have different block ids"
        )
        self._allocators = {Device.CPU: cpu_block_allocator, Device.GPU: gpu_block_allocator}
        self._block_ids_to_allocator = {
            block_id: allocator
            for allocator in self._allocators.values()
            for block_id in allocator.all_block_ids
        }
        self._swap_mapping: dict[int, int] = {}
        self._null_block: Block | None = None

    def allocate_or_get_null_block(self) -> Block:
        """The null block. The first call takes a GPU block for it, for good."""
        if self._null_block is None:
            self._null_block = NullBlock(self.allocate_mutable_block(None, Device.GPU))
        return self._null_block

    def allocate_mutable_block(self, prev_block: Block | None, device: Device) -> Block:
        return self._allocators[device].allocate_mutable_block(prev_block)

    def allocate_immutable_block(
        self, prev_block: Block | None, token_ids: list[int], device: Device
    ) -> Block:
        return self._allocators[device].allocate_immutable_block(prev_block, token_ids)

    def allocate_immutable_blocks(
        self, prev_block: Block | None, block_token_ids: list[list[int]], device: Device
    ) -> list[Block]:
        return self._allocators[device].allocate_immutable_blocks(prev_block, block_token_ids)

    def free(self, block: Block) -> None:
        """Free a block on the device that its id belongs to. The null block stays."""
        if not isinstance(block, NullBlock):
            self._allocator_of(block).free(block)

    def fork(self, last_block: Block) -> list[Block]:
        assert not isinstance(last_block, NullBlock)
        return self._allocator_of(last_block).fork(last_block)

    def _allocator_of(self, block: Block) -> BlockAllocator:
        assert block.block_id is not None
        return self._block_ids_to_allocator[block.block_id]

    def swap(self, blocks: list[Block], src_device: Device, dst_device: Device) -> dict[int, int]:
        """Move blocks to another device; returns {old id: new id}, and keeps it for get_and_reset_swaps.

        ValueError: a null block, nothing is moved. NoFreeBlocksError: the target is full; the blocks have
            left
        the source by then.
        """
        if any(isinstance(block, NullBlock) for block in blocks):
            raise ValueError("the null block cannot be changed")
        src_block_ids = [block.block_id for block in blocks]
        self._allocators[src_device].swap_out(blocks)
        self._allocators[dst_device].swap_in(blocks)
        swap_mapping = {
            src_block_id: block.block_id
            for src_block_id, block in zip(src_block_ids, blocks, strict=True)
            if src_block_id is not None and block.block_id is not None
        }
        self._swap_mapping.update(swap_mapping)
        return swap_mapping

    def get_and_reset_swaps(self) -> list[tuple[int, int]]:
        """The (old id, new id) pairs of all swaps since the last call."""
        swaps = list(self._swap_mapping.items())
        self._swap_mapping.clear()
        return swaps

    def get_num_free_blocks(self, device: Device) -> int:
        return self._allocators[device].get_num_free_blocks()

    def get_num_total_blocks(self, device: Device) -> int:
        return self._allocators[device].get_num_total_blocks()

    def get_physical_block_id(self, device: Device, absolute_id: int) -> int:
        return self._allocators[device].get_physical_block_id(absolute_id)

    def get_num_full_blocks_touched(self, blocks: list[Block], device: Device) -> int:
        return self._allocators[device].get_num_full_blocks_touched(blocks)

    def get_prefix_cache_hit_rate(self, device: Device) -> float:
        return self._allocators[device].get_prefix_cache_hit_rate()

    @property
    def all_block_ids(self) -> frozenset[int]:
        return frozenset(self._block_ids_to_allocator)

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        return self._allocators[Device.GPU].clear_copy_on_writes()

    def mark_blocks_as_accessed(self, block_ids: list[int], now: float) -> None:
        self._allocators[Device.GPU].mark_blocks_as_accessed(block_ids, now)

    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        self._allocators[Device.GPU].mark_blocks_as_computed(block_ids)

    def get_computed_block_ids(
        self, prev_computed_block_ids: list[int], block_ids: list[int], skip_last_block_id: bool
    ) -> list[int]:
        return self._allocators[Device.GPU].get_computed_block_ids(
            prev_computed_block_ids, block_ids, skip_last_block_id
        )

    def get_common_computed_block_ids(self, computed_seq_block_ids: list[list[int]]) -> list[int]:
        return self._allocators[Device.GPU].get_common_computed_block_ids(computed_seq_block_ids)


class NullBlock(Block):
    """Stands in a table where the sliding window has dropped a block; can be read but not changed."""

    def __init__(self, proxy: Block) -> None:
        self._proxy = proxy

    def append_token_ids(self, token_ids: list[int]) -> None:
        raise ValueError("the null block cannot be changed")

    @property
    def block_id(self) -> int | None:
        return self._proxy.block_id

    @block_id.setter
    def block_id(self, value: int | None) -> None:
        raise ValueError("the null block cannot be changed")

    @property
    def mutable(self) -> bool:
        return False

    @property
    def token_ids(self) -> list[int]:
        return self._proxy.token_ids

    @property
    def num_tokens_total(self) -> int:
        raise NotImplementedError("the null block has no num_tokens_total")

    @property
    def num_empty_slots(self) -> int:
        return self._proxy.num_empty_slots

    @property
    def is_full(self) -> bool:
        return self._proxy.is_full

    @property
    def prev_block(self) -> Block | None:
        return self._proxy.prev_block

    @property
    def computed(self) -> bool:
        return self._proxy.computed

    @computed.setter
    def computed(self, value: bool) -> None:
        self._proxy.computed = value

    @property
    def last_accessed(self) -> float:
        return self._proxy.last_accessed

    @last_accessed.setter
    def last_accessed(self, last_accessed_ts: float) -> None:
        self._proxy.last_accessed = last_accessed_ts

    @property
    def content_hash(self) -> int | None:
        return self._proxy.content_hash
