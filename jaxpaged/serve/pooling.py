"""Routes of a pooling model: vectors, classes, scores and ranks of texts."""

import base64
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxpaged.checks import InputError, checked_int
from jaxpaged.pooling.encoding import joined, to_bytes
from jaxpaged.pooling.outputs import PoolingRequestOutput
from jaxpaged.serve.json_route import JsonRoute
from jaxpaged.serve.pooling_schemas import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxpaged.serve.pooling_service import PoolingService
from jaxpaged.serve.replies import reply

router = APIRouter(route_class=JsonRoute)


def _service(request: Request) -> PoolingService:
    service: PoolingService = request.app.state.service
    return service


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Answer OpenAI's /v1/embeddings: a vector for each text."""
    service, params = _service(request), body.params(body.dimensions)
    outputs = await service.run(lambda: service.pooling.embed(body.input, params))
    arrays = [_finite(out.outputs.embedding) for out in outputs]
    return _encoded(service, request, body, ("embd", "embedding", "embedding"), arrays, outputs)


@router.post("/pooling")
async def pooling(body: EmbeddingRequest, request: Request) -> Response:
    """Answer vLLM's /pooling: the pooled output of each text."""
    service, params = _service(request), body.params(body.dimensions)
    task = body.task or ("classify" if service.pooling.is_classifier else "embed")
    outputs = await service.run(lambda: service.pooling.encode(body.input, params, pooling_task=task))
    arrays = [_finite(out.outputs.data) for out in outputs]
    return _encoded(service, request, body, ("pool", "pooling", "data"), arrays, outputs)


@router.post("/classify")
async def classify(body: ClassificationRequest, request: Request) -> Response:
    """Answer vLLM's /classify: the probabilities of each text's classes, and the likeliest class's name."""
    service, params = _service(request), body.params()
    outputs = await service.run(lambda: service.pooling.classify(body.input, params))
    data = [
        {
            "index": i,
            "label": service.pooling.labels[int(np.argmax(out.outputs.probs))],
            "probs": out.outputs.probs,
            "num_classes": out.outputs.num_classes,
        }
        for i, out in enumerate(outputs)
    ]
    return _listed(service, request, body, "classify", data, outputs)


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request) -> Response:
    """Answer vLLM's /score: how well pairs of texts match."""
    service, params, (first, second) = _service(request), body.params(), body.pair()
    outputs = await service.run(lambda: service.pooling.score(first, second, params))
    data = [{"index": i, "object": "score", "score": out.outputs.score} for i, out in enumerate(outputs)]
    return _listed(service, request, body, "score", data, outputs)


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Answer Jina's and Cohere's /rerank: documents by how well they match a query, the best first."""
    service, params, documents = _service(request), body.params(), body.texts()
    max_documents = (
        len(documents) if body.top_n is None else checked_int("top_n", body.top_n, "an int >= 0", 0)
    )
    outputs = await service.run(lambda: service.pooling.score(body.query, documents, params))
    order = sorted(range(len(outputs)), key=lambda i: (-outputs[i].outputs.score, i))[
        : max_documents or len(documents)
    ]
    results = [
        {"index": i, "document": {"text": documents[i]}, "relevance_score": outputs[i].outputs.score}
        for i in order
    ]
    return reply(
        {
            "id": f"rerank-{request.state.request_id}",
            "model": service.check_model(body.model),
            "usage": {"total_tokens": _num_tokens(outputs)},
            "results": results,
        }
    )


def _finite(values: Any) -> np.ndarray:
    """Return numbers as float32. Raises `InputError` where one is not finite."""
    array = np.asarray(values, np.float32)
    if not np.isfinite(array).all():
        raise InputError("the model's numbers are not finite for this text")
    return array


def _encoded(
    service: PoolingService,
    request: Request,
    body: EmbeddingRequest,
    names: tuple[str, str, str],
    arrays: Sequence[np.ndarray],
    outputs: Sequence[PoolingRequestOutput[Any]],
) -> Response:
    """Answer with numbers as lists or base64 in JSON, or as one body of bytes.

    `names`: the prefix of the answer's id, the kind of an entry, and the key of its numbers.
    """
    prefix, kind, key = names
    encoding, dtype, order = body.encoding_format, body.embed_dtype, body.endianness
    if encoding not in ("bytes", "bytes_only"):
        data = [
            {
                "index": i,
                "object": kind,
                key: base64.b64encode(to_bytes(array, dtype, order)).decode()
                if encoding == "base64"
                else array.tolist(),
            }
            for i, array in enumerate(arrays)
        ]
        return _listed(service, request, body, prefix, data, outputs)
    content, places = joined(arrays, dtype, order)
    count = _num_tokens(outputs)
    metadata = {
        "id": f"{prefix}-{request.state.request_id}",
        "created": service.now(),
        "model": service.check_model(body.model),
        "data": [dataclasses.asdict(place) for place in places],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    headers = {"metadata": json.dumps(metadata)} if encoding == "bytes" else None
    return Response(content, headers=headers, media_type="application/octet-stream")


def _num_tokens(outputs: Sequence[PoolingRequestOutput[Any]]) -> int:
    return sum(len(out.prompt_token_ids) for out in outputs)


def _listed(
    service: PoolingService,
    request: Request,
    body: PoolingRequest,
    prefix: str,
    data: list[dict[str, Any]],
    outputs: Sequence[PoolingRequestOutput[Any]],
) -> Response:
    count = _num_tokens(outputs)
    return reply(
        {
            "id": f"{prefix}-{request.state.request_id}",
            "object": "list",
            "created": service.now(),
            "model": service.check_model(body.model),
            "data": data,
            "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
        }
    )
