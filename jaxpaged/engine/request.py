"""Requests that came through the door, and what comes back for them: deltas with tokens and scores."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.engine.adapters import Adapter
from jaxpaged.engine.arena import Grammar
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.sampling_state import Edit
from jaxpaged.step.channels import DRAFTS
from jaxpaged.step.state import FinishReason


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A request for one answer to a prompt. It came through the door, so nothing that is done with it can
    fail.

    `Door.admit` makes it.
    """

    prompt_token_ids: np.ndarray  # int32
    params: SamplingParams
    priority: int
    salt: int  # the number of its salt and its adapter
    eos_token_ids: tuple[int, ...]  # the model's, unless they are ignored
    stop_token_ids: tuple[int, ...]  # these, and its own
    edits: tuple[Edit, ...]  # of `logit_bias` and `bad_words`
    max_num_tokens: int  # prompt and answer together
    index: int = 0  # which of the prompt's answers; the first one leads, and the others fork from it
    adapter: Adapter | None = None
    grammar: Grammar | None = None  # grammar of the structured output; None: free text
    grammar_opens: int | None = None  # token behind which the grammar begins; None: at the answer's beginning
    beams: BeamSearchParams | None = None  # of a beam search, of which it has a row: the first ones for beams
    is_continued: bool = False  # whether some answers to the prompt are known in part
    continues: tuple[int, ...] = ()  # the answer's first tokens, which are known already
    cache_salt: str | None = None
    # Spans of the prompt that tiers keep: tokens from its beginning, and seconds; 0 seconds: no longer.
    kv_cache_ttl: tuple[tuple[int, float], ...] | None = None
    arguments: tuple[int, ...] = ()  # words of `contracts.processors.words_of`
    is_read_whole: bool = False  # whether nobody reads its tokens before its end
    request_id: int = 0  # rises from request to request, from 1 on; given to it when it is queued

    @property
    def leader_id(self) -> int:
        """Number of the request whose prompt it shares; 0 for none. Answers to a prompt are numbered in their
        order.
        """
        leads = self.index and self.beams is None and not self.is_continued
        return self.request_id - self.index if leads else 0

    @property
    def needs_room(self) -> bool:
        """Whether an adapter or a grammar of it must be on the device while it has a row."""
        return self.adapter is not None or self.grammar is not None

    @property
    def is_followed(self) -> bool:
        """Whether the host follows its grammar."""
        return self.grammar is not None and self.grammar.language is not None

    @property
    def group_size(self) -> int:
        """Number of requests, this one included, that must come into rows with the first one."""
        return 2 * self.beams.beam_width if self.beams is not None and not self.index else 1

    def another(self, params: SamplingParams, index: int) -> "Request":
        """Return the request for another answer to the prompt of this one, the first."""
        grammar = None if self.grammar is None else self.grammar.for_one()
        return dataclasses.replace(self, params=params.of_answer(index), index=index, grammar=grammar)

    def row_of_search(self, index: int) -> "Request":
        """Return the request for one row of a beam search, by this one of its first row.

        A grammar that the host follows has a place for each beam; what has ended needs none.
        """
        has_ended = self.beams is not None and index >= self.beams.beam_width
        grammar = None if has_ended and self.is_followed else self.grammar
        return dataclasses.replace(self, index=index, grammar=grammar)

    @property
    def order(self) -> tuple[int, int]:
        """Order of service: lower comes first."""
        return self.priority, self.request_id


class Score(NamedTuple):
    """The model's log-probability of a token, its rank, and the likeliest tokens in its place."""

    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, in order, as many as were asked for


class Beam(NamedTuple):
    """Standing of an answer in its beam search: cumulative log-probability and rank."""

    cum_logprob: float  # -inf: it is none
    rank: int  # among those that have ended, or among those that have not


@dataclasses.dataclass(frozen=True)
class DraftCounts:
    """Counts of a request's drafts, under vLLM's names."""

    num_spec_steps: int = 0  # steps with drafts
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0  # drafts that were right

    def __add__(self, more: "DraftCounts") -> "DraftCounts":
        """Return the counts of both together."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(more), strict=True)
        return DraftCounts(*(ours + theirs for ours, theirs in pairs))

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the drafts that were right; 0 without drafts."""
        return self.num_accepted_draft_tokens / max(self.num_draft_tokens, 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of the answer per step with drafts, in the mean; 1 without such steps."""
        return 1 + self.num_accepted_draft_tokens / max(self.num_spec_steps, 1)


@dataclasses.dataclass(frozen=True)
class Delta:
    """The next tokens of a request's answer, or all of them. The last delta has a finish reason."""

    request_id: int
    token_ids: list[int]
    scores: list[Score] | None  # of these tokens, where `logprobs` were asked for
    num_hit_tokens: int  # prompt tokens that were found in the prefix cache
    finish_reason: FinishReason = FinishReason.NONE
    # What ended it, if its reason is STOP: a string or a token of the request's own, None for the model's.
    stop_reason: int | str | None = None
    # Scores of the prompt's tokens, None for the first; with the answer's first token, where asked for.
    prompt_scores: list[Score | None] | None = None
    # Whole characters of these tokens and of those held back before. None from an engine without a tokenizer,
    # where no text was wanted, and in the sink of a request without stop strings.
    text: str | None = None
    index: int = 0  # which of the prompt's answers
    beam: "Beam | None" = None  # of what a beam search has found
    weight_versions: tuple[int, ...] = ()  # for each of these tokens, of the weights that sampled it
    num_fetched_tokens: Mapping[str, int] | None = None  # prompt tokens that came from each tier, once
    # Values of channels (`step.channels`) by name: for each of these tokens; of a channel by position for the
    # tokens that were computed for these, in the first delta the prompt's, too; of one by place in the first.
    channels: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def aborted(cls, request: Request) -> "Delta":
        """Return the last delta of a request that never had a row."""
        scores: list[Score] | None = None if request.params.logprobs is None else []
        return cls(request.request_id, [], scores, 0, FinishReason.ABORT, index=request.index)

    @property
    def drafts(self) -> DraftCounts | None:
        """Counts of the drafts for these tokens; None where nothing is drafted, and in beam searches."""
        counts = self.channels.get(DRAFTS.name)
        return None if counts is None else DraftCounts(*counts.sum(axis=0).tolist())

    @property
    def logprobs(self) -> list[float] | None:
        return None if self.scores is None else [score.logprob for score in self.scores]


def device_request_id(request_id: int) -> int:
    """Return the number of a request on the device: an int32, never 0, in which ids of any size wrap around.

    Two requests on the device are less than 2**31 requests apart. So their numbers differ, and the sign of
    the difference, as an int32, tells which came first.
    """
    return ((request_id - 1) % (2**32 - 1) + 1 + 2**31) % 2**32 - 2**31


def since(arrival: int, other: int) -> int:
    """Return how many requests after `other` one came, by their numbers on the device; negative if before."""
    return (int(arrival) - int(other) + 2**31) % 2**32 - 2**31
