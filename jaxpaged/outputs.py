"""Outputs for users, at vLLM's import path; `api.outputs` and `pooling.outputs` define them."""

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
