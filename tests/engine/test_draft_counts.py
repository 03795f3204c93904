"""Counts of drafts, from the tokens of runs to the metrics of a request."""

import dataclasses
import itertools
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.api.outputs import request_output
from jaxpaged.engine.handle import RequestMetrics, collect
from jaxpaged.engine.request import Delta, DraftCounts, Request
from jaxpaged.engine.stats import DraftTotals
from jaxpaged.engine.texts import Texts
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.channels import DRAFTS, Verified
from jaxpaged.step.state import Counter, FinishReason
from tests import tiny
from tests.engine.fuzz_settings import SETTINGS
from tests.engine.test_texts import Pieces

# Steps of 5, 2, 0 and 3 drafts, of which 2, 2, 0 and 0 are right; and what each token adds to the counts.
STEPS = [(5, 2), (2, 2), (0, 0), (3, 0)]
ADDED = [(1, 1, 1), (0, 1, 1), (0, 3, 0), (1, 1, 1), (0, 1, 1), (0, 0, 0), (0, 0, 0), (1, 3, 0)]


def delta(added, **values):
    counts = np.array(added, np.uint8).reshape(-1, 3)
    return Delta(1, [0] * len(counts), None, 0, channels={DRAFTS.name: counts}, **values)


def test_each_token_has_the_drafts_that_were_compared_for_it():
    place, num, right = np.array(
        [(place, num, place < right) for num, right in STEPS for place in range(right + 1)]
    ).T
    token_ids = np.arange(len(place))
    verified = Verified(*map(jnp.asarray, (token_ids, np.where(right, token_ids, 99), place, num)))
    assert DRAFTS.of_drafts(verified).tolist() == [list(each) for each in ADDED]
    # A right draft that ends the answer is the last of its step; those behind it are left out.
    assert DRAFTS.of_drafts(Verified(*jnp.array([[7], [7], [1], [5]]))).tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("num_before", [0, 3])
def test_counts_of_drafts_end_where_the_answer_does(num_before):
    """A stop string cuts a run's tokens anywhere, behind the deltas before."""
    for end in range(num_before + 1, len(ADDED) + 1):
        pieces = ["a"] * (end - 1) + ["b"] * (len(ADDED) + 1 - end)
        texts = Texts(Pieces(pieces), SamplingParams(stop="b"))
        first, rest = delta(ADDED[:num_before]), delta(ADDED[num_before:])
        first.token_ids[:], rest.token_ids[:] = range(num_before), range(num_before, len(ADDED))
        answer = collect([texts(first), texts(rest)])
        assert (len(answer.token_ids), answer.finish_reason) == (end, FinishReason.STOP)
        assert answer.drafts == DraftCounts(*np.sum(ADDED[:end], axis=0).tolist())


def test_counts_of_a_request_and_of_its_answers_are_told_together():
    deltas = [delta([]), delta(ADDED), delta(ADDED[:2], finish_reason=FinishReason.LENGTH)]
    assert [each.drafts for each in deltas] == [DraftCounts(), DraftCounts(3, 10, 4), DraftCounts(1, 2, 2)]
    counts = collect(deltas).drafts
    assert counts == DraftCounts(num_spec_steps=4, num_draft_tokens=12, num_accepted_draft_tokens=6)
    assert counts.draft_acceptance_rate == 0.5
    assert counts.mean_acceptance_length == 1 + 6 / 4
    assert DraftCounts().mean_acceptance_length == 1

    request = Request(np.zeros(4, np.int32), SamplingParams(), 0, 0, (), (), (), 99, request_id=1)
    metrics = [RequestMetrics(time.time(), None, None, speculative_decoding=its) for its in (counts, counts)]
    told = request_output(request, None, [collect(deltas)], metrics, None, finished=True)
    assert told.metrics.speculative_decoding == DraftCounts(8, 24, 12)
    assert told.outputs[0].channels[DRAFTS.name].tolist() == [list(each) for each in ADDED + ADDED[:2]]


