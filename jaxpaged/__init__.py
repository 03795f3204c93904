"""jaxpaged: a paged-attention engine for language models in JAX and Pallas.

`LLM` and `SamplingParams` are all that most programs need; names are looked up when first used, so that
importing the package does not import jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine.arg_utils import AsyncEngineArgs, EngineArgs
from jaxpaged.inputs import PromptType, TextPrompt, TokensPrompt
from jaxpaged.lora import LoRARequest
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxpaged.engine.async_llm import AsyncLLM
    from jaxpaged.engine.async_llm_engine import AsyncLLMEngine
    from jaxpaged.engine.blocks import Blocks
    from jaxpaged.engine.llm import LLM
    from jaxpaged.engine.llm_engine import LLMEngine
    from jaxpaged.engine.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        RequestOutput,
    )
    from jaxpaged.engine.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Blocks",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "InputError",
    "LLMEngine",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
]

_HOME = {
    "LLM": "jaxpaged.engine.llm",
    "BeamSearchOutput": "jaxpaged.engine.outputs",
    "BeamSearchSequence": "jaxpaged.engine.outputs",
    "AsyncLLM": "jaxpaged.engine.async_llm",
    "AsyncLLMEngine": "jaxpaged.engine.async_llm_engine",
    "LLMEngine": "jaxpaged.engine.llm_engine",
    "Blocks": "jaxpaged.engine.blocks",
    "CompletionOutput": "jaxpaged.engine.outputs",
    "RequestOutput": "jaxpaged.engine.outputs",
    "ClassificationRequestOutput": "jaxpaged.engine.pooling.outputs",
    "EmbeddingRequestOutput": "jaxpaged.engine.pooling.outputs",
    "PoolingOutput": "jaxpaged.engine.pooling.outputs",
    "PoolingParams": "jaxpaged.engine.pooling.outputs",
    "PoolingRequestOutput": "jaxpaged.engine.pooling.outputs",
    "ScoringRequestOutput": "jaxpaged.engine.pooling.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
