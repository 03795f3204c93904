"""AsyncLLM, where vLLM's scripts import it from; `engine.async_llm` defines it."""

from jaxpaged.engine.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
