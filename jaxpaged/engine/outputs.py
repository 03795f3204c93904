"""What a user gets back. Names are vLLM's."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    index: int  # 0: one answer a prompt
    text: str  # special tokens left out
    token_ids: list[int]  # a stop token included
    finish_reason: Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None  # None where the prompt came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
