"""Who has which row, as the host knows it, and what the reports of runs tell of them. For one thread only."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxpaged.engine.request import Beam, Delta, Request, Score, arrival_of
from jaxpaged.sampling import Scores
from jaxpaged.step.report import Report
from jaxpaged.step.state import MAX_STEPS, FinishReason, Phase
from jaxpaged.step.step import PromptScores

# Phases of requests in rows that are not held for others, and do not run.
WAITS = (Phase.WAITING, Phase.SWAPPED, Phase.FOLLOWING)


@dataclasses.dataclass
class Place:
    """A row that has a request."""

    request: Request
    answer: list[int]  # tokens read so far
    is_aborted: bool = False
    prompt_scores: dict[int, list[Score]] = dataclasses.field(default_factory=dict)  # by a tile's first place
    scores: list[Score] = dataclasses.field(default_factory=list)  # of the answer, in a beam search

    @property
    def arrival(self) -> int:
        return arrival_of(self.request.request_id)

    def scores_of_prompt(self) -> list[Score | None] | None:
        """What was told of the prompt's tokens, where it is wanted and the answer has not begun."""
        if self.answer or self.request.params.prompt_logprobs is None:
            return None
        return [None, *(score for _, tile in sorted(self.prompt_scores.items()) for score in tile)]


