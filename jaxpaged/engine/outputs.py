"""What a user gets back. Names are vLLM's."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Logprob:
    """What the model gave a token: the natural logarithm of its chance, before temperature and filters."""

    logprob: float
    decoded_token: str | None  # None where the model has no tokenizer


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    index: int  # 0: one answer a prompt
    text: str  # special tokens left out
    token_ids: list[int]  # a stop token included, which `text` leaves out
    finish_reason: Literal["stop", "length", "abort"]
    cumulative_logprob: float | None = None  # where `SamplingParams.logprobs` is not None
    logprobs: list[dict[int, Logprob]] | None = None  # for each place of the answer, by token id


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None where the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finished: bool = True
