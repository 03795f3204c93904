"""jaxpaged: a paged-attention engine for language models in JAX and Pallas.

`LLM` and `SamplingParams` are all that most programs need; names are looked up when first used, so that
importing the package does not import jax.
"""

from typing import TYPE_CHECKING, Any

from jaxpaged import compat
from jaxpaged.api.arg_utils import AsyncEngineArgs, EngineArgs
from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.inputs import PromptType, TextPrompt, TokensPrompt
from jaxpaged.lora import LoRARequest
from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jaxpaged.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxpaged.api.async_llm import AsyncLLM
    from jaxpaged.api.async_llm import AsyncLLM as AsyncLLMEngine
    from jaxpaged.api.llm import LLM
    from jaxpaged.api.llm_engine import LLMEngine
    from jaxpaged.api.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
    from jaxpaged.handover.blocks import Blocks
    from jaxpaged.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )

compat.install()
_name_of_vllms = compat.names_of("")
__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Blocks",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
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
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_HOME = {
    "LLM": "jaxpaged.api.llm",
    "BeamSearchOutput": "jaxpaged.api.outputs",
    "BeamSearchSequence": "jaxpaged.api.outputs",
    "AsyncLLM": "jaxpaged.api.async_llm",
    "AsyncLLMEngine": "jaxpaged.api.async_llm:AsyncLLM",
    "LLMEngine": "jaxpaged.api.llm_engine",
    "Blocks": "jaxpaged.handover.blocks",
    "CompletionOutput": "jaxpaged.api.outputs",
    "RequestOutput": "jaxpaged.api.outputs",
    "ClassificationOutput": "jaxpaged.pooling.outputs",
    "ClassificationRequestOutput": "jaxpaged.pooling.outputs",
    "EmbeddingOutput": "jaxpaged.pooling.outputs",
    "ScoringOutput": "jaxpaged.pooling.outputs",
    "EmbeddingRequestOutput": "jaxpaged.pooling.outputs",
    "PoolingOutput": "jaxpaged.pooling.outputs",
    "PoolingParams": "jaxpaged.pooling.outputs",
    "PoolingRequestOutput": "jaxpaged.pooling.outputs",
    "ScoringRequestOutput": "jaxpaged.pooling.outputs",
}


def __getattr__(name: str) -> Any:
    return compat.look_up(_HOME[name], name) if name in _HOME else _name_of_vllms(name)
