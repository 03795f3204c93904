"""`LLMEngine` at vLLM's import path."""

from jaxpaged.api.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
