"""Scores of given completions: the log-probabilities that the engine gives each token of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.api.outputs import RequestOutput
from jaxpaged.api.prompts import Prompt, as_many, split_prompt
from jaxpaged.checks import InputError, check
from jaxpaged.sampling_params import SamplingParams


@dataclass(frozen=True)
class CompletionScore:
    """Log-probabilities of one completion's tokens behind its prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]  # of the completion
    logprobs: np.ndarray  # float32 [len(token_ids)], the model's own: natural logarithms, at temperature 1

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log-probabilities."""
        return float(np.sum(self.logprobs, dtype=np.float64))


def scored(
    prompts: Prompt | Sequence[Prompt],
    completions: Any,
    tokenize: Callable[..., list[int]],
    generate: Callable[[list[dict[str, Any]], SamplingParams], list[RequestOutput]],
) -> list[CompletionScore]:
    """Return the scores of each prompt's completion, by prompts of both whose tokens are scored.

    completions: as many as prompts, each a text or token ids, not empty. One prompt may have one completion
        in place of a list.

    Raises `InputError` for other numbers of them, and for empty ones.
    """
    many = as_many(prompts)
    endings = as_many(completions)
    if len(many) != len(endings):
        raise InputError(
            f"completions has {len(endings)} entries, must have one for each of {len(many)} prompts"
        )
    asked, pairs = [], []
    for i, (prompt, ending) in enumerate(zip(many, endings, strict=True)):
        text, token_ids, salt = split_prompt(prompt)
        seconds = prompt.get("kv_cache_ttl") if isinstance(prompt, Mapping) else None
        check("kv_cache_ttl", seconds, "left out here", seconds is None)
        first = list(tokenize(str(text)) if token_ids is None else token_ids)
        answer, ids, _ = split_prompt(ending)
        rest = list(tokenize(str(answer), add_special_tokens=False) if ids is None else ids)
        check(f"completion {i}", rest, "a text or token ids, not empty", len(rest) > 0)
        check(f"prompt {i}", first, "a text or token ids, not empty", len(first) > 0)
        pairs.append((first, rest))
        asked.append({"prompt_token_ids": [*first, *rest], **({"cache_salt": salt} if salt else {})})
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    return [
        CompletionScore(first, rest, _logprobs(output, len(first)))
        for (first, rest), output in zip(pairs, generate(asked, params), strict=True)
    ]


def _logprobs(output: RequestOutput, first: int) -> np.ndarray:
    """Return the log-probabilities of a prompt's tokens from `first` on."""
    prompt_logprobs, ids = output.prompt_logprobs, output.prompt_token_ids
    assert prompt_logprobs is not None
    assert ids is not None
    each = zip(prompt_logprobs[first:], ids[first:], strict=True)
    return np.array([by_token[token].logprob for by_token, token in each if by_token is not None], np.float32)
