"""Block allocation of vLLM 0.6.3, written out plainly: the oracle behind the `naive` policy.

A *block* is one entry of a sequence's table: its tokens, a link to the block before it and the id of the
memory it stands for. Several blocks may share one id. An *allocator* gives ids out, counts references and
takes ids back. Above them: two allocators (device and host), a table per sequence, and the block manager.

    block, evictor -> allocator -> prefix_caching -> cpu_gpu -> block_table -> block_manager (with sequence)

Behaviour is 0.6.3's id for id, with its edges. Two of them matter to a caller:

- An operation that runs out of blocks half-way raises `NoFreeBlocksError` and keeps what it had done by
  then; the ids that it took are lost. Ask `can_...` first, or take a `copy.deepcopy` before the call and go
  back to it.
- A table from which the sliding window has dropped blocks can be neither forked nor swapped.

It departs in three places. vLLM keeps block objects in pools and reuses them; here every block is a new
object, because vLLM files a swapped block in the wrong pool and so corrupts its lists. The fork or swap of a
windowed table is refused before anything moves. Encoders, which have a table of their own in vLLM, are left
out.
"""
