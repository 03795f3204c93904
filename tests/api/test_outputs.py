"""Outputs of `LLM` and of streams: text, stop strings, log-probabilities and kinds of output."""

import asyncio
import dataclasses
import time

import numpy as np
import pytest

import jaxpaged
from jaxpaged import RequestOutputKind, SamplingParams
from jaxpaged.api.async_engine import AsyncEngine
from tests import tiny
from tests.api.tiny_llm import GREEDY


def test_a_stream_of_several_answers_tells_of_each(llm):
    async def outputs(kind: RequestOutputKind) -> list[jaxpaged.RequestOutput]:
        params = SamplingParams(n=3, max_tokens=5, seed=1, temperature=2.0, ignore_eos=True, output_kind=kind)
        return [output async for output in AsyncEngine(llm.engine).outputs([1, 2, 3], params)]

    [whole] = asyncio.run(outputs(RequestOutputKind.FINAL_ONLY))
    assert [len(answer.token_ids) for answer in whole.outputs] == [5] * 3
    pieces = asyncio.run(outputs(RequestOutputKind.DELTA))
    for want in whole.outputs:
        its = [answer for output in pieces for answer in output.outputs if answer.index == want.index]
        assert [token for answer in its for token in answer.token_ids] == want.token_ids
        assert its[-1].finish_reason == "length"
    assert [output.finished for output in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {output.request_id for output in pieces} == {pieces[0].request_id}


def test_log_probabilities_have_vllms_shape(llm):
    params = [SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=n) for n in (0, None)]
    with_them, without = (r.outputs[0] for r in llm.generate(["ab 12", "ab 12"], params, use_tqdm=False))
    assert without.logprobs is None
    assert without.cumulative_logprob is None
    assert with_them.token_ids == without.token_ids
    assert [list(place) for place in with_them.logprobs] == [[token] for token in with_them.token_ids]
    each = [place[token] for place, token in zip(with_them.logprobs, with_them.token_ids, strict=True)]
    prompt = llm.tokenizer.encode("ab 12")
    logits = tiny.reference_logits((*prompt, *with_them.token_ids))[len(prompt) - 1 : -1].astype(np.float64)
    want = np.max(logits, axis=-1) - np.log(np.sum(np.exp(logits), axis=-1))  # greedy: the likeliest
    np.testing.assert_allclose([entry.logprob for entry in each], want, atol=1e-5)
    assert with_them.cumulative_logprob == pytest.approx(sum(want), abs=1e-4)
    assert [e.decoded_token for e in each] == [llm.tokenizer.decode([token]) for token in with_them.token_ids]


def test_log_probabilities_of_prompts_have_vllms_shape(llm):
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    for _ in range(2):  # the second time all of it is in the cache
        [result] = llm.generate("ab 12 cd", params, use_tqdm=False)
        assert result.num_cached_tokens == 0
        first, *others = result.prompt_logprobs
        assert first is None
        for token, place in zip(result.prompt_token_ids[1:], others, strict=True):
            assert set(place) >= {token}
            assert sorted(each.rank for each in place.values())[:2] == [1, 2]
            assert place[token].decoded_token == llm.tokenizer.decode([token])
    assert llm.generate("ab", GREEDY, use_tqdm=False)[0].prompt_logprobs is None


