"""vLLM V1's block pool (0.14): one queue of free blocks, whose contents stay findable until taken."""
