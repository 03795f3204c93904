"""The public API: `LLM`, `AsyncLLM`, `LLMEngine`, and what they take and return."""
