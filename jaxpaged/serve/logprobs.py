"""Log-probabilities in OpenAI's two forms, and vLLM's of prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.engine.outputs import Logprob

LEAST = -9999.0  # JSON has no infinity


class TokenNames:
    """What tokens are called in an answer."""

    def __init__(self, tokenizer: Any, *, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def name(self, token: int, known: str | None = None) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        if known is not None:
            return known
        return "" if self._tokenizer is None else str(self._tokenizer.decode([token]))


class CompletionLogprobs:
    """Those of /v1/completions: lists with an entry a token, in which offsets go on from call to call."""

    def __init__(self, names: TokenNames, num_top: int) -> None:
        self._names, self._num_top, self._offset = names, num_top, 0

    def of(self, token_ids: Sequence[int], each: Sequence[Mapping[int, Logprob] | None]) -> dict[str, Any]:
        made: dict[str, list[Any]] = {
            name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        }
        for token, entries in zip(token_ids, each, strict=True):
            known = None if entries is None else entries[token].decoded_token
            name = self._names.name(token, known)
            made["text_offset"].append(self._offset)
            made["tokens"].append(name)
            made["token_logprobs"].append(None if entries is None else _value(entries[token]))
            made["top_logprobs"].append(None if entries is None else self._top(token, entries))
            self._offset += len(name)
        return made

    def _top(self, token: int, entries: Mapping[int, Logprob]) -> dict[str, float]:
        """The likeliest, and the token itself; by their names, of which the likelier token has the first."""
        top: dict[str, float] = {}
        for other, entry in by_rank(entries):
            if (entry.rank or 0) <= self._num_top or other == token:
                top.setdefault(self._names.name(other, entry.decoded_token), _value(entry))
        return top


def chat_logprobs(
    names: TokenNames, num_top: int, token_ids: Sequence[int], each: Sequence[Mapping[int, Logprob]]
) -> dict[str, Any]:
    """Those of /v1/chat/completions: a list with an object a token."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        name = names.name(token, logprob.decoded_token)
        return {"token": name, "logprob": _value(logprob), "bytes": list(name.encode("utf-8", "replace"))}

    return {
        "content": [
            entry(token, entries[token])
            | {
                "top_logprobs": [
                    entry(*other) for other in by_rank(entries) if (other[1].rank or 0) <= num_top
                ]
            }
            for token, entries in zip(token_ids, each, strict=True)
        ]
    }


def prompt_logprobs(each: Sequence[Mapping[int, Logprob] | None] | None) -> list[Any] | None:
    """vLLM's: by token ids, as texts."""
    if each is None:
        return None
    return [
        entries
        and {
            str(token): {
                "logprob": _value(logprob),
                "rank": logprob.rank,
                "decoded_token": logprob.decoded_token,
            }
            for token, logprob in entries.items()
        }
        for entries in each
    ]


def by_rank(entries: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda item: item[1].rank or 0)


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)
