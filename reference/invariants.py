"""Invariants of the oracles after every operation. An AssertionError says what does not hold."""

from collections import Counter
from collections.abc import Iterable, Sequence

from .v0.block import BlockTable, Device
from .v0.block_manager import BlockSpaceManager
from .v0.sequence import Prefix
from .v1.block_pool import BlockPool
from .v1.kv_cache_utils import KVCacheBlock


def check_block_space_manager(manager: BlockSpaceManager, prefixes: Iterable[Prefix] = ()) -> None:
    """Check v0: on each device a block is either free, once, or held by exactly as many as its count says.

    prefixes: those that may hold blocks of this manager.
    """
    holders: list[BlockTable] = [*manager.block_tables.values()]
    holders += [prefix.block_table for prefix in prefixes if prefix.block_table is not None]
    held = Counter(block for table in holders for block in set(table))
    for device, allocator in ((Device.GPU, manager.gpu_allocator), (Device.CPU, manager.cpu_allocator)):
        numbers = [block.block_number for block in allocator.free_blocks]
        numbers += [block.block_number for block in held if block.device == device]
        assert sorted(numbers) == list(range(allocator.num_blocks)), f"{device}: free and held are {numbers}"
        for block in allocator.free_blocks:
            assert block.device == device, f"{block} is free on {device}"
            assert block.ref_count == 0, f"{block} is free"
    for block, num_holders in held.items():
        assert block.ref_count == num_holders, f"{block} has {num_holders} holders"


def check_block_pool(pool: BlockPool, block_tables: Iterable[Sequence[KVCacheBlock]]) -> None:
    """Check V1: counts are the tables', the queue holds the unused blocks, hashes and blocks agree.

    block_tables: the blocks of every request; null blocks may stand anywhere.
    """
    used = Counter(block for table in block_tables for block in table)
    queue = pool.free_block_queue.get_all_free_blocks()
    free = set(queue)
    assert len(free) == len(queue) == pool.get_num_free_blocks(), f"the queue holds {queue}"
    assert pool.null_block.ref_cnt == 0, f"{pool.null_block} is the null block"
    assert pool.null_block.block_hash is None, f"{pool.null_block} is the null block"
    for block in pool.blocks[1:]:
        assert block.ref_cnt == used[block], f"{block} is in {used[block]} tables"
        assert (block in free) == (block.ref_cnt == 0), f"{block} in the free queue: {block in free}"

    cached_ids = []
    for key in pool.cached_block_hash_to_block._cache:
        for block in pool.cached_block_hash_to_block.get_all_blocks(key):
            assert block.block_hash == key, f"{block} is found under {key!r}"
            cached_ids.append(block.block_id)
    hashed_ids = [block.block_id for block in pool.blocks if block.block_hash is not None]
    assert sorted(cached_ids) == hashed_ids, f"{hashed_ids} have a hash, {sorted(cached_ids)} can be found"
