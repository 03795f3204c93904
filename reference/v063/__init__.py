"""The block machinery of vLLM 0.6.3, written out plainly: the oracle behind the `naive` policy.

Two layers. A *block* is one line of a sequence's table: its tokens, a link to the block before it and the id
of the memory it stands for (several blocks may share one id). An *allocator* gives ids out, counts references
and takes ids back. Above them: a table per sequence, a pair of allocators (device and host), the block
manager.

    interfaces -> common -> naive_block, evictor -> prefix_caching_block -> cpu_gpu_block_allocator
               -> block_table -> block_manager (with sequence)

Behaviour is 0.6.3's id for id, with its edges. Two of them matter to a caller:

- An operation that runs out of blocks half-way raises `NoFreeBlocksError` and keeps what it had done by then
  (`NaiveBlockAllocator.allocate_immutable_blocks` even loses the ids it took). Ask `can_...` first, or take a
  `copy.deepcopy` before the call and go back to it.
- A table from which the sliding window has dropped blocks can be neither forked nor swapped.

It departs in two places, both where 0.6.3 corrupts its own lists: a block object goes back to the pool it
came from (see `BlockPool.free_block`), and the fork or swap of a windowed table is refused before anything
moves.
"""