def test_totals_are_sums_by_place_in_a_step_too():
    totals = DraftTotals.none(5)
    for values in (ADDED, [], ADDED[:1], [(0, 0, 0)], [(1, 1, 1), (0, 1, 1), (0, 1, 1), (0, 2, 0)]):
        totals = totals.after(np.array(values, np.uint8).reshape(-1, 3))
    assert totals == DraftTotals(5, 16, 8, (4, 3, 1, 0, 0))


@pytest.mark.slow
def test_counts_of_requests_and_of_the_engine_are_those_of_their_answers():
    """Several answers that strings end anywhere: no more is counted than they have."""
    drafts = {"prompt_lookup_min": 1}
    with tiny.engine(**tiny.SWAP, scheduling_policy="priority", speculative_config=drafts) as engine:
        pieces = Pieces([chr(33 + token) for token in range(tiny.CONFIG.vocab_size)])
        engine.door = dataclasses.replace(engine.door, tokenizer=pieces)
        engine.tokenizer = pieces
        asked = [
            SamplingParams(
                max_tokens=40,
                temperature=1.5,
                seed=seed,
                allowed_token_ids=[7, 8, 9],
                stop="".join(pieces.pieces[token] for token in stop),
                ignore_eos=True,
            )
            for seed in range(4)
            for stop in ([7, 8, 9], [8, 8], [9, 7])
        ]
        answers = [engine.submit([7, 8, 9] * 3, params) for params in asked]
        counts = [(each.result(), each.metrics.speculative_decoding) for each in answers]
        stats = engine.stats
    for answer, told in counts:
        added = answer.channels[DRAFTS.name]
        assert len(added) == len(answer.token_ids)
        assert told == answer.drafts == DraftCounts(*added.sum(axis=0).tolist())
    total = sum((told for _, told in counts), DraftCounts())
    of_engine = stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
    assert DraftCounts(*of_engine) == total
    assert sum(stats.num_accepted_at) == total.num_accepted_draft_tokens > 0
    assert stats.num_new_tokens > sum(len(answer.token_ids) for answer, _ in counts), "the device went on"


def test_nothing_is_told_of_drafts_where_there_are_none():
    each = Delta(1, [0], None, 0)
    assert each.drafts is None
    assert collect([each, each]).drafts is None


@pytest.mark.slow
def test_counts_of_tokens_are_those_of_the_steps_that_made_them():
    """Check each step against the device's counters. An answer may end with a right draft, and others lie
    behind it, which do not count.
    """
    driver, prompt = SETTINGS["swap, drafts"](Path()), [7, 8, 9] * 3
    names = [Counter.NUM_DRAFTS, Counter.NUM_DRAFT_TOKENS, Counter.NUM_ACCEPTED_TOKENS]
    num_right = num_left_out = 0
    for seed, stop in itertools.product(range(6), (None, 7, 8, 9)):
        params = SamplingParams(
            max_tokens=20,
            temperature=1.5,
            seed=seed,
            allowed_token_ids=prompt[:3],
            stop_token_ids=None if stop is None else [stop],
            ignore_eos=True,
        )
        tiny.submit(driver, [prompt], params)
        while driver.has_work:
            before = driver.counters[names]
            new = driver.turn(max_steps=1)
            done = DraftCounts(*(driver.counters[names] - before).tolist())
            if not new:
                assert done == DraftCounts()
                continue
            [delta], counts = new, new[0].drafts
            num_right += counts.num_accepted_draft_tokens
            if delta.finish_reason is FinishReason.STOP and delta.channels[DRAFTS.name][-1, 2]:
                num_left_out += done.num_draft_tokens - counts.num_draft_tokens
                done = DraftCounts(1, len(delta.token_ids), done.num_accepted_draft_tokens + 1)
            assert counts == done
    assert (num_right > 20, num_left_out > 0) == (True, True)
