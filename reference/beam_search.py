"""Beam search over whole sequences, without rows and blocks: which answers to a prompt it gives.

As vLLM defines it. transformers' differs in three things: it takes the best 2 x width of all candidates, not
2 x width of each beam; it counts only the answer's tokens for the length; and what ends beyond the best width
candidates of a step is dropped. Where nothing ends early, both give the same answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

LogProbs = Callable[[list[int]], np.ndarray]  # of each token behind these: float32, [vocab_size]


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A prompt and an answer to it."""

    tokens: list[int]
    cum_logprob: np.float32
    has_ended: bool = False

    def score(self, length_penalty: float) -> float:
        """Return the number by which sequences of different lengths compare. A token that ends one adds no
        length.
        """
        length = np.float32(len(self.tokens) - self.has_ended)
        return float(self.cum_logprob * length ** np.float32(-length_penalty))


@dataclass
class BeamSearch:
    """One search: `step` until it is done.

    end_token_ids: what ends a sequence.
    max_num_tokens: prompt and answer end at so many.
    """

    prompt: Sequence[int]
    width: int
    max_num_tokens: int
    end_token_ids: Sequence[int] = ()
    length_penalty: float = 1.0
    beams: list[Hypothesis] = field(default_factory=list)  # the best first
    ended: list[Hypothesis] = field(default_factory=list)  # the best `width`, the best first

    def __post_init__(self) -> None:
        self.beams = [Hypothesis(list(self.prompt), np.float32(0))]

    @property
    def is_done(self) -> bool:
        return not self.beams or len(self.beams[0].tokens) >= self.max_num_tokens

    @property
    def is_decided(self) -> bool:
        """Whether no unfinished beam can still be among the answers, since sums of logarithms never rise."""
        if not self.beams:
            return True
        if len(self.ended) < self.width:
            return False
        length = self.max_num_tokens if self.length_penalty > 0 else len(self.beams[0].tokens)
        bound = self.beams[0].cum_logprob * np.float32(length) ** np.float32(-self.length_penalty)
        return bool(self.ended[-1].score(self.length_penalty) >= bound)

    def step(self, logprobs: Sequence[np.ndarray]) -> list[int]:
        """Advance the search by one token from each beam's log-probabilities; return the index of each new
        beam's parent.
        """
        going: list[tuple[int, Hypothesis]] = []
        for parent, (beam, values) in enumerate(zip(self.beams, logprobs, strict=True)):
            likeliest = np.argsort(-values, kind="stable")[: 2 * self.width]
            for token in map(int, likeliest):
                cum = np.float32(beam.cum_logprob + values[token])
                if cum == -np.inf:  # barred
                    continue
                ends = token in self.end_token_ids
                longer = Hypothesis([*beam.tokens, token], cum, ends)
                if ends:
                    self.ended.append(longer)
                else:
                    going.append((parent, longer))
        going.sort(key=lambda each: -each[1].cum_logprob)
        self.ended.sort(key=lambda each: -each.score(self.length_penalty))
        del self.ended[self.width :]
        self.beams = [beam for _, beam in going[: self.width]]
        return [parent for parent, _ in going[: self.width]]

    @property
    def answers(self) -> list[Hypothesis]:
        """The best `width` of all, the best first; those that have ended first among equal ones."""
        both = self.ended + self.beams
        return sorted(both, key=lambda each: -each.score(self.length_penalty))[: self.width]


def beam_search(logprobs_of: LogProbs, search: BeamSearch) -> list[Hypothesis]:
    """Run the search to its end, and return the answers."""
    while not search.is_done:
        search.step([logprobs_of(beam.tokens) for beam in search.beams])
    return search.answers
