"""vLLM's first block manager (0.3.x): stacks of free blocks, reference counts, copy-on-write."""
