"""The sampler in NumPy, one row at a time: what each token's chance is after every option, and what is told
of it.

The options apply in the order of this file: `edited` logits, from them `probabilities`; log-probabilities and
ranks are those of the logits as the model gave them, or what `told` says; `stopped` ends the text.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenAutomaton:
    """Automaton over tokens that constrains an answer.

    moves: for each state the tokens that may follow, each with the state that it leads to.
    accepting: states at which the answer may end.
    end_tokens: the tokens that end it there.
    opens: the token behind which it begins; None: it begins with the answer.
    begins: the token that lets it wait for `opens`, where an answer begins with it; None: it always waits.
    """

    moves: Sequence[Mapping[int, int]]
    accepting: Collection[int]
    end_tokens: Collection[int]
    opens: int | None = None
    begins: int | None = None

    def state(self, answer: Sequence[int]) -> int | None:
        """Return the state behind an answer, the same behind its end; -1 behind a token that may not come;
        None before its beginning.
        """
        state = 0 if self.opens is None or self.begins is not None else None
        for place, token in enumerate(answer):
            if place == 0 and token == self.begins:
                state = None
            elif state is None:
                state = 0 if token == self.opens else None
            elif state >= 0 and not (token in self.end_tokens and state in self.accepting):
                state = self.moves[state].get(token, -1)
        return state

    def allowed(self, answer: Sequence[int]) -> set[int] | None:
        """Return the tokens that may follow an answer; None: all."""
        state = self.state(answer)
        if state is None or state < 0:
            return None
        allowed = {*self.moves[state], *(self.end_tokens if state in self.accepting else ())}
        return allowed | ({self.begins} if self.begins is not None and not answer else set())

    def forced(self, answer: Sequence[int], max_tokens: int) -> list[int]:
        """Return the tokens that alone may follow an answer, one behind the other, without its end."""
        forced: list[int] = []
        while len(forced) < max_tokens:
            may = self.allowed([*answer, *forced])
            if may is None or len(may) != 1 or may & {*self.end_tokens}:
                break
            forced += may
        return forced


def edited(
    logits: np.ndarray,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    *,
    automaton: TokenAutomaton | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> np.ndarray:
    """Return the logits of the token after `prompt` and `answer`, [vocab], in float64, with penalties and
    bans.

    A bad word is a sequence of tokens: its last one is barred where the answer ends with those before. Where
    the other options would bar all that the automaton allows, they do not count.
    """
    result = logits.astype(np.float64)
    fitting = None if automaton is None else automaton.allowed(answer)
    if fitting is not None:
        result[[token for token in range(len(result)) if token not in fitting]] = -np.inf
    before_others = result.copy()
    if allowed_token_ids is not None:
        barred = np.ones(len(result), bool)
        barred[list(allowed_token_ids)] = False
        result[barred] = -np.inf
    for *before, last in bad_words:
        if len(before) <= len(answer) and list(answer[len(answer) - len(before) :]) == before:
            result[last] = -np.inf
    if len(answer) < min_tokens:
        result[list(stop_token_ids)] = -np.inf
    for token, bias in (logit_bias or {}).items():
        result[token] += bias
    for token in {*prompt, *answer}:
        more = result[token] > 0
        result[token] = result[token] / repetition_penalty if more else result[token] * repetition_penalty
    for token, count in Counter(answer).items():
        result[token] -= frequency_penalty * count + presence_penalty
    return before_others if fitting is not None and result.max() == -np.inf else result


def probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Return the probability of each token of one row, [vocab], in float64.

    Temperature 0 gives all to the first likeliest token. So does a row whose largest logit is infinite or
    NaN, or in which every token is barred.

    Filters apply in the order min_p, top_k, top_p, each to what the one before has left. Tokens are ranked by
    logit, equal ones by their id, the lower first; the likeliest always stays.
    """
    if temperature == 0 or not np.isfinite(logits.max()):
        return np.eye(len(logits))[first_likeliest(logits)]
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    chance = np.exp(scaled)
    ranked = [token for token in ranking(logits) if chance[token] >= min_p]
    if top_k:
        ranked = ranked[:top_k]
    chance /= sum(chance[token] for token in ranked)
    kept: list[int] = []
    mass = 0.0
    for token in ranked:
        if kept and top_p < 1 and mass >= top_p:
            break
        kept.append(token)
        mass += chance[token]
    result = np.zeros(len(logits))
    result[kept] = chance[kept] / chance[kept].sum()
    return result


