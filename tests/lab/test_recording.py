"""Tests of recorded traces: written by an engine and read again."""

import json

import numpy as np
import pytest

import jaxpaged
from jaxpaged import InputError, SamplingParams
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.engine.recording import Recorder
from jaxpaged.engine.request import Delta, FinishReason, Request
from jaxpaged.research.lab import traces
from tests import tiny
from tests.tiny_gguf import write_gguf


class Engine:
    """Hands requests out with numbers, and keeps the sink."""

    def __init__(self, recorder):
        self.recorder, self.count = recorder, 0

    def ask(self, *prompts, salt=0, sink=None):
        requests = []
        for prompt in prompts:
            self.count += 1
            prompt = np.array(prompt, np.int32)
            params = SamplingParams(max_tokens=4)
            requests.append(Request(prompt, params, 0, salt, (), (), (), 99, request_id=self.count))

        def queue(sink):
            self.sink = sink
            return [type("Handle", (), {"request": each, "request_id": each.request_id}) for each in requests]

        self.recorder.record(requests, sink, queue)

    def tell(self, request_id, num_tokens, reason=FinishReason.NONE):
        self.sink(Delta(request_id, [1] * num_tokens, None, 0, reason))


def test_lines_are_in_the_order_of_asking_and_ids_say_what_is_shared(tmp_path):
    file = tmp_path / "trace.jsonl"
    engine = Engine(Recorder(file, block_size=2))
    engine.ask([1, 2, 3, 4, 5], [1, 2, 3, 9])
    engine.ask([1, 2], salt=1)
    engine.tell(2, 3, FinishReason.LENGTH)
    assert file.read_text() == ""  # the first has not ended
    engine.tell(1, 2)
    engine.tell(1, 2, FinishReason.STOP)
    assert len(file.read_text().splitlines()) == 2
    engine.tell(3, 1, FinishReason.ABORT)
    trace = traces.read(str(file))
    assert trace.block_size == 2
    np.testing.assert_array_equal(trace.input_lens, [5, 4, 2])
    np.testing.assert_array_equal(trace.output_lens, [4, 3, 1])
    a, b, c, same, d, salted = trace.content
    assert same == a
    assert len({a, b, c, d, salted}) == 5


def test_when_the_engine_stops_what_has_ended_is_written(tmp_path):
    file = tmp_path / "trace.jsonl"
    engine = Engine(Recorder(file, block_size=2))
    engine.ask([1], [2], [3])
    engine.tell(3, 1, FinishReason.STOP)
    engine.sink(EngineDeadError("stopped"))
    [line] = map(json.loads, file.read_text().splitlines())
    assert (line["input_length"], line["output_length"]) == (1, 1)


def test_a_recording_that_fails_changes_no_answer(tmp_path, monkeypatch, caplog):
    recorder = Recorder(tmp_path / "trace.jsonl", block_size=2)
    monkeypatch.setattr(recorder, "_ids", lambda request: 1 / 0)
    engine, told = Engine(recorder), []
    engine.ask([1], [2], sink=told.append)
    for request_id in (1, 2):
        engine.tell(request_id, 1, FinishReason.STOP)
    assert [delta.request_id for delta in told] == [1, 2]
    assert [record.message for record in caplog.records] == ["the trace ends here"]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(InputError, match="record_trace=.*nowhere.* cannot be written"):
        jaxpaged.LLM(path, record_trace=tmp_path / "nowhere" / "trace.jsonl", **tiny.DEFAULTS)


def test_a_file_that_is_no_trace_stays_as_it_is(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"not a trace")
    with pytest.raises(InputError, match="record_trace='.*model.safetensors' must be a new file, or a trace"):
        Recorder(file, 8)
    assert file.read_bytes() == b"not a trace"
    for content in (b"", b'{"timestamp": 3}\n'):
        file.write_bytes(content)
        Recorder(file, 8)
        assert file.read_bytes() == b""


@pytest.mark.nightly
def test_an_engine_records_what_it_hits(tmp_path):
    """The laboratory, given the recording, hits what the engine did."""
    file = tmp_path / "trace.jsonl"
    llm = jaxpaged.LLM(write_gguf(tmp_path / "tiny.gguf"), record_trace=file, **tiny.DEFAULTS)
    rng = np.random.default_rng(0)
    start = rng.integers(1, 60, 40).tolist()
    prompts = [start[:30], start, [*start[:20], 7, 7, 7, 7, 7], start]
    outputs = [llm.generate(prompt, tiny.greedy(3), use_tqdm=False)[0] for prompt in prompts]
    trace = traces.read(str(file))
    np.testing.assert_array_equal(trace.input_lens, [len(prompt) for prompt in prompts])
    np.testing.assert_array_equal(trace.output_lens, [len(each.outputs[0].token_ids) for each in outputs])
    from jaxpaged.research.lab import sweep

    size = tiny.DEFAULTS["block_size"]
    [result] = sweep.sweep(trace, [sweep.Combination("lru", size, None)], warmup=0)
    assert result.hit_tokens.tolist() == [each.num_cached_tokens for each in outputs]
    assert result.hit_tokens.sum() > 0