class Places:
    """All rows, those of each group of devices one after the other."""

    def __init__(self, num_rows: int) -> None:
        self._places: list[Place | None] = [None] * num_rows
        # Of each place, for NumPy: its arrival (0 if it is free), tokens known, phase when last heard of.
        self._arrivals, self._num_tokens, self._phases = np.zeros((3, num_rows), np.int32)
        # And whether log-probabilities are wanted of its answer, and of its prompt.
        self._wants_scores, self._wants_prompt_scores = np.zeros((2, num_rows), bool)
        self._is_beam = np.zeros(num_rows, bool)  # or holds what has ended of a beam search
        self._has_run = np.zeros(num_rows, bool)
        # The number of the stay in each row, 0 if it is free. A request that leaves its row and comes back is
        # called by the same arrival, but that is another stay.
        self._stays = np.zeros(num_rows, np.int64)
        self._num_stays = 0

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self._places)

    def __getitem__(self, row: int) -> Place | None:
        return self._places[row]

    def taken(self) -> Iterator[tuple[int, Place]]:
        """The rows that have requests."""
        return ((row, place) for row, place in enumerate(self._places) if place is not None)

    @property
    def has_any(self) -> bool:
        return bool(self._arrivals.any())

    @property
    def stays(self) -> np.ndarray:
        """Who is in which row now, [num_rows] int64: what `read` takes beside the report of a run that is
        dispatched now.
        """
        return self._stays.copy()

    @property
    def free_rows(self) -> np.ndarray:
        return np.flatnonzero(self._arrivals == 0)

    @property
    def num_waiting(self) -> int:
        return int(np.isin(self._phases[self._arrivals != 0], WAITS).sum())

    @property
    def wants_scores(self) -> bool:
        return bool(self._wants_scores.any())

    @property
    def wants_prompt_scores(self) -> bool:
        return bool(self._wants_prompt_scores.any())

    def waiting(self) -> list[tuple[tuple[int, int], int]]:
        """The order and the row of each that can be taken back without loss: new or preempted, and alone."""
        waits = (self._arrivals != 0) & np.isin(self._phases, (Phase.WAITING, Phase.SWAPPED))
        return [
            (place.request.order, row)
            for row in np.flatnonzero(waits).tolist()
            if (place := self._places[row]) and not place.is_aborted and place.request.beams is None
        ]

    def take(self, row: int, request: Request, answer: list[int]) -> None:
        """Give a free row to a request of which this is known."""
        place = self._places[row] = Place(request, answer)
        self._arrivals[row] = place.arrival
        self._num_stays += 1
        self._stays[row] = self._num_stays
        self._num_tokens[row] = len(request.prompt_token_ids) + len(answer)
        self._phases[row] = Phase.WAITING
        self._wants_scores[row] = request.params.logprobs is not None
        self._wants_prompt_scores[row] = request.params.prompt_logprobs is not None
        self._is_beam[row] = request.beams is not None
        self._has_run[row] = False

    def leave(self, row: int) -> None:
        self._places[row] = None
        self._arrivals[row] = self._stays[row] = 0
        self._wants_scores[row] = self._wants_prompt_scores[row] = self._is_beam[row] = False

    def read(
        self, report: Report, prompts: PromptScores | None, stays: np.ndarray
    ) -> tuple[list[Delta], list[int]]:
        """Take what a report, of NumPy arrays, tells that was not known; who has ended leaves.

        prompts: what the report tells of prompts, where that is wanted.
        stays: what `stays` was when the run was dispatched. A report says nothing of a row that somebody has
            been given since, be it to the same request again.

        Returns: the deltas, and the requests that this report is the first to see run.
        """
        told = (self._stays != 0) & (self._stays == stays)
        if prompts is not None:
            self._note_prompts(prompts, told)
        num_new = report.num_tokens - self._num_tokens[report.origin]
        changed = told & ((num_new != 0) | (report.finish_reason != 0))
        self._phases[told], self._num_tokens[told] = report.phase[told], report.num_tokens[told]
        begins = told & ~self._has_run & ((report.phase == Phase.RUNNING) | (num_new != 0))
        self._has_run |= begins
        first_run = [p.request.request_id for row in np.flatnonzero(begins) if (p := self._places[row])]
        deltas = self._deltas(report, np.flatnonzero(changed & ~self._is_beam), num_new)
        if self._is_beam.any():
            deltas += self._follow_beams(report, np.flatnonzero(changed & self._is_beam), num_new)
        for row in np.flatnonzero(told & (report.finish_reason != 0)).tolist():
            self.leave(row)
        return deltas, first_run

    def _deltas(self, report: Any, rows: np.ndarray, num_new: Any) -> list[Delta]:
        """These rows' newest `num_new` tokens: the report has each row's last MAX_STEPS, oldest first."""
        ends = np.minimum(report.num_tokens, MAX_STEPS)
        told = report.new_token_ids, report.num_hit_tokens, report.finish_reason
        columns = [column[rows].tolist() for column in (ends, num_new, *told)]
        deltas = []
        for row, end, n, token_ids, num_hits, reason in zip(rows.tolist(), *columns, strict=True):
            place = self._places[row]
            assert place is not None  # for it has an arrival
            request, new = place.request, slice(end - n, end)
            num_top, its_tokens = request.params.logprobs, token_ids[new]
            its_own = reason == FinishReason.STOP and its_tokens[-1] not in request.eos_token_ids
            deltas.append(
                Delta(
                    request_id=request.request_id,
                    token_ids=its_tokens,
                    scores=None if num_top is None else scores_of(report.new_scores, (row, new), num_top),
                    num_hit_tokens=num_hits,
                    finish_reason=FinishReason(reason),
                    stop_reason=its_tokens[-1] if its_own else None,
                    prompt_scores=place.scores_of_prompt() if its_tokens else None,
                    index=request.index,
                )
            )
            place.answer += its_tokens
        return deltas

    def _follow_beams(self, report: Any, rows: np.ndarray, num_new: Any) -> list[Delta]:
        """What rows of beam searches hold goes on from where it was when the run began; told at the end."""
        before = {row: (place.answer, place.scores) for row, place in self.taken()}
        deltas = []
        for row in rows.tolist():
            place, end = self._places[row], min(int(report.num_tokens[row]), MAX_STEPS)
            assert place is not None  # for it has an arrival
            request, new = place.request, slice(end - int(num_new[row]), end)
            answer, scores = before[int(report.origin[row])]
            num_top = request.params.logprobs or 0
            place.answer = answer + report.new_token_ids[row][new].tolist()
            place.scores = scores + scores_of(report.new_scores, (row, new), num_top)
            if reason := FinishReason(int(report.finish_reason[row])):
                deltas.append(
                    Delta(
                        request_id=request.request_id,
                        token_ids=place.answer,
                        scores=place.scores,
                        num_hit_tokens=int(report.num_hit_tokens[row]),
                        finish_reason=reason,
                        index=request.index,
                        beam=Beam(float(report.cum_logprob[row]), int(report.beam_rank[row])),
                    )
                )
        return deltas

    def _note_prompts(self, told: PromptScores, is_told: np.ndarray) -> None:
        """Keep what was told of the prompts in masked rows until the first token of their answers."""
        for tile, row in enumerate(told.row.tolist()):
            place = self._places[row] if row < len(self._places) and is_told[row] else None
            if place is None:
                continue
            request, start = place.request, int(told.start[tile])
            places = tile, slice(len(request.prompt_token_ids) - 1 - start)
            num_top = request.params.prompt_logprobs or 0
            place.prompt_scores[start] = scores_of(told.scores, places, num_top)


def scores_of(scores: Scores | None, at: Any, num_top: int) -> list[Score]:
    """What NumPy arrays say of the tokens in these places, with so many likeliest of each."""
    assert scores is not None
    each = (scores.logprob, scores.rank, scores.top_ids, scores.top_logprobs)
    logprob, rank, ids, logprobs = (np.asarray(values)[at].tolist() for values in each)
    top = (
        tuple((token, value) for token, value in zip(*its, strict=True) if token >= 0)[:num_top]
        for its in zip(ids, logprobs, strict=True)
    )
    return [Score(*its) for its in zip(logprob, rank, top, strict=True)]
