"""`AsyncLLMEngine`, vLLM's older name of `AsyncLLM`, at vLLM's import path."""

from jaxpaged.api.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
