"""`EngineArgs` and `AsyncEngineArgs` at vLLM's import path."""

from jaxpaged.api.arg_utils import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]
