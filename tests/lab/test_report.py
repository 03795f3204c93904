"""The report, and what a trace says by itself."""

import json
import re

import jax
import numpy as np
import pytest

import jaxpaged
from jaxpaged.config import EngineConfig
from jaxpaged.research.lab import questions, report, report_figures, traces
from jaxpaged.research.lab.belady import LAB_POLICIES
from jaxpaged.research.lab.colours import colours
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.loop import LIFETIMES
from jaxpaged.research.lab.serving.replay import Memory, Served, Serving
from jaxpaged.research.lab.sweep import Result
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
    path = report.write(str(tmp_path / "out"), trace, results, serving, "jaxpaged lab 'a <trace>'")
    page = path.read_text()
    assert page.count("<svg") == 9
    assert '<meta name="viewport" content="width=device-width' in page
    assert "jaxpaged lab &#x27;a &lt;trace&gt;&#x27;</code>" in page
    assert f"jaxpaged {jaxpaged.__version__}, jax {jax.__version__}" in page
    assert re.search(r'class="made">20\d\d-\d\d-\d\d \d\d:\d\d UTC', page)
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
    assert found["made"]["command"] == "jaxpaged lab 'a <trace>'"


def result(policy, size, hits, lives=0, block_size=64):
    lifetimes = np.zeros(LIFETIMES, np.int32)
    lifetimes[12] = lives
    asked = np.full(10, 100)
    return Result(Combination(policy, block_size, size), 25, np.full(10, hits), asked, 10, lifetimes, 0)


def rows(page):
    """Return the cells of a page's first table."""
    table = page[page.index("<table>") : page.index("</table>")]
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]


def test_a_table_has_a_line_for_each_cache_size_and_a_column_for_each_policy(trace, tmp_path):
    results = [
        result(policy, size, hits)
        for policy, its in (("lru", (20, 30, 40)), ("sieve", (25, 28, 40)), ("belady", (50, 60, 70)))
        for size, hits in zip((6400, 1600, None), its, strict=True)
    ]
    page = report.write(str(tmp_path), trace, results, None).read_text()
    head, *lines = rows(page)
    assert [re.sub("<i.*?</i>", "", cell) for cell in head] == ["cache, tokens", "lru", "sieve", "belady"]
    assert lines == [
        ["1,600", "<b>0.3000</b>", "0.2800", "0.6000"],
        ["6,400", "0.2000", "<b>0.2500</b>", "0.5000"],
        ["unbounded", "<b>0.4000</b>", "<b>0.4000</b>", "0.7000"],
    ]
    sized = [result("lru", 640, 20), result("lru", 640, 30, block_size=128)]
    head, line = rows(report.write(str(tmp_path), trace, sized, None).read_text())
    assert [re.sub("<i.*?</i>", "", cell) for cell in head[1:]] == ["lru, blocks of 64", "lru, blocks of 128"]
    assert line == ["640", "0.2000", "<b>0.3000</b>"]


def test_a_policy_has_one_colour_and_a_panel_of_its_own(trace, tmp_path):
    policies = [*LAB_POLICIES, "mine:First", "mine:Second"]
    found = colours(policies)
    assert len({found[policy] for policy in policies}) == len(policies)
    assert found["lru"] == colours(["sieve", "lru"])["lru"]
    results = [result(policy, size, 20, lives=3) for policy in ("lru", "sieve") for size in (640, 1280)]
    page = report.write(str(tmp_path), trace, results, None).read_text()
    panels = page[page.index('<div class="small">') :].split("<figure>")[1:]
    assert len(panels) == 4, "and two of reuse distances"
    for policy, other, panel in (("lru", "sieve", panels[0]), ("sieve", "lru", panels[1])):
        assert found[policy] in panel
        assert found[other] not in panel
        assert f">{policy}<" in panel


def test_axes_are_plain_numbers_within_the_traces_time(trace):
    seconds = float(trace.arrival_s[-1])
    figures = report_figures.Figures([Combination("lru", 64, 16384), Combination("lru", 64, 2**20)])
    drawn = report_figures.figure(lambda axis: figures.lifetimes(axis, [result("lru", 640, 9)], seconds), "")
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert "nothing was evicted" in labels
    times = {label: s for s, label in report_figures.MARKS_S.items()}
    assert max(times[label] for label in labels if label in times) <= seconds
    hits = [result("lru", size, 20) for size in (16384, 2**20)]
    drawn = report_figures.figure(lambda axis: figures.hit_rates(axis, hits), "a & b")
    assert 'aria-label="a &amp; b"' in drawn
    assert {"16.4k", "1.05M", "lru"} <= set(re.findall(r"<text[^>]*>([^<]*)</text>", drawn))
    assert "10^" not in drawn
    assert "mathdefault" not in drawn
