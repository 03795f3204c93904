"""What a user gets back, at vLLM's import path; `api.outputs` and `pooling.outputs` define it."""

from jaxpaged.api.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from jaxpaged.engine.handle import RequestMetrics
from jaxpaged.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringRequestOutput",
]
