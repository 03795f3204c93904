"""`AsyncLLM` at vLLM's import path."""

from jaxpaged.api.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
