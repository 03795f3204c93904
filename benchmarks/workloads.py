"""The workloads every engine is timed on: seeded token ids, and how many new tokens each prompt gets.

Each function is pure: the same seed gives the same workload on every machine, and a workload is a plain
dict that goes through JSON unchanged, so a peer in another Python reads exactly what our engine reads.
Generation is greedy and ignores the end-of-sequence token, so the work does not depend on the answers.

Prompts are random token ids, not text. Speed does not depend on what they say, and nothing is tokenized.
Where tokens are drafted it does: `copyN` and `chatN` are chats with SmolLM2, of the prompts in `texts`.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

# Below lie special tokens; the upper end is within the vocabulary of every model measured.
MIN_TOKEN_ID, MAX_TOKEN_ID = 1000, 40000


class Request(TypedDict):
    """One prompt, the exact number of tokens to generate for it, and what JSON schema they follow."""

    prompt_token_ids: list[int]
    max_tokens: int
    json_schema: NotRequired[str]
    num_answers: NotRequired[int]


class Workload(TypedDict):
    """Requests in the order they arrive, all at once, and how many may run at the same time."""

    name: str
    requests: list[Request]
    max_num_seqs: int


def single(seed: int = 0) -> Workload:
    """Return one stream: a prompt of 64 tokens, 64 new ones."""
    rng = np.random.default_rng(seed)
    return {"name": "single", "requests": [_request(rng, 64, 64)], "max_num_seqs": 1}


def batch16(seed: int = 0) -> Workload:
    """Return sixteen prompts of 48 to 64 tokens, 64 new ones each, all at once."""
    return _short("batch16", 16, seed)


def rollouts(seed: int = 0) -> Workload:
    """Return sixty-four prompts of 48 to 64 tokens, with eight answers of 64 tokens each; 64 run at once."""
    workload = _short("rollouts", 64, seed)
    requests: list[Request] = [{**request, "num_answers": 8} for request in workload["requests"]]
    return {**workload, "requests": requests, "max_num_seqs": 64}


def few_rollouts(seed: int = 0) -> Workload:
    """Return the first four prompts of `rollouts`: to try what measures."""
    workload = rollouts(seed)
    return {**workload, "name": "few_rollouts", "requests": workload["requests"][:4]}


def ragged32(seed: int = 0) -> Workload:
    """Return thirty-two requests, prompts of 16 to 256 tokens, 16 to 128 new ones, all at once."""
    rng = np.random.default_rng(seed)
    requests = [_request(rng, _between(rng, 16, 256), _between(rng, 16, 128)) for _ in range(32)]
    return {"name": "ragged32", "requests": requests, "max_num_seqs": 32}


def ragged64(seed: int = 0) -> Workload:
    """Return sixty-four requests, prompts of 16 to 512 tokens, 16 to 256 new ones; 32 run, 32 wait."""
    rng = np.random.default_rng(seed)
    requests = [_request(rng, _between(rng, 16, 512), _between(rng, 16, 256)) for _ in range(64)]
    return {"name": "ragged64", "requests": requests, "max_num_seqs": 32}


def full32(seed: int = 0) -> Workload:
    """Return thirty-two requests of `ragged64`'s mean lengths, all alike: an always full batch."""
    rng = np.random.default_rng(seed)
    return {"name": "full32", "requests": [_request(rng, 264, 136) for _ in range(32)], "max_num_seqs": 32}


def shared_prefix32(seed: int = 0) -> Workload:
    """Return thirty-two requests with the same first 256 tokens, 16 to 64 of their own, 32 new ones each."""
    rng = np.random.default_rng(seed)
    prefix = _token_ids(rng, 256)
    requests = [_request(rng, _between(rng, 16, 64), 32, prefix) for _ in range(32)]
    return {"name": "shared_prefix32", "requests": requests, "max_num_seqs": 32}


def short2000(seed: int = 0) -> Workload:
    """Return two thousand prompts of three tokens with one new token each; sixteen run at a time."""
    rng = np.random.default_rng(seed)
    return {"name": "short2000", "requests": [_request(rng, 3, 1) for _ in range(2000)], "max_num_seqs": 16}


def chats32(seed: int = 0) -> Workload:
    """Return thirty-two prompts of 48 to 64 tokens, 64 new ones each, all at once."""
    return _short("chats32", 32, seed)


def schemas32(seed: int = 0) -> Workload:
    """Return the requests of `chats32`, each with a JSON schema of its own: a list of any length."""
    workload = chats32(seed)
    for number, request in enumerate(workload["requests"]):
        request["json_schema"] = json.dumps(_schema(number))
    return workload | {"name": "schemas32"}


def _schema(number: int) -> dict[str, Any]:
    """Return a schema that no other number has: names, a choice, integers and flags, in a list."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 16},
        {"type": "integer", "minimum": 0, "maximum": 10**9},
        {"enum": [f"choice {number} {i}" for i in range(6)]},
        {"type": ["boolean", "null"]},
    ]
    return {"type": "array", "items": schema_of_object(number, kinds), "minItems": 1}


def schema_of_object(number: int, kinds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of an object with a field of each kind; no other number has its names."""
    names = [f"field{number}_{i}" for i in range(len(kinds))]
    properties = {name: kinds[(i + number) % len(kinds)] for i, name in enumerate(names)}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def drafted(kind: str, count: int) -> Workload:
    """Return so many chats with SmolLM2: edits of code ("copy") or open questions ("chat"), 96 new tokens."""
    from benchmarks.texts import QUESTIONS, edits
    from jaxpaged.models.loading import SMOLLM2, open_checkpoint

    tokenizer = open_checkpoint(SMOLLM2).tokenizer
    assert tokenizer is not None
    prompts = edits() if kind == "copy" else QUESTIONS
    template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    requests: list[Request] = [
        {"prompt_token_ids": list(tokenizer.encode(template.format(each))), "max_tokens": 96}
        for each in prompts[:count]
    ]
    return {"name": f"{kind}{count}", "requests": requests, "max_num_seqs": count}


WORKLOADS: dict[str, Callable[..., Workload]] = {
    function.__name__: function
    for function in (
        single,
        batch16,
        ragged32,
        ragged64,
        full32,
        shared_prefix32,
        short2000,
        chats32,
        schemas32,
    )
} | {
    f"{kind}{count}": functools.partial(drafted, kind, count)
    for kind in ("copy", "chat")
    for count in (1, 4, 16, 32)
}


def _short(name: str, count: int, seed: int) -> Workload:
    """Return so many prompts of 48 to 64 tokens, 64 new ones each, all at once."""
    rng = np.random.default_rng(seed)
    requests = [_request(rng, _between(rng, 48, 64), 64) for _ in range(count)]
    return {"name": name, "requests": requests, "max_num_seqs": count}


def _request(
    rng: np.random.Generator, num_own: int, max_tokens: int, prefix: list[int] | None = None
) -> Request:
    return {"prompt_token_ids": (prefix or []) + _token_ids(rng, num_own), "max_tokens": max_tokens}


def _token_ids(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(MIN_TOKEN_ID, MAX_TOKEN_ID, size=count, endpoint=True).tolist()


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    return int(rng.integers(low, high, endpoint=True))
