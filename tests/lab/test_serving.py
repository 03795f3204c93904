"""A trace served in modelled time: what the engine's oracle does, with a clock beside it in plain Python."""

import collections
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import cli, config
from jaxpaged.config import PREFILL_TILE
from jaxpaged.research.lab import traces
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.decoders import LLAMA_8B, Decoder
from jaxpaged.research.lab.serving import replay
from jaxpaged.research.lab.serving.loop import FINISHED, FIRST_TOKEN, STARTED
from jaxpaged.research.lab.serving.roofline import Roofline, seconds_of_step
from jaxpaged.step.state import Counter
from reference.engine import Engine
from reference.engine_state import EngineConfig, Phase, Reach, Request
from tests.lab.tracing import BLOCK, conversations, write

# On which requests have to wait for each other, and a token more or less can be seen.
SLOW_GPU, SMALL_MODEL = Roofline(2e11, 5e9, 80e9), Decoder(1e6, 32, 32, 32, 128)
BLOCK_SIZE = 16
CONFIG = config.EngineConfig(max_num_seqs=4, max_num_batched_tokens=4 + 2 * PREFILL_TILE)
NUM_REQUESTS = 40
ONE_TABLE = (Reach(),)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("lab") / "trace.jsonl", conversations(NUM_REQUESTS))


class Scheduler(Engine):
    """The oracle without what it puts in place of K and V, which takes its time."""

    def _write(self, row, num_new):
        pass

    def _check(self, row, num_new):
        pass


def seconds_by_hand(lengths, peak, model):
    """Return the seconds of a step that computes these tokens, given as pairs of the first and last
    position.
    """
    reaches = [reach_of(spec) for spec in model.specs] or [Reach()] * model.num_layers
    pairs = num_read = 0
    for reach, count in collections.Counter(reaches).items():
        for start, end in lengths:
            pairs += count * sum(len(reach.reads(place, place + 1)) for place in range(start, end))
            num_read += count * len(reach.reads(start, end))
    flops = 2 * model.num_params * sum(end - start for start, end in lengths)
    flops += 4 * model.num_q_heads * model.head_dim * pairs
    read = 2 * 2 * model.num_kv_heads * model.head_dim * num_read + model.bytes_of_weights
    return max(flops / peak.flops, read / peak.bytes)


def reach_of(spec):
    """Return what a kind of layer reads as the oracle has it."""
    return Reach(getattr(spec, "window", None), getattr(spec, "chunk", None), spec.first_tokens)


