"""AsyncLLMEngine: vLLM's older name of `AsyncLLM`."""

from jaxpaged.engine.async_llm import AsyncLLM as AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
