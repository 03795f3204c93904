"""A pool as vLLM V1's, over an ordered dictionary. It labels content with tuples of a hash and a group."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: tuple | None = None
    is_null: bool = False


class BlockPool:
    def __init__(self, num_gpu_blocks, enable_caching, hash_block_size):
        self.enable_caching = enable_caching
        self.blocks = [Block(block_id) for block_id in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free = OrderedDict((block.block_id, block) for block in self.blocks[1:])
        self.cached = {}  # for each label its blocks by id

    def get_num_free_blocks(self):
        return len(self.free)

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        doubles = [self.cached.get((block_hash, group)) for group in kv_cache_group_ids]
        return [next(iter(each.values())) for each in doubles] if all(doubles) else None

    def cache_full_blocks(self, request, blocks, num_cached, num_full, block_size, group):
        for place in range(num_cached, num_full):
            block, label = blocks[place], (request.block_hashes[place], group)
            if not block.is_null:
                assert block.block_hash is None, f"{block} holds something else"
                block.block_hash = label
                self.cached.setdefault(label, {})[block.block_id] = block

    def get_new_blocks(self, num_blocks):
        if num_blocks > len(self.free):
            raise ValueError(f"{num_blocks} blocks are not free")
        taken = [self.free.popitem(last=False)[1] for _ in range(num_blocks)]
        for block in taken:
            self.forget(block)
            block.ref_cnt = 1
        return taken

    def forget(self, block):
        if block.block_hash is not None:
            doubles = self.cached[block.block_hash]
            del doubles[block.block_id]
            if not doubles:
                del self.cached[block.block_hash]
            block.block_hash = None

    def touch(self, blocks):
        for block in blocks:
            if not block.is_null:
                self.free.pop(block.block_id, None)
                block.ref_cnt += 1

    def free_blocks(self, ordered_blocks):
        for block in ordered_blocks:
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free[block.block_id] = block

    def evict_blocks(self, block_ids):
        for block_id in block_ids:
            self.forget(self.blocks[block_id])

    def reset_prefix_cache(self):
        if len(self.free) < len(self.blocks) - 1:
            return False
        for block in self.blocks:
            self.forget(block)
        return True
