"""The report, and what a trace says by itself."""

import json
import re

import numpy as np
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.lab import questions, report, traces
from jaxpaged.lab.combination import Combination
from jaxpaged.lab.loop import LIFETIMES
from jaxpaged.lab.serving.replay import Memory, Served, Serving
from jaxpaged.lab.sweep import Result
from jaxpaged.step.state import Counter
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
    """The wanted distances come from a list of blocks in the order of their last use."""
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


def test_the_report_is_one_page_with_its_plots_and_numbers_beside_it(trace, tmp_path):
    lives = np.zeros(LIFETIMES, np.int32)
    lives[12] = 3
    results = [
        Result(Combination("lru", 64, size), 25, np.full(80, 64), trace.input_lens, 40, lives, 0)
        for size in (1600, 6400, None)
    ]
    moments = trace.arrival_s + np.array([[1.0], [3.0], [3.0 + 0.5]])
    moments[:, 79] = np.nan
    memory = [Memory(0.1 * i, 20, 4, 1, 3, i % 7) for i in range(1000)]
    counters = dict.fromkeys(Counter, 0) | {Counter.NUM_PREEMPTIONS: 17}
    served = Served(
        results[0].combination,
        25,
        40,
        trace.arrival_s,
        np.full(80, 11),
        moments,
        np.zeros(80, int),
        counters,
        memory,
    )
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2112)
    serving = Serving("h200", "Llama 3.1 8B", config, 80, [served])
    path = report.write(str(tmp_path / "out"), trace, results, serving)
    page = path.read_text()
    assert page.count("<svg") == 8
    assert not re.search(r'(src|href)="(?!#)', page)  # it needs no other file
    assert "A model, not a measurement" in page
    found = json.loads((path.parent / "report.json").read_text())
    assert [line["cache_tokens"] for line in found["hit_rates"]] == [1600, 6400, None]
    assert found["hit_rates"][0]["hit_rate"] == pytest.approx(64 * 40 / trace.input_lens[40:].sum())
    assert found["lifetimes"][0]["num_evicted"][12] == 3
    assert (found["served"]["gpu"], found["served"]["max_num_batched_tokens"]) == ("h200", 2112)
    assert found["served"]["room_for_tokens"] == int((0.9 * 141e9 - 2 * 8.03e9) / 131_072)
    [cache] = found["served"]["caches"]
    assert (cache["cache_tokens"], cache["num_preemptions"], cache["num_refused_requests"]) == (1600, 17, 1)
    assert [cache[name]["p50"] for name in ("queue_s", "ttft_s", "tpot_s")] == pytest.approx([1, 3, 0.05])
    assert cache["most_held"] == 0.8
    assert 190 <= len(cache["memory"]) <= 200
    assert cache["memory"][-1]["time_s"] == pytest.approx(99.9)
    assert report.numbers(trace, results, None, None)["served"] is None
