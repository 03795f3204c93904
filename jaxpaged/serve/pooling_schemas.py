"""Requests to a pooling model, field by field: OpenAI's, Cohere's and vLLM's."""

from typing import Any, Literal

from pydantic import Field

from jaxpaged.checks import InputError
from jaxpaged.pooling.encoding import EmbedDtype, Endianness
from jaxpaged.pooling.outputs import PoolingParams
from jaxpaged.serve.schemas import ModelRequest

Input = str | list[str] | list[int] | list[list[int]]
Texts = str | list[str]


class PoolingRequest(ModelRequest):
    """Fields that all requests to a pooling model have."""

    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None  # vLLM's former name, for vectors
    activation: bool | None = None  # and for classes

    def params(self, dimensions: int | None = None) -> PoolingParams:
        """Return the pooling parameters of a request. Raises `InputError`."""
        given = {each for each in (self.use_activation, self.normalize, self.activation) if each is not None}
        if len(given) > 1:
            raise InputError("use_activation, normalize and activation must not contradict each other")
        return PoolingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            dimensions=dimensions,
            use_activation=next(iter(given), None),
        )


class EmbeddingRequest(PoolingRequest):
    """/v1/embeddings and /pooling."""

    input: Input
    # "bytes" is a body of all numbers, with their places in the header `metadata`; "bytes_only" without.
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = "float"
    embed_dtype: EmbedDtype = "float32"  # of base64 and bytes
    endianness: Endianness = "native"
    dimensions: int | None = None
    task: str | None = None  # for /pooling: "embed", "classify" or "token_embed"


class ClassificationRequest(PoolingRequest):
    """/classify."""

    input: Input


class ScoreRequest(PoolingRequest):
    """/score: under vLLM's names, of which the first pair is the older one."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def pair(self) -> tuple[Texts, Texts]:
        """Return both sides of the texts to compare.

        Raises `InputError` unless each is given exactly once.
        """
        given = [
            (first, second)
            for first, second in (
                (self.text_1, self.text_2),
                (self.queries, self.documents),
                (self.data_1, self.data_2),
            )
            if first is not None and second is not None
        ]
        if len(given) != 1:
            raise InputError("the body must have text_1 and text_2, or queries and documents")
        return given[0]


class RerankRequest(PoolingRequest):
    """/rerank, as Jina's and Cohere's clients ask."""

    query: str
    documents: list[str | dict[str, Any]] = Field(min_length=1)
    top_n: int | None = None

    def texts(self) -> list[str]:
        """Return the documents' texts. Raises `InputError` for a document without one."""
        texts = []
        for i, document in enumerate(self.documents):
            text = document if isinstance(document, str) else document.get("text")
            if not isinstance(text, str):
                raise InputError(f"documents.{i} must be a text, or an object with a text")
            texts.append(text)
        return texts
