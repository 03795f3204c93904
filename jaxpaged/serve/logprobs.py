"""Log-probabilities in OpenAI's two forms, and vLLM's of prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.api.outputs import Logprob
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text.detokenizer import Detokenizer
from jaxpaged.text.vocabulary import vocabulary_of

LEAST = -9999.0  # JSON has no infinity
NEARBY = 8  # characters in which a token of a prompt is looked for, where it is not at its place


class TokenNames:
    """Names of tokens in an answer, and their bytes."""

    def __init__(self, tokenizer: Any, *, as_ids: bool) -> None:
        self._vocabulary = None if tokenizer is None else vocabulary_of(tokenizer)
        self._as_ids = as_ids

    def name(self, token: int, known: str | None = None) -> str:
        """Return the token's name; `known` is its text, where that has been found before."""
        if self._as_ids:
            return by_id(token)
        if known is not None:
            return known
        return "" if self._vocabulary is None else self._vocabulary.name(token)

    def bytes_of(self, token: int) -> list[int] | None:
        """Return the token's own bytes, which may be a part of a character; None without a tokenizer."""
        return None if self._vocabulary is None else list(self._vocabulary.raw(token))


class TextOffsets:
    """Offsets, in characters, of one choice's tokens in its text.

    A token's offset is that of the character that its first byte belongs to. Tokens of a stop string that was
    cut keep the offsets they would have without it: at the text's end, and beyond.
    """

    def __init__(
        self, tokenizer: Any, params: SamplingParams, prompt_token_ids: np.ndarray, echo: str = ""
    ) -> None:
        """Start at the beginning of a choice's text.

        echo: the prompt's text, where the choice's text begins with it.
        """
        self._tokenizer, self._echo = tokenizer, echo
        self._answer: Detokenizer | None = None
        if tokenizer is not None:
            self._answer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_token_ids=prompt_token_ids,
            )

    def of_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Return where the prompt's tokens begin in the echo.

        A special token or a space that is not in the text (the tokenizer has added it) has no width. Where
        the tokenizer changed the text before it cut it, a token is looked for nearby.
        """
        if self._tokenizer is None:
            return [0] * len(token_ids)
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        special, text, end, places = vocabulary_of(self._tokenizer).special, self._echo, 0, []
        for token in token_ids:
            known = detokenizer.step(token).known
            start = end
            if not text.startswith(known, end):
                bare = known.lstrip(" ")
                bare_start = text.find(bare, end, end + len(known) + NEARBY)
                if token in special or not bare:
                    known = ""
                elif bare_start >= 0:
                    start, known = bare_start, bare
            end = min(start + len(known), len(text))
            places.append(start)
        return places

    def next(self, token: int) -> int:
        """Return where the answer's next token begins."""
        if self._answer is None:
            return len(self._echo)
        place = len(self._echo) + self._answer.num_known
        self._answer.step(token)
        return place


class CompletionLogprobs:
    """Log-probabilities of one choice of /v1/completions: lists with an entry for each token.

    Offsets continue from one call to the next.
    """

    def __init__(self, names: TokenNames, num_top: int, places: TextOffsets) -> None:
        self._names, self._num_top, self._places = names, num_top, places

    def of(
        self,
        token_ids: Sequence[int],
        each: Sequence[Mapping[int, Logprob] | None],
        num_prompt_tokens: int = 0,
    ) -> dict[str, Any]:
        """Return the lists; the first `num_prompt_tokens` tokens are the prompt's."""
        places = self._places.of_prompt(token_ids[:num_prompt_tokens]) if num_prompt_tokens else []
        made: dict[str, list[Any]] = {
            name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        }
        made["text_offset"] = places + [self._places.next(token) for token in token_ids[num_prompt_tokens:]]
        for token, entries in zip(token_ids, each, strict=True):
            known = None if entries is None else entries[token].decoded_token
            made["tokens"].append(self._names.name(token, known))
            made["token_logprobs"].append(None if entries is None else _value(entries[token]))
            made["top_logprobs"].append(None if entries is None else self._top(token, entries))
        return made

    def _top(self, token: int, entries: Mapping[int, Logprob]) -> dict[str, float]:
        """Return the likeliest, and the token itself, by name.

        Of tokens with the same name, the token itself or else the likeliest has it; others go by their ids.
        """
        token_name, top = self._names.name(token, entries[token].decoded_token), dict[str, float]()
        for other, entry in by_rank(entries):
            if other == token:
                top[token_name] = _value(entry)
            elif (entry.rank or 0) <= self._num_top:
                name = self._names.name(other, entry.decoded_token)
                top[by_id(other) if name == token_name or name in top else name] = _value(entry)
        return top


def by_id(token: int) -> str:
    """Return the name of a token by its id alone."""
    return f"token_id:{token}"


def chat_logprobs(
    names: TokenNames, num_top: int, token_ids: Sequence[int], each: Sequence[Mapping[int, Logprob]]
) -> dict[str, Any]:
    """Return the log-probabilities in the form of /v1/chat/completions: one object for each token, with the
    token's bytes.
    """

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        name = names.name(token, logprob.decoded_token)
        return {"token": name, "logprob": _value(logprob), "bytes": names.bytes_of(token)}

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
    """Return vLLM's `prompt_logprobs`: for each token of a prompt a mapping by token ids, as texts."""
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