def support(
    changed: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """Return the tokens of one row that one is chosen from, rising; `changed` as `edited` returns it."""
    left: list[int] = np.flatnonzero(probabilities(changed, temperature, top_k, top_p, min_p)).tolist()
    return left


def first_likeliest(logits: np.ndarray) -> int:
    """Return the first of the largest logits; the last token of a row with NaN in it."""
    return len(logits) - 1 if np.isnan(logits).any() else int(np.argmax(logits))


def ranking(logits: np.ndarray) -> list[int]:
    """Return the tokens by falling logit, equal ones by id."""
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of each token's share of `softmax(logits)`, in float64, over the last
    axis.
    """
    below = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return below - np.log(np.exp(below).sum(axis=-1, keepdims=True))


def candidate_logprobs(logits: np.ndarray, candidates: Sequence[Sequence[int]], start: int = 0) -> np.ndarray:
    """Return the log-probabilities of given candidates for the tokens behind places of a text.

    logits: [places, vocabulary], behind each place.
    candidates: for each place from `start` on, but for the last, token ids; -1 and what is missing is none.

    Minus infinity stands for none.
    """
    table = np.full((len(candidates), max(map(len, candidates))), -np.inf)
    for row, ids in enumerate(candidates):
        row_logprobs = logprobs(logits[start + row])
        for column, token in enumerate(ids):
            if token >= 0:
                table[row, column] = row_logprobs[token]
    return table


def reported(
    logits: np.ndarray,
    changed: np.ndarray,
    mode: str,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Return the log-probabilities or logits of one row, [vocab], in float64, under a `logprobs_mode`.

    `logits`: as the model gave them; `changed`: as `edited` returns them. "raw" numbers are of the first.
    "processed" ones are of the distribution that is drawn from: a token without a chance has minus infinity.
    Greedy rows, and those in which nothing can be drawn, have those of `changed`.
    """
    if mode.startswith("raw"):
        return logits.astype(np.float64) if mode == "raw_logits" else logprobs(logits)
    if temperature == 0 or not np.isfinite(changed.max()):
        return changed.astype(np.float64) if mode == "processed_logits" else logprobs(changed)
    chance = probabilities(changed, temperature, top_k, top_p, min_p)
    excluded = chance == 0
    if mode == "processed_logits":
        return np.where(excluded, -np.inf, changed.astype(np.float64) / temperature)
    return np.log(chance, out=np.full(len(chance), -np.inf), where=~excluded)


def chosen(sampled: int, answer: Sequence[int], trace: Sequence[int] = ()) -> int:
    """Return the token after `answer`: that of a trace which the answer is to follow, where it has one.

    What is told of the token is told of a sampled one: the logits do not know of the trace.
    """
    return trace[len(answer)] if len(answer) < len(trace) else sampled


def stopped(
    pieces: Sequence[str], stop: Sequence[str], *, include: bool = False, min_tokens: int = 0
) -> tuple[int, str, str | None]:
    """Find the first stop string to be complete; return the tokens until then, the text left, and its index.

    `pieces`: what each token adds to the text. Of strings that are complete with the same token the first to
    end counts, and of these the first in the list. One that is complete within the first `min_tokens` tokens
    does not.
    """
    text = ""
    for num_tokens, piece in enumerate(pieces, 1):
        ends = range(len(text) + 1, len(text) + len(piece) + 1)
        text += piece
        if num_tokens <= min_tokens:
            continue
        for end in ends:
            for each in stop:
                if text[:end].endswith(each):
                    return num_tokens, text[: end if include else end - len(each)], each
    return len(pieces), text, None
