"""Rows as the host knows them: which request has which, and what the runs report. For one thread only."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from jaxpaged.engine.by_host import Follower, Line
from jaxpaged.engine.request import Beam, Delta, Request, Score, device_request_id
from jaxpaged.sampling import Scores
from jaxpaged.step.channels import CHANNELS
from jaxpaged.step.config import MAX_STEPS
from jaxpaged.step.report import Report
from jaxpaged.step.state import FinishReason, Phase
from jaxpaged.step.step import PromptScores

# Reader of a channel's values of all positions of a row, by the channel's name and the row.
type ValuesOf = Callable[[str, int], np.ndarray]

# Phases of requests in rows that are not held for others, and do not run.
WAITS = (Phase.WAITING, Phase.SWAPPED, Phase.FOLLOWING)


@dataclasses.dataclass
class HostRow:
    """A row that has a request, as the host knows it."""

    request: Request
    answer: list[int]  # tokens read so far
    is_aborted: bool = False
    # By the first position of a tile.
    prompt_scores: dict[int, list[Score]] = dataclasses.field(default_factory=dict)
    # Values of channels by place of the prompt: by channel, and by the first position of a tile.
    places: dict[str, dict[int, np.ndarray]] = dataclasses.field(default_factory=dict)
    scores: list[Score] = dataclasses.field(default_factory=list)  # of the answer, in a beam search
    follower: Follower | None = None  # of a grammar that the host follows
    problem: str | None = None  # why the host ended it, if that was no abort

    @property
    def device_request_id(self) -> int:
        """Number of the request on the device."""
        return device_request_id(self.request.request_id)

    def scores_of_prompt(self) -> list[Score | None] | None:
        """Return the scores of the prompt's tokens, where they are wanted and the answer has not begun."""
        if self.answer or self.request.params.prompt_logprobs is None:
            return None
        return [None, *(score for _, tile in sorted(self.prompt_scores.items()) for score in tile)]

    def reason(self, reported: int) -> FinishReason:
        """Return why the answer ended, by what the device reports."""
        reason = FinishReason(reported)
        if reason is FinishReason.ERROR:
            _log_end(self, "a token came that it bars")
        return FinishReason.ERROR if reason is FinishReason.ABORT and self.problem is not None else reason

    def values(self, report: Any, row: int, num_new: int, values_of: ValuesOf) -> dict[str, Any]:
        """Return what channels have for the newest `num_new` tokens of a row, and before them for the prompt
        and the answer's beginning.
        """
        begins = len(self.answer) == len(self.request.continues or ())
        new_values = {}
        for name, values in report.channels.items():
            new = CHANNELS[name].new_values(
                values[row],
                num_tokens=int(report.num_tokens[row]),
                num_new=num_new,
                all_values=functools.partial(values_of, name, row) if begins else None,
                params=self.request.params,
            )
            if new is not None:
                new_values[name] = new
        if num_new and not self.answer:
            for name, tiles in self.places.items():
                new_values[name] = CHANNELS[name].reported(self.request.params, tiles)
        return new_values


def _no_values(channel: str, row: int) -> np.ndarray:
    raise AssertionError(f"no reader of {channel} was given")


# The same of all rows, for NumPy; zeros for a free row.
COLUMNS = np.dtype(
    [
        ("device_request_id", np.int32),
        ("num_tokens", np.int32),  # known
        ("phase", np.int32),  # when last reported
        ("wants_scores", np.bool_),  # log-probabilities of its answer
        ("wants_prompt_scores", np.bool_),  # and of its prompt
        ("is_beam", np.bool_),  # or holds what has ended of a beam search
        ("has_run", np.bool_),
        # Number of the stay in the row. A request that leaves its row and comes back has the same id,
        # but it is another stay.
        ("stay", np.int64),
        ("is_followed", np.bool_),  # its grammar, by the host
        ("is_read_whole", np.bool_),  # no reader and no stop string needs its tokens before it ends
    ]
)


