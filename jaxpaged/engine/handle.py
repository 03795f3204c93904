"""Handles: submitted requests, as those who wait for the answers hold them."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from absl import logging

from jaxpaged.engine.request import Delta, DraftCounts, Request
from jaxpaged.engine.texts import TextError, texts, texts_of
from jaxpaged.step import channels


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of a request in seconds since the epoch; None for what has not happened."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    # When the run of steps began in which it was first seen to run: a request is told of run by run.
    first_scheduled_time: float | None = None
    # Prompt tokens that were fetched from each tier below the device, by its name.
    num_fetched_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    speculative_decoding: DraftCounts | None = None  # None without `speculative_config`, and in beam searches


class EngineDeadError(RuntimeError):
    """The engine has stopped, by an error (its cause) or because it was closed, and answers nothing more."""


type Item = Delta | EngineDeadError | TextError
Sink = Callable[[Item], None]


class _Engine(Protocol):
    """The part of an engine that a handle uses."""

    @property
    def tokenizer(self) -> Any: ...

    def abort(self, handles: Sequence["Handle"]) -> None: ...

    def refuse_here(self, what: str) -> None: ...


class Handle:
    """A submitted request: iterate over it for its tokens as they come, or wait for all with `result`.

    Any number of threads may do so, any number of times.
    """

    def __init__(self, engine: _Engine, request: Request, sink: Sink | None = None) -> None:
        self.request = request
        self._engine = engine
        self._sink = sink
        self._items: list[Item] = []
        # In the engine's thread, where a stop string is to end the row as soon as it is there.
        self.stops = texts_of(engine.tokenizer, request) if request.params.stop else None
        self.metrics = RequestMetrics(time.time(), None, None)
        self._more = threading.Condition()

    @property
    def request_id(self) -> int:
        return self.request.request_id

    def __iter__(self) -> Iterator[Delta]:
        """Yield the deltas, the last with a reason.

        Raises `EngineDeadError` if the engine stops before, `TextError` if there is no text for the tokens.
        """
        with_text = texts(self._engine.tokenizer, self.request)
        for place in itertools.count():
            with self._more:
                if len(self._items) <= place:
                    self._engine.refuse_here("wait for an answer")
                self._more.wait_for(lambda: len(self._items) > place)  # noqa: B023, called at once
            item = or_raise(self._items[place])
            try:
                delta = with_text(item)
            except TextError:
                self.abort()
                raise
            yield delta
            if delta.finish_reason:
                return

    def result(self) -> Delta:
        """Wait for the whole answer."""
        return collect(list(self))

    def abort(self) -> None:
        """Give the request up. Its last delta reports that, unless it had finished before."""
        self._engine.abort([self])

    def with_text(self, delta: Delta) -> Delta | TextError:
        """Add the text to a delta where a stop string may end the answer. For the engine's thread.

        An error in the text is returned in the delta's place.
        """
        try:
            return delta if self.stops is None else self.stops(delta)
        except TextError as error:
            logging.error("%s; the request is given up", error)
            return error

    def put(self, item: Item) -> None:
        """Accept a delta or an error, in the engine's thread. A sink that raises must not stop other
        answers.
        """
        if isinstance(item, Delta):
            self._note_time(item)
        with self._more:
            self._items.append(item)
            self._more.notify_all()
        if self._sink is not None:
            try:
                self._sink(item)
            except BaseException:  # also a panic in Rust code, or an exit: this thread is everybody's
                logging.exception("request %d: its sink raised, so it is given up", self.request_id)
                self._sink = None
                self.abort()

    def note_scheduled(self, run_began: float) -> None:
        """Note the time when the request is first seen to run, in the engine's thread."""
        if self.metrics.first_scheduled_time is None:
            began = max(run_began, self.metrics.arrival_time)
            self.metrics = dataclasses.replace(self.metrics, first_scheduled_time=began)

    def _note_time(self, delta: Delta) -> None:
        metrics, now = self.metrics, time.time()
        self.metrics = dataclasses.replace(
            metrics,
            first_token_time=now
            if metrics.first_token_time is None and delta.token_ids
            else metrics.first_token_time,
            finished_time=now if delta.finish_reason else metrics.finished_time,
            num_fetched_tokens=delta.num_fetched_tokens or metrics.num_fetched_tokens,
            speculative_decoding=sum_of_drafts([metrics.speculative_decoding, delta.drafts]),
        )


def sum_of_drafts(counts: Sequence[DraftCounts | None]) -> DraftCounts | None:
    """Return all counts together; None where there are none."""
    known = [each for each in counts if each is not None]
    return sum(known, DraftCounts()) if known else None


def or_raise(item: Item) -> Delta:
    """Return the delta, or raise the error anew, with its cause, for each thread that waits."""
    if isinstance(item, EngineDeadError):
        raise EngineDeadError(str(item)) from item.__cause__
    if isinstance(item, TextError):
        assert item.__cause__ is not None
        raise TextError(item.request_id, item.__cause__)
    return item


def collect(deltas: Sequence[Delta]) -> Delta:
    """Join all deltas of a request into one."""
    last = deltas[-1]
    return dataclasses.replace(
        last,
        token_ids=[token for delta in deltas for token in delta.token_ids],
        scores=None if last.scores is None else [score for delta in deltas for score in delta.scores or ()],
        prompt_scores=next((d.prompt_scores for d in deltas if d.prompt_scores is not None), None),
        num_hit_tokens=max(delta.num_hit_tokens for delta in deltas),
        text=None if last.text is None else "".join(delta.text or "" for delta in deltas),
        weight_versions=tuple(version for delta in deltas for version in delta.weight_versions),
        channels=channels.joined([delta.channels for delta in deltas]),
    )
