"""LLMEngine, where vLLM's scripts import it from; `engine.llm_engine` defines it."""

from jaxpaged.engine.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
