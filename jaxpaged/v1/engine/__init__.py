"""vLLM's import paths of engines."""
