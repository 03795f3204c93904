"""The laboratory as a library: tables, plots and made traces."""

import csv
import dataclasses
import io
import itertools

import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.research import lab
from jaxpaged.research.lab import sweep, traces
from jaxpaged.research.lab.combination import Combination
from tests.lab.test_lab import by_hand
from tests.lab.tracing import conversations

SIZES = (320, 1600, 6400, None)


@pytest.fixture(scope="module")
def trace():
    return lab.of_requests(conversations())


@pytest.fixture(autouse=True)
def by_oracle(monkeypatch):
    """Let the oracle send traces: that the compiled caches hit the same is test_lab's."""

    def send(trace, combinations, **options):
        for each in combinations:
            hits = by_hand(trace, each)
            num_counted = trace.num_requests - int(options["warmup"] * trace.num_requests)
            yield sweep.Result(each, 0, hits, trace.input_lens, num_counted, np.zeros(32), 0)

    monkeypatch.setattr(sweep, "sweep", send)


@pytest.fixture
def rows(trace):
    return lab.hit_rates(trace, ["lru"], SIZES, warmup=0.25)


def test_a_row_is_what_plain_python_finds(trace, rows):
    """Hits, and the computation that they save: a token costs 1, and 1 more for 32,768 tokens before it."""

    def cost(tokens):
        return float(np.sum(tokens + tokens / 32768 * tokens / 2))

    assert [row["cache_tokens"] for row in rows] == list(SIZES)
    for row, tokens in zip(rows, SIZES, strict=True):
        hits, lens = by_hand(trace, Combination("lru", 64, tokens))[50:], trace.input_lens[50:]
        assert row["hit_rate"] == hits.sum() / lens.sum()
        assert row["saved_compute"] == pytest.approx(cost(hits) / cost(lens))


def test_gains_are_over_the_same_cache():
    rates = {
        ("lru", 64): 0.25,
        ("fifo", 64): 0.2,
        ("belady", 64): 0.5,
        ("lru", None): 0.5,
        ("fifo", None): 0.5,
    }
    rows = [
        {"policy": policy, "block_size": 16, "cache_tokens": tokens, "hit_rate": rate}
        for (policy, tokens), rate in rates.items()
    ]
    found = lab.gains(rows)
    assert [row["gain"] for row in found] == pytest.approx([0, -0.05, 0.25, 0, 0])
    assert found[1]["of_bound"] == pytest.approx(-0.2)
    assert found[-1]["of_bound"] is None
    with pytest.raises(InputError, match="over='sieve' must be a policy of the table"):
        lab.gains(rows, over="sieve")


def test_an_8_bit_cache_holds_twice_the_tokens_less_its_scales(trace):
    """Llama 3.1 8B has 131,072 bytes a token in bfloat16; with 8 bits, 65,536 and a scale for each head."""
    rows = lab.layouts(trace, ["token_major", "int8_per_token"], cache_bytes=100 * 64 * 131072, warmup=0.25)
    assert rows[0]["bytes_a_token"] == 131072
    assert 65536 < rows[1]["bytes_a_token"] < 1.1 * 65536
    assert [row["cache_tokens"] for row in rows] == [
        6400,
        64 * int(100 * 131072 / rows[1]["bytes_a_token"]),
    ]
    for row in rows:
        hits = by_hand(trace, Combination("lru", 64, row["cache_tokens"]))
        assert row["hit_tokens"] == hits[50:].sum()


def test_tables_come_as_csv_and_markdown(rows):
    found = list(csv.DictReader(io.StringIO(lab.to_csv(rows))))
    assert [row["cache_tokens"] for row in found] == ["320", "1600", "6400", ""]
    assert [float(row["hit_rate"]) for row in found] == [row["hit_rate"] for row in rows]
    lines = lab.to_markdown(rows, ["policy", "cache_tokens", "hit_rate"]).splitlines()
    assert lines[:2] == ["| policy | cache_tokens | hit_rate |", "| --- | --- | --- |"]
    assert lines[3] == f"| lru | 1,600 | {rows[1]['hit_rate']:.4f} |"
    assert lines[5].startswith("| lru | unbounded |")


def test_a_plot_has_a_line_for_each_policy(rows):
    figure = lab.plot([*rows, *({**row, "policy": "belady"} for row in rows)])
    (axes,) = figure.axes
    assert axes.get_legend_handles_labels()[1] == ["lru", "belady"]
    assert list(axes.lines[0].get_ydata()) == [row["hit_rate"] for row in rows[:3]]
    assert axes.lines[0].get_color() != axes.lines[2].get_color()


@pytest.mark.parametrize("make", [lab.chat, lab.agents])
def test_a_made_trace_is_its_seeds_and_equal_ids_have_equal_beginnings(make):
    trace, again, other = make(300, seed=1), make(300, seed=1), make(300, seed=2)
    for field in dataclasses.fields(traces.Trace):
        assert np.array_equal(getattr(trace, field.name), getattr(again, field.name))
    assert not np.array_equal(trace.input_lens, other.input_lens)
    before: dict[int, list[int]] = {}
    for start, end in itertools.pairwise(trace.content_starts):
        ids = trace.content[start:end].tolist()
        for place, each in enumerate(ids):
            assert before.setdefault(each, ids[:place]) == ids[:place]
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert len(before) < 0.5 * len(trace.content)


def test_a_mistake_names_the_request():
    with pytest.raises(InputError, match="trace 'requests', line 1: hash_ids is missing"):
        lab.of_requests([{"timestamp": 0, "input_length": 1, "output_length": 1}])