def by_hand(trace, usable, model=SMALL_MODEL, reaches=ONE_TABLE):
    """Return moments, hit tokens and preemptions, and the numbers of held and of cached blocks after each
    step.
    """
    total_lens = (trace.input_lens + trace.output_lens).tolist()
    its_config = EngineConfig(
        max_num_seqs=CONFIG.max_num_seqs,
        num_rows=2 * CONFIG.max_num_seqs,
        num_tiles=2,
        tile_len=PREFILL_TILE,
        block_size=BLOCK_SIZE,
        num_blocks=usable + 1,
        max_blocks_per_seq=usable,
        reaches=reaches,
        watermark_blocks=int(0.01 * (usable + 1)),
    )
    engine = Scheduler(its_config, lambda tokens: 0)
    coming = [r for r, length in enumerate(total_lens) if engine.blocks.most_held(length - 1) <= usable]
    moments = np.full((3, trace.num_requests), np.nan)
    hits = np.zeros(trace.num_requests, int)
    blocks, clock, num_preemptions = {}, 0.0, 0
    while True:
        for row in range(its_config.num_rows):
            is_free = engine.rows[row] is None or engine.rows[row].phase is Phase.FINISHED
            if is_free and coming and trace.arrival_s[coming[0]] <= clock:
                r = coming.pop(0)
                ids = trace.content[trace.content_starts[r] :]
                prompt = [int(ids[place // BLOCK]) for place in range(trace.input_lens[r])]
                engine.submit(Request(r, prompt, total_lens[r]), row)
        rows = [row for row in engine.rows if row is not None and row.phase is not Phase.FINISHED]
        if not rows:
            if not coming:
                return moments, hits, num_preemptions, blocks
            clock = trace.arrival_s[coming[0]]
            continue
        num_tokens = [row.num_tokens for row in rows]
        step = engine.step()
        ends = [row.num_tokens - 1 if row.phase is Phase.FINISHED else row.computed for row in rows]
        new = [step.num_new_tokens.get(row.index, 0) for row in rows]
        lengths = [(end - n, end) for end, n in zip(ends, new, strict=True) if n]
        begin, clock = clock, clock + seconds_by_hand(lengths, SLOW_GPU, model)
        num_preemptions += len(step.preempted)
        for row, before in zip(rows, num_tokens, strict=True):
            r = row.request.arrival
            if row.index in step.admitted:
                moments[STARTED, r] = np.fmin(moments[STARTED, r], begin)
                if before == row.prompt_len:
                    hits[r] = step.admitted[row.index] * BLOCK_SIZE
            if before == row.prompt_len < row.num_tokens:
                moments[FIRST_TOKEN, r] = clock
            if row.phase is Phase.FINISHED:
                moments[FINISHED, r] = clock
        free = engine.pool.free_block_queue.get_all_free_blocks()
        blocks[clock] = usable - len(free), sum(block.block_hash is not None for block in free)


@pytest.mark.nightly  # the step of an engine is compiled
def test_requests_wait_give_way_and_end_when_the_oracle_says(file):
    """Some caches refuse requests, in some requests are preempted, and in some neither happens."""
    trace = traces.read(file)
    asked = [Combination("lru", BLOCK_SIZE, tokens) for tokens in (320, 1952, None)]
    results = [*replay.serve(trace, asked, SLOW_GPU, CONFIG, SMALL_MODEL, warmup=0.25)]
    assert [each.combination for each in results] == asked
    for served in results:
        moments, hits, num_preemptions, blocks = by_hand(trace, served.num_usable)
        np.testing.assert_allclose(served.moments_s, moments, rtol=1e-5)
        np.testing.assert_array_equal(served.hit_tokens, hits)
        assert served.counters[Counter.NUM_PREEMPTIONS] == num_preemptions
        for each in served.memory:
            end = min(blocks, key=lambda end, now=each.time_s: abs(end - now))
            assert end == pytest.approx(each.time_s, rel=1e-5)
            assert (each.num_held, each.num_cached) == blocks[end]
            assert each.num_held + each.num_cached + each.num_empty == served.num_usable
            is_there = (trace.arrival_s <= end) & ~(moments[FINISHED] <= end * (1 + 1e-6))
            assert each.num_running + each.num_waiting == np.count_nonzero(is_there & ~served.is_refused)
    small, middle, large = (served.line() for served in results)
    assert small["num_refused_requests"] > 0
    assert middle["num_preemptions"] > 0
    assert large["num_preemptions"] == large["num_refused_requests"] == 0
    assert middle["queue_s"]["p50"] > large["queue_s"]["p50"]
    ttft = (results[2].moments_s[FIRST_TOKEN] - trace.arrival_s)[10:]
    assert large["ttft_s"]["p90"] == pytest.approx(np.percentile(ttft, 90))
    later = np.diff(results[2].moments_s[[FIRST_TOKEN, FINISHED]], axis=0)[0][10:]
    many = trace.output_lens[10:] > 1
    assert large["tpot_s"]["mean"] == pytest.approx(np.mean(later[many] / (trace.output_lens[10:][many] - 1)))


def test_a_step_takes_what_its_arithmetic_or_its_reading_takes():
    peak = Roofline(989e12, 3.35e12, 80e9)
    for lengths in ([(0, 4096)], [(4095, 4096), (99, 100)], [(131_071, 131_072), (64, 2112)]):
        start, end = np.array(lengths).T
        found = seconds_of_step(jnp.asarray(end - start), jnp.asarray(end), peak, LLAMA_8B)
        assert float(found) == pytest.approx(seconds_by_hand(lengths, peak, LLAMA_8B), rel=1e-5)
    assert float(seconds_of_step(jnp.array([1, 0]), jnp.array([10, 10**6]), peak, LLAMA_8B)) < 0.005


@pytest.mark.nightly  # with the program of the one above
def test_the_command_adds_what_is_served_to_each_line(file, capsys):
    command = f"lab {file} --block-size 16 --cache-tokens 1952,unbounded --json --serve 40 --gpu a100"
    command += f" --max-num-seqs 4 --max-num-batched-tokens {CONFIG.max_num_batched_tokens}"
    assert cli.main(command.split()) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    served = [line["served"] for line in lines]
    assert [each["cache_tokens"] for each in served] == [1952, None]
    for each in served:
        assert each["num_requests"] == each["num_warmup_requests"] == NUM_REQUESTS // 2
        assert 0 < each["tpot_s"]["p50"] < each["ttft_s"]["p99"] < math.inf
