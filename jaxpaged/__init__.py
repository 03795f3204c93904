"""jaxpaged: a paged-attention engine for language models in JAX and Pallas.

`LLM` and `SamplingParams` are all that most programs need; names are looked up when first used, so that
importing the package does not import jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.lora import LoRARequest
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxpaged.engine.async_llm import AsyncLLM
    from jaxpaged.engine.blocks import Blocks
    from jaxpaged.engine.llm import LLM
    from jaxpaged.engine.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        RequestOutput,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Blocks",
    "CompletionOutput",
    "EngineConfig",
    "InputError",
    "LoRARequest",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]

_HOME = {
    "LLM": "jaxpaged.engine.llm",
    "BeamSearchOutput": "jaxpaged.engine.outputs",
    "BeamSearchSequence": "jaxpaged.engine.outputs",
    "AsyncLLM": "jaxpaged.engine.async_llm",
    "Blocks": "jaxpaged.engine.blocks",
    "CompletionOutput": "jaxpaged.engine.outputs",
    "RequestOutput": "jaxpaged.engine.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
