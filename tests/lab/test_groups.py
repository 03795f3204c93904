"""Decoders whose layers read different tokens: hits, serving and memory, with tables by kind and without."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import cli
from jaxpaged.checks import InputError
from jaxpaged.contracts import layer_kinds
from jaxpaged.memory.cache_specs import FULL, ChunkedLocal, SlidingWindow
from jaxpaged.research.lab import decoders, sweep, traces
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.decoders import Decoder, blocks_in
from jaxpaged.research.lab.serving import replay
from jaxpaged.research.lab.serving.loop import FIRST_TOKEN
from jaxpaged.research.lab.serving.roofline import Roofline, cache_tokens, seconds_of_step
from jaxpaged.step.state import Counter
from reference.engine_blocks import Blocks
from reference.engine_state import EngineConfig, Reach, Request, Row, Step
from tests.lab.test_serving import BLOCK_SIZE, CONFIG, SLOW_GPU, by_hand, reach_of, seconds_by_hand
from tests.lab.tracing import conversations, write
from tests.outsiders.layer_kind import WindowWithSinks

# Two groups, of two layers each; the second keeps 100 tokens, or 48 and the first 20.
MIXED = Decoder(1e6, 4, 32, 32, 128, specs=(SlidingWindow(100), FULL) * 2)
SINKS = Decoder(1e6, 4, 32, 32, 128, specs=(WindowWithSinks(48, 20), FULL) * 2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return traces.read(write(tmp_path_factory.mktemp("lab") / "trace.jsonl", conversations(60)))


def sweep_by_hand(trace, block_size, usable, reaches, step_blocks, most):
    """Return the blocks that each prompt hits, one prompt after the other, by the engine oracle's blocks.

    The oracle's blocks are of one token, which stands for one of the trace.
    """
    cut = traces.blocks(trace, block_size)
    config = EngineConfig(
        max_num_seqs=1, num_rows=1, num_tiles=1, tile_len=step_blocks, block_size=1, num_blocks=usable + 1,
        max_blocks_per_seq=10**6, reaches=reaches,
    )  # fmt: skip
    blocks, hits, row = Blocks(config), [], None
    for r in range(trace.num_requests):
        if row is not None:
            blocks.free(row)
        held, lookup, findable = (
            min(int(each[r]), most) for each in (cut.num_held, cut.num_lookup, cut.num_findable)
        )
        symbols = cut.symbols[cut.starts[r] :][:findable].tolist()
        unfound = [-(10**6) - 1000 * r - i for i in range(held - findable)]
        row = Row(0, Request(r, [*symbols[:lookup], 0], 10**6), symbols + unfound, lines=blocks.no_blocks)
        row.request.prompt.extend([0] * (held - lookup))  # the whole prompt is the request's own
        looked = Row(0, row.request, [*symbols[:lookup], 0])
        names, lines = blocks.lookup(looked)
        hits.append(len(names))
        for line in lines:
            blocks.pool.touch([block for block in line if not block.is_null])
        row.names, row.lines, row.computed = names, lines, len(names)
        blocks.slide(row)
        while row.computed < held:
            count = min(step_blocks, held - row.computed)
            blocks.grow(row, count, Step())
            row.computed += count
            end, row.computed = row.computed, min(row.computed, findable)
            blocks.publish(row)
            row.computed = end
            blocks.slide(row)
    return np.array(hits)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [MIXED, SINKS], ids=["window", "window with sinks"])
def test_hits_are_those_of_the_engine_oracles_blocks(trace, decoder, monkeypatch):
    monkeypatch.setattr(sweep, "STEP_TOKENS", 64)
    asked = [Combination("lru", 16, tokens, one) for tokens in (500, 1600, None) for one in (False, True)]
    results = [*sweep.sweep(trace, asked, warmup=0.0, decoder=decoder)]
    cut = traces.blocks(trace, 16)
    for each, result in zip(asked, results, strict=True):
        one = sweep.BlockTrace(trace, cut, [each], 1, decoder)
        reaches = [Reach()]
        if not each.one_table:
            [_, kind] = one.kinds(each)
            window = None if isinstance(decoder.specs[0], WindowWithSinks) else decoder.specs[0].window
            reaches.append(InBlocks(window or 48, 16, kind.first_tokens))
        hits = sweep_by_hand(trace, 16, one.usable(each), tuple(reaches), one.step_blocks, one.holds(each))
        np.testing.assert_array_equal(result.hit_tokens, cut.hit_tokens(hits, trace.input_lens), str(each))
    assert results[0].num_usable == 2 * results[1].num_usable == 2 * (500 // 16)
    assert results[0].num_oversized < results[1].num_oversized
    assert len({result.hit_rate for result in results}) > 3


class InBlocks(Reach):
    """Tokens that a window reads, in blocks: in plain Python, and apart from `decoders.InBlocks`."""

    def __init__(self, window: int, size: int, first: int) -> None:
        super().__init__(window=window, first_tokens=first)
        object.__setattr__(self, "size", size)

    def first_read(self, position):
        return max(position * self.size + 1 - self.window, 0) // self.size

    def most_kept(self, num_in_flight):
        return -(-(self.window - 1 + num_in_flight * self.size) // self.size) + 1


@pytest.mark.nightly  # two engines' steps are compiled
def test_what_is_served_is_the_oracles_with_groups_and_without(trace):
    trace = trace.first(30)
    asked = [Combination("lru", BLOCK_SIZE, tokens, one) for one in (False, True) for tokens in (800, 1952)]
    results = [*replay.serve(trace, asked, SLOW_GPU, CONFIG, MIXED, warmup=0.0)]
    for served in results:
        one = served.combination.one_table
        reaches = tuple(reach_of(spec) for spec in MIXED.grouping(one_table=one).specs)
        moments, hits, num_preemptions, blocks = by_hand(trace, served.num_usable, MIXED, reaches)
        np.testing.assert_allclose(served.moments_s, moments, rtol=1e-5)
        np.testing.assert_array_equal(served.hit_tokens, hits)
        assert served.counters[Counter.NUM_PREEMPTIONS] == num_preemptions
        for each in served.memory:
            end = min(blocks, key=lambda end, now=each.time_s: abs(end - now))
            assert (each.num_held, each.num_cached) == blocks[end]
    groups, table = results[0], results[2]
    assert groups.is_refused.sum() < table.is_refused.sum()
    assert np.nanmean(results[1].moments_s[FIRST_TOKEN]) < np.nanmean(results[3].moments_s[FIRST_TOKEN])


def test_a_step_counts_what_each_kind_of_layer_reads():
    peak = Roofline(989e12, 3.35e12, 80e9)
    chunks = Decoder(1e6, 3, 8, 2, 64, specs=(ChunkedLocal(64), FULL, ChunkedLocal(64)))
    for decoder in (MIXED, SINKS, chunks):
        for lengths in ([(0, 300)], [(290, 291), (99, 150), (63, 65)]):
            start, end = np.array(lengths, np.int32).T
            new = jnp.asarray(end - start)
            found = seconds_of_step(new, jnp.asarray(end), peak, decoder, most_new=320)
            assert float(found) == pytest.approx(seconds_by_hand(lengths, peak, decoder), rel=1e-5)


def test_decoders_are_known_by_name_and_by_config(tmp_path):
    gemma = decoders.named("gemma-3-27b")
    assert [len(layers) for layers in gemma.grouping().groups] == [10, 9, 9, 9, 9, 8, 8]
    assert gemma.kv_bytes == 62 * 2 * 16 * 128 * 2
    assert blocks_in(32768, 16, gemma, gemma.grouping(one_table=True)) == 2048
    assert blocks_in(32768, 16, gemma, gemma.grouping()) == 2048 * 62 // 10
    said = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208,
        "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 168, "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(said))
    own = decoders.named(str(tmp_path))
    assert own.specs == gemma.specs
    assert (own.num_layers, own.num_q_heads, own.kv_bytes) == (62, 32, gemma.kv_bytes)
    assert own.num_params == pytest.approx(gemma.num_params, rel=1e-3)
    assert own.bytes_of_weights == pytest.approx(gemma.bytes_of_weights, rel=1e-3)
    room = cache_tokens(Roofline(1, 1, 141e9), gemma)
    assert room == int((0.9 * 141e9 - 54e9) / gemma.kv_bytes)
    with pytest.raises(InputError, match="decoder='nobody' must be one of Llama 3.1 8B, .*, or a local conf"):
        decoders.named("nobody")
    kinds = layer_kinds.named(WindowWithSinks(48, 20))
    assert decoders.with_kinds(decoders.LLAMA_8B, kinds).specs == (WindowWithSinks(48, 20),) * 32


@pytest.mark.nightly  # with the programs of those above
def test_the_command_shows_a_model_with_groups_and_without(trace, tmp_path, capsys):
    file = write(tmp_path / "trace.jsonl", conversations(30))
    line = f"lab {file} --decoder gpt-oss-20b --block-size 16 --cache-tokens 1600 --policies lru,belady"
    assert cli.main([*line.split(), "--json"]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["policy"], row["one_table"]) for row in rows] == [
        ("lru", False), ("lru", True), ("belady", True),
    ]  # fmt: skip
    assert [row["num_blocks"] for row in rows] == [200, 100, 100]
    assert cli.main([*line.split()[:-2], "--layer-kind", "tests.outsiders.layer_kind:SINKS", "--json"]) == 0
    [own, one] = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert own["num_blocks"] == 2 * one["num_blocks"]