class HostRows:
    """All rows as the host knows them, those of each replica one after the other."""

    def __init__(self, num_rows: int) -> None:
        self._rows: list[HostRow | None] = [None] * num_rows
        self._columns = np.zeros(num_rows, COLUMNS)
        self._num_stays = 0

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._rows)

    def __getitem__(self, row: int) -> HostRow | None:
        return self._rows[row]

    def taken(self) -> Iterator[tuple[int, HostRow]]:
        """Iterate over the rows that have requests, each with its number."""
        return ((row, entry) for row, entry in enumerate(self._rows) if entry is not None)

    @property
    def has_any(self) -> bool:
        """Whether any row is taken."""
        return bool(self._columns["device_request_id"].any())

    @property
    def has_aborted(self) -> bool:
        """Whether any row has a request that was aborted, and whose end no report has told yet."""
        return any(entry.is_aborted for _, entry in self.taken())

    @property
    def stays(self) -> np.ndarray:
        """Copy of the stay in each row now, int64 [num_rows]: `read` needs it with the report of a run that
        is dispatched now.
        """
        return self._columns["stay"].copy()

    @property
    def free_rows(self) -> np.ndarray:
        """Numbers of the rows without a request, rising."""
        return np.flatnonzero(self._columns["device_request_id"] == 0)

    @property
    def num_waiting(self) -> int:
        """Number of rows whose requests do not run."""
        return int(np.isin(self._columns["phase"][self._columns["device_request_id"] != 0], WAITS).sum())

    @property
    def wants_scores(self) -> bool:
        """Whether any request wants log-probabilities of its answer."""
        return bool(self._columns["wants_scores"].any())

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether any request wants log-probabilities of its prompt."""
        return bool(self._columns["wants_prompt_scores"].any())

    @property
    def has_followed(self) -> bool:
        """Whether the host follows the grammar of any row."""
        return bool(self._columns["is_followed"].any())

    @property
    def are_read_whole(self) -> bool:
        """Whether nobody looks at the tokens of any row before its answer's end."""
        taken = self._columns[self._columns["device_request_id"] != 0]
        return bool(taken["is_read_whole"].all())

    def masks_due(self, first_word: Callable[[Request], int]) -> tuple[list[Line], list[HostRow]]:
        """Return the masks that are to be written for rows whose grammars the host follows.

        first_word: returns the word of the arena at which a request's grammar begins.

        Returns too the rows whose answers are to end, for their grammars cannot be followed: all of a search.
        """
        lines, lost = list[Line](), list[HostRow]()
        for row in np.flatnonzero(self._columns["is_followed"]).tolist():
            entry = self._rows[row]
            assert entry is not None
            assert entry.follower is not None
            if (due := entry.follower.due(entry.answer)) is not None:
                lines.append(Line(row, first_word(entry.request), *due))
            if entry.follower.problem is not None and not entry.is_aborted:
                lost += self._end(entry, entry.follower.problem)
        return lines, lost

    def device_ids_of(self, entries: Sequence[HostRow]) -> np.ndarray:
        """Return the numbers of rows' requests on the device, behind them 0 for none: int32 [num_rows]."""
        ids = np.zeros(len(self), np.int32)
        ids[: len(entries)] = [entry.device_request_id for entry in entries]
        return ids

    def _end(self, entry: HostRow, problem: str) -> list[HostRow]:
        """Mark the rows of a request, or of a whole search, as ended by the host, and return them."""
        request = entry.request
        first = request.request_id - request.index
        ended = [entry]
        if request.beams is not None:
            numbers = range(first, first + 2 * request.beams.beam_width)
            ended = [ended_row for _, ended_row in self.taken() if ended_row.request.request_id in numbers]
        _log_end(entry, problem)
        for ended_row in ended:
            ended_row.is_aborted, ended_row.problem = True, problem
        return ended

    def waiting(self) -> list[tuple[tuple[int, int], int]]:
        """Return order and row of each request that can be recalled without loss: new or preempted, alone."""
        columns = self._columns
        waits = (columns["device_request_id"] != 0) & np.isin(
            columns["phase"], (Phase.WAITING, Phase.SWAPPED)
        )
        return [
            (entry.request.order, row)
            for row in np.flatnonzero(waits).tolist()
            if (entry := self._rows[row]) and not entry.is_aborted and entry.request.beams is None
        ]

    def take(self, row: int, request: Request, answer: list[int]) -> None:
        """Give a free row to a request, of whose answer so much is known."""
        grammar = request.grammar
        is_beam, has_run = request.beams is not None, False
        follower = None if grammar is None else grammar.follower(request.grammar_opens, is_beam=is_beam)
        entry = self._rows[row] = HostRow(request, answer, follower=follower)
        self._num_stays += 1
        num_tokens = len(request.prompt_token_ids) + len(answer)
        wants = request.params.logprobs is not None, request.params.tells_prompt
        self._columns[row] = (
            *(entry.device_request_id, num_tokens, Phase.WAITING, *wants, is_beam, has_run),
            *(self._num_stays, follower is not None, request.is_read_whole and not request.params.stop),
        )

    def leave(self, row: int) -> None:
        """Free a row."""
        self._rows[row] = None
        self._columns[row] = 0

    def read(
        self,
        report: Report,
        prompts: PromptScores | None,
        stays: np.ndarray,
        weight_version: int = 0,
        values_of: ValuesOf = _no_values,
    ) -> tuple[list[Delta], list[int]]:
        """Take what is new in a report of NumPy arrays, and free the rows of requests that have ended.

        prompts: what the run reports of prompts, where that is wanted.
        stays: `stays` as it was when the run was dispatched. A report says nothing of a row that was taken
            since, even if by the same request again.
        weight_version: of the weights that the run computed with.
        values_of: what reads a channel's values of all positions of a row.

        Returns: the deltas, and the numbers of the requests that this report is the first to see run.
        """
        columns = self._columns
        reported = (columns["stay"] != 0) & (columns["stay"] == stays)
        if prompts is not None:
            self._note_prompts(prompts, reported)
        num_new = report.num_tokens - columns["num_tokens"][report.origin]
        changed = reported & ((num_new != 0) | (report.finish_reason != 0))
        columns["phase"][reported] = report.phase[reported]
        columns["num_tokens"][reported] = report.num_tokens[reported]
        begins = reported & ~columns["has_run"] & ((report.phase == Phase.RUNNING) | (num_new != 0))
        columns["has_run"] |= begins
        first_run = [entry.request.request_id for row in np.flatnonzero(begins) if (entry := self._rows[row])]
        rows = np.flatnonzero(changed & ~columns["is_beam"])
        deltas = self._deltas(report, rows, num_new, weight_version, values_of)
        if columns["is_beam"].any():
            rows = np.flatnonzero(changed & columns["is_beam"])
            deltas += self._follow_beams(report, rows, num_new, weight_version)
        for row in np.flatnonzero(reported & (report.finish_reason != 0)).tolist():
            self.leave(row)
        return deltas, first_run

    def _deltas(
        self,
        report: Any,
        rows: np.ndarray,
        num_new: Any,
        weight_version: int,
        values_of: ValuesOf,
    ) -> list[Delta]:
        """Return the newest `num_new` tokens of these rows, as deltas.

        The report has the last MAX_STEPS tokens of each row, oldest first.
        """
        ends = np.minimum(report.num_tokens, MAX_STEPS)
        arrays = ends, num_new, report.new_token_ids, report.num_hit_tokens, report.finish_reason
        columns = [array[rows].tolist() for array in arrays]
        deltas = []
        for row, end, n, token_ids, num_hits, reason in zip(rows.tolist(), *columns, strict=True):
            entry = self._rows[row]
            assert entry is not None  # it has a request
            request, new = entry.request, slice(end - n, end)
            num_top, its_tokens = request.params.logprobs, token_ids[new]
            its_own = reason == FinishReason.STOP and its_tokens[-1] not in request.eos_token_ids
            deltas.append(
                Delta(
                    request_id=request.request_id,
                    token_ids=its_tokens,
                    scores=None if num_top is None else scores_of(report.new_scores, (row, new), num_top),
                    num_hit_tokens=num_hits,
                    finish_reason=entry.reason(reason),
                    stop_reason=its_tokens[-1] if its_own else None,
                    prompt_scores=entry.scores_of_prompt() if its_tokens else None,
                    index=request.index,
                    weight_versions=(weight_version,) * len(its_tokens),
                    channels=entry.values(report, row, n, values_of),
                )
            )
            entry.answer += its_tokens
        return deltas

    def _follow_beams(self, report: Any, rows: np.ndarray, num_new: Any, weight_version: int) -> list[Delta]:
        """Extend what rows of beam searches hold, each from the row that held it when the run began.

        Return the deltas of those that have ended: a beam's answer is reported only then.
        """
        before = {row: (entry.answer, entry.scores, entry.follower) for row, entry in self.taken()}
        deltas = []
        for row in rows.tolist():
            entry, end = self._rows[row], min(int(report.num_tokens[row]), MAX_STEPS)
            assert entry is not None  # it has a request
            request, new = entry.request, slice(end - int(num_new[row]), end)
            origin = int(report.origin[row])
            answer, scores, follower = before[origin]
            if origin != row and entry.follower is not None and follower is not None:
                entry.follower = follower.copy()
            num_top = request.params.logprobs or 0
            entry.answer = answer + report.new_token_ids[row][new].tolist()
            entry.scores = scores + scores_of(report.new_scores, (row, new), num_top)
            if reason := entry.reason(int(report.finish_reason[row])):
                deltas.append(
                    Delta(
                        request_id=request.request_id,
                        token_ids=entry.answer,
                        scores=entry.scores,
                        num_hit_tokens=int(report.num_hit_tokens[row]),
                        finish_reason=reason,
                        index=request.index,
                        weight_versions=(weight_version,) * len(entry.answer),
                        beam=Beam(float(report.cum_logprob[row]), int(report.beam_rank[row])),
                    )
                )
        return deltas

    def _note_prompts(self, prompts: PromptScores, reported: np.ndarray) -> None:
        """Keep the scores of prompts in masked rows until the first token of their answers."""
        for tile, row in enumerate(prompts.row.tolist()):
            entry = self._rows[row] if row < len(self._rows) and reported[row] else None
            if entry is None:
                continue
            request, start = entry.request, int(prompts.start[tile])
            at = tile, slice(len(request.prompt_token_ids) - 1 - start)
            if request.params.prompt_logprobs is not None:
                entry.prompt_scores[start] = scores_of(prompts.scores, at, request.params.prompt_logprobs)
            for name, values in prompts.values.items():
                if CHANNELS[name].given(request.params) is not None:
                    entry.places.setdefault(name, {})[start] = np.array(values[at])


def _log_end(entry: HostRow, problem: str) -> None:
    what = "request %d ends with an error behind %d tokens: its grammar cannot be followed: %s"
    logging.warning(what, entry.request.request_id, len(entry.answer), problem)


def scores_of(scores: Scores | None, at: Any, num_top: int) -> list[Score]:
    """Return the scores of some tokens from NumPy arrays, each with its `num_top` likeliest."""
    assert scores is not None
    each = (scores.logprob, scores.rank, scores.top_ids, scores.top_logprobs)
    logprob, rank, ids, logprobs = (np.asarray(values)[at].tolist() for values in each)
    top = (
        tuple((token, value) for token, value in zip(*fields, strict=True) if token >= 0)[:num_top]
        for fields in zip(ids, logprobs, strict=True)
    )
    return [Score(*fields) for fields in zip(logprob, rank, top, strict=True)]
