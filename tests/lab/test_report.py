"""The report, and what a trace says by itself."""

import json
import re

import numpy as np
import pytest

from jaxpaged.lab import questions, report, traces
from jaxpaged.lab.loop import LIFETIMES
from jaxpaged.lab.sweep import Combination, Result
from tests.lab.tracing import BLOCK, conversations, write


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return traces.read(write(tmp_path_factory.mktemp("lab") / "trace.jsonl", conversations(80)))


def test_waste_is_what_a_requests_last_block_lacks(trace):
    found = questions.waste(trace)
    lens = trace.input_lens + trace.output_lens
    assert found[1] == 0
    lacking = sum(-int(length) % 64 for length in lens)
    assert found[64] == pytest.approx(lacking / (lens.sum() + lacking))


def test_reuse_distances_are_the_sizes_of_lru_caches_that_hit(trace):
    """By a list of blocks in the order of their last use."""
    cut = traces.blocks(trace, BLOCK)
    found = questions.reuse(trace)
    arrival = np.repeat(trace.arrival_s, cut.num_findable)
    recent, distances, seconds, last = [], [], [], {}
    for symbol, when in zip(cut.symbols.tolist(), arrival.tolist(), strict=True):
        if symbol in last:
            distances.append(BLOCK * (len(recent) - recent.index(symbol)))
            seconds.append(when - last[symbol])
            recent.remove(symbol)
        recent.append(symbol)
        last[symbol] = when
    np.testing.assert_array_equal(found.tokens, distances)
    np.testing.assert_allclose(found.seconds, seconds)
    assert found.num_asked == len(cut.symbols)


def test_the_model_of_latencies_queues_prompts_at_the_roofline(tmp_path):
    lines = [
        {"timestamp": t, "input_length": n, "output_length": 2, "hash_ids": [0], "block_size": 4096}
        for t, n in ((0, 4096), (0, 4096), (100_000, 4096))
    ]
    trace = traces.read(write(tmp_path / "trace.jsonl", lines))
    ttft, tpot = questions.model_times(trace, np.array([0, 0, 0]), "h100")
    alone = (2 * 8.03e9 * 4096 + 4 * 32 * 32 * 128 * 4096**2 / 2) / 989e12
    np.testing.assert_allclose(ttft, [alone, 2 * alone, alone])
    np.testing.assert_allclose(tpot, (2 * 8.03e9 + 131072 * 4097) / 3.35e12)
    hit, _ = questions.model_times(trace, np.array([4095, 0, 0]), "h100")
    assert hit[0] == pytest.approx(
        (2 * 8.03e9 + 131072 * 4096) / 3.35e12
    )  # the weights are read all the same


def test_the_report_is_one_page_with_its_plots_and_numbers_beside_it(trace, tmp_path):
    lives = np.zeros(LIFETIMES, np.int32)
    lives[12] = 3
    results = [
        Result(Combination("lru", 64, size), 25, np.full(80, 64), trace.input_lens, 40, lives, 0)
        for size in (1600, 6400, None)
    ]
    path = report.write(str(tmp_path / "out"), trace, results, "h200")
    page = path.read_text()
    assert page.count("<svg") == 5
    assert not re.search(r'(src|href)="(?!#)', page)  # it needs no other file
    assert "A model, not a measurement" in page
    found = json.loads((path.parent / "report.json").read_text())
    assert [line["cache_tokens"] for line in found["hit_rates"]] == [1600, 6400, None]
    assert found["hit_rates"][0]["hit_rate"] == pytest.approx(64 * 40 / trace.input_lens[40:].sum())
    assert found["lifetimes"][0]["num_evicted"][12] == 3
    assert found["model"]["gpu"] == "h200"
