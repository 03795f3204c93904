"""Counts of drafts, from the reports of runs to the metrics of a request."""

import time
from types import SimpleNamespace

import numpy as np

from jaxpaged.api.outputs import request_output
from jaxpaged.engine.handle import RequestMetrics, collect
from jaxpaged.engine.host_rows import HostRows
from jaxpaged.engine.request import DraftCounts, Request
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.config import MAX_STEPS
from jaxpaged.step.state import Phase


def report(num_tokens, counts, reason=0):
    """Return a report of two rows, of which the second has a request."""

    def both(value):
        return np.array([0, value], np.int32)

    return SimpleNamespace(
        origin=np.arange(2),
        num_tokens=both(num_tokens),
        finish_reason=both(reason),
        phase=both(Phase.FINISHED if reason else Phase.RUNNING),
        num_hit_tokens=both(0),
        new_token_ids=np.zeros((2, MAX_STEPS), np.int32),
        channels={},
        draft_counts=None if counts is None else np.array([[9, 9, 9], counts], np.int32),
    )


def test_a_delta_has_the_drafts_of_its_own_run():
    """The counts of a row begin anew when the request comes back to it."""
    request = Request(np.zeros(4, np.int32), SamplingParams(), 0, 0, (), (), (), 99, request_id=1)
    rows, deltas = HostRows(2), []
    rows.take(1, request, [])
    for num_tokens, counts in ((5, (0, 0, 0)), (8, (1, 5, 2)), (13, (2, 8, 5))):
        deltas += rows.read(report(num_tokens, counts), None, rows.stays)[0]
    rows.leave(1)
    rows.take(1, request, [0] * 9)
    deltas += rows.read(report(14, (1, 2, 0), reason=2), None, rows.stays)[0]
    assert [each.drafts for each in deltas] == [
        DraftCounts(), DraftCounts(1, 5, 2), DraftCounts(1, 3, 3), DraftCounts(1, 2, 0),
    ]  # fmt: skip
    counts = collect(deltas).drafts
    assert counts == DraftCounts(num_spec_steps=3, num_draft_tokens=10, num_accepted_draft_tokens=5)
    assert counts.draft_acceptance_rate == 0.5
    assert counts.mean_acceptance_length == 1 + 5 / 3
    assert DraftCounts().mean_acceptance_length == 1

    metrics = [RequestMetrics(time.time(), None, None, speculative_decoding=its) for its in (counts, counts)]
    told = request_output(request, None, [collect(deltas)], metrics, None, finished=True).metrics
    assert told.speculative_decoding == DraftCounts(6, 20, 10)


def test_nothing_is_told_of_drafts_where_there_are_none():
    request = Request(np.zeros(4, np.int32), SamplingParams(), 0, 0, (), (), (), 99, request_id=1)
    rows = HostRows(2)
    rows.take(1, request, [])
    [delta], _ = rows.read(report(5, None), None, rows.stays)
    assert delta.drafts is None
    assert collect([delta, delta]).drafts is None