def test_streams_have_text_and_a_stop_token_none(llm):
    """Token 0 ends the model's answers and is special; any other may be made a stop token."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    [whole] = llm.generate([[7, 9]], params, use_tqdm=False)
    deltas = list(llm.engine.submit([7, 9], params))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert llm.engine.submit([7, 9], params).result().text == whole.outputs[0].text
    tokens = whole.outputs[0].token_ids
    stop = next(token for token in tokens if llm.tokenizer.decode([token], skip_special_tokens=True))
    stopped = dataclasses.replace(params, stop_token_ids=[stop])
    [result] = llm.generate([[7, 9]], stopped, use_tqdm=False)
    end = tokens.index(stop)
    assert result.outputs[0].token_ids == tokens[: end + 1]
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].text == llm.tokenizer.decode(tokens[:end], skip_special_tokens=True)

    async def read():
        return [delta.text async for delta in AsyncEngine(llm.engine).generate([7, 9], stopped)]

    assert "".join(asyncio.run(read())) == result.outputs[0].text


def test_stop_strings_end_the_text_and_the_row(llm):
    """Every door finds the stop string across tokens, long before the tokens that were asked for."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=1)
    [whole] = llm.generate([[7, 9]], params, use_tqdm=False)
    tokens, text = whole.outputs[0].token_ids, whole.outputs[0].text
    begin = len(llm.tokenizer.decode(tokens[:5], skip_special_tokens=True)) - 1
    stop = text[begin : begin + 3]
    end = text.index(stop)
    for include in (False, True):
        asked = dataclasses.replace(params, stop=["\x00", stop], include_stop_str_in_output=include)
        [result] = llm.generate([[7, 9]], asked, use_tqdm=False)
        [answer] = result.outputs
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.text == text[: end + len(stop) if include else end]
        assert answer.token_ids == tokens[: len(answer.token_ids)]
        assert stop in llm.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert stop not in llm.tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=True)
        assert len(answer.logprobs) == len(answer.token_ids)
        handle = llm.engine.submit([7, 9], asked)
        assert "".join(delta.text for delta in handle) == "".join(d.text for d in handle) == answer.text
        assert handle.result().token_ids == answer.token_ids

        async def read(asked=asked):
            return [delta.text async for delta in AsyncEngine(llm.engine).generate([7, 9], asked)]

        assert "".join(asyncio.run(read())) == answer.text
    tiny.until(lambda: llm.engine.stats.num_running == 0)


def test_a_row_ends_within_a_poll_of_its_stop_string(llm, brake):
    """Nobody reads the answer; a turn makes one step."""
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    [whole] = llm.generate([[7, 9]], params, use_tqdm=False)
    stop = next(
        text for token in whole.outputs[0].token_ids if (text := llm.tokenizer.decode([token])).strip()
    )
    before = llm.engine.stats.num_new_tokens
    held = brake(llm.engine)
    handle = llm.engine.submit([7, 9], dataclasses.replace(params, stop=stop))
    held.allow(100)
    tiny.until(lambda: handle.metrics.finished_time is not None and llm.engine.is_idle)
    num_more = llm.engine.stats.num_new_tokens - before - len(handle.result().token_ids)
    assert num_more <= 2, "that of the run under way when the report was read, and of the one before"


def test_outputs_are_of_the_kind_that_is_asked_for(llm):
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=0)
    [whole] = llm.generate([[7, 9]], params, use_tqdm=False)

    async def read(kind):
        asked = dataclasses.replace(params, output_kind=kind)
        return [output async for output in AsyncEngine(llm.engine).outputs([7, 9], asked)]

    cumulative, deltas, final = (asyncio.run(read(kind)) for kind in RequestOutputKind)
    assert [result.outputs for result in final] == [whole.outputs]
    assert cumulative[-1].outputs == whole.outputs
    parts = [result.outputs[0] for result in deltas]
    assert len(parts) > 1
    assert "".join(part.text for part in parts) == whole.outputs[0].text
    assert [token for part in parts for token in part.token_ids] == whole.outputs[0].token_ids
    for results in (cumulative, deltas):
        assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
        assert results[0].outputs[0].finish_reason is None
        assert all(whole.outputs[0].text.startswith(r.outputs[0].text) for r in cumulative)
    for result in (whole, *final):
        times = result.metrics
        assert times.arrival_time <= times.first_token_time <= times.finished_time <= time.time()


def test_no_text_is_given_where_none_is_wanted(llm):
    params = SamplingParams(max_tokens=4, temperature=0, detokenize=False, logprobs=1)
    [result] = llm.generate([[7, 9]], params, use_tqdm=False)
    assert result.outputs[0].text == ""
    assert {each.decoded_token for place in result.outputs[0].logprobs for each in place.values()} == {None}
    assert all(delta.text is None for delta in llm.engine.submit([7, 9], params))
