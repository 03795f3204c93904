"""Import paths of engines in vLLM's scripts."""
