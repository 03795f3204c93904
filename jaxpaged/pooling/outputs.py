"""Parameters and outputs of pooling models. Names are vLLM's."""

import dataclasses
from typing import Any

import numpy as np

from jaxpaged.checks import check, checked_bool, checked_int
from jaxpaged.vllm_names.methods import missing


@dataclasses.dataclass(kw_only=True)
class PoolingParams:
    """A user's choices for a text's vector or score. Raises `InputError` for a wrong value."""

    truncate_prompt_tokens: int | None = None  # keep the last so many tokens; -1: as many as the model takes
    dimensions: int | None = None  # of a vector: its first so many, for models that are trained for it
    use_activation: bool | None = None  # length 1 for a vector, chances for classes; None: the model's own
    task: str | None = None  # vLLM's, as are those below; each method says what it is for
    skip_reading_prefix_cache: bool | None = None  # there is none
    requires_token_ids: bool = False  # outputs have them
    # What must be None: it asks for what is not served.
    late_chunking_params: Any = None
    late_interaction_params: Any = None
    step_tag_id: Any = None
    returned_token_ids: Any = None
    extra_kwargs: Any = None

    def __post_init__(self) -> None:
        for name in ("late_chunking_params", "late_interaction_params", "step_tag_id", "returned_token_ids"):
            rule = (
                "None: it is not served; use pooling_task='token_embed', and what NumPy makes of the vectors"
            )
            check(name, getattr(self, name), rule, getattr(self, name) is None)
        check("extra_kwargs", self.extra_kwargs, "None or {}: no plugin reads it", not self.extra_kwargs)
        if self.truncate_prompt_tokens is not None:
            rule = "None, -1 or a positive int"
            count = checked_int("truncate_prompt_tokens", self.truncate_prompt_tokens, rule, -1)
            check("truncate_prompt_tokens", count, rule, count != 0)
        if self.dimensions is not None:
            checked_int("dimensions", self.dimensions, "None or a positive int", 1)
        if self.use_activation is not None:
            checked_bool("use_activation", self.use_activation)


@dataclasses.dataclass(frozen=True)
class PoolingOutput:
    """The output of a model for a text: [hidden], or [num_tokens, hidden] for each token's own."""

    data: np.ndarray  # float32


@dataclasses.dataclass(frozen=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclasses.dataclass(frozen=True)
class ClassificationOutput:
    """The chances of a text's classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclasses.dataclass(frozen=True)
class ScoringOutput:
    """A score of how well two texts match."""

    score: float


@dataclasses.dataclass(frozen=True)
class PoolingRequestOutput[Output]:
    """The output for one text."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    def __getattr__(self, name: str) -> Any:
        """Raise `AttributeError` that names a replacement for a field of vLLM's."""
        raise missing("PoolingRequestOutput", name)


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
