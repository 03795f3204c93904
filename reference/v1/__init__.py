"""vLLM V1's block pool, and the managers of groups of layers that take from it (0.33)."""
