"""LLM: prompts and parameters in all their forms, results in vLLM's shape, and what is refused."""

import asyncio
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import jaxpaged
from jaxpaged import InputError, RequestOutputKind, SamplingParams
from jaxpaged.api import llm as llm_module
from jaxpaged.api.async_engine import AsyncEngine
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.handle import EngineDeadError
from jaxpaged.models import loading
from jaxpaged.models.weights import by_role
from reference import model as reference_model
from tests import tiny
from tests.tiny_gguf import write_gguf

GREEDY = tiny.greedy(6)
# Few and small shapes, for quick compiling.
OPTIONS = tiny.DEFAULTS | {"max_logprobs": 4}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("llm") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path):
    return jaxpaged.LLM(path, **OPTIONS)


def reference_answer(token_ids: list[int]) -> list[int]:
    """The oracle's greedy answer, cut after the model's end-of-sequence token 0."""
    answer = tiny.reference_answer(tuple(token_ids), 6)
    return answer[: answer.index(0) + 1] if 0 in answer else answer


def test_results_have_vllms_shape(llm):
    [result] = llm.generate("ab 12", GREEDY, use_tqdm=False)
    assert result.prompt == "ab 12"
    assert result.prompt_token_ids == llm.tokenizer.encode("ab 12")
    assert result.finished
    [answer] = result.outputs
    assert answer.index == 0
    assert answer.token_ids == reference_answer(result.prompt_token_ids)
    assert answer.text == llm.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 0 else "length")


@pytest.mark.slow
def test_a_model_with_a_sliding_window_answers_as_transformers_does():
    """Prompts longer and shorter than the window, beside each other and in more than one tile."""
    folder = Path(__file__).parents[1] / "goldens" / "mistral_window"
    golden = json.loads((folder / "golden.json").read_text())
    prompt, answer = golden["token_ids"], golden["answer"]
    llm = jaxpaged.LLM(folder, **OPTIONS)
    params = SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True)
    results = llm.generate([prompt[:5], prompt, prompt[:40]], params, use_tqdm=False)
    assert results[1].outputs[0].token_ids == answer
    checkpoint = loading.open_checkpoint(folder)
    weights = by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())
    for result in results:
        want = reference_model.generate(checkpoint.config, weights, result.prompt_token_ids, len(answer))
        assert result.outputs[0].token_ids == want


def test_all_forms_of_prompts_mean_the_same(llm):
    ids = llm.tokenizer.encode("ab 12")
    forms = ["ab 12", ids, {"prompt_token_ids": ids}, {"prompt": "ab 12"}]
    answers = [result.outputs[0].token_ids for result in llm.generate(forms, GREEDY, use_tqdm=False)]
    assert answers == [reference_answer(ids)] * 4
    for one in forms:
        assert llm.generate(one, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == answers[0]


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 5, 3)]
    results = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 5, 3]
    assert {result.outputs[0].finish_reason for result in results} == {"length"}


def test_more_prompts_than_rows_come_back_in_order(llm):
    prompts = tiny.prompts([1 + 3 * i for i in range(11)])
    results = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == prompts
    assert [r.outputs[0].token_ids for r in results] == [reference_answer(p) for p in prompts]


def test_chat_applies_the_template_to_one_conversation_or_several(llm):
    turn = [{"role": "user", "content": "ab"}]
    [one] = llm.chat(turn, GREEDY, use_tqdm=False)
    assert one.prompt == "user:ab<|end|>"
    assert one.prompt_token_ids == llm.tokenizer.encode("user:ab<|end|>")
    two = llm.chat([turn, [*turn, {"role": "assistant", "content": "c"}]], GREEDY, use_tqdm=False)
    assert [r.prompt for r in two] == ["user:ab<|end|>", "user:ab<|end|>assistant:c<|end|>"]
    assert two[0].outputs == one.outputs


def test_a_conversation_that_is_too_long_is_cut_where_that_is_asked_for(llm):
    """At the end that is said, also where no context could hold it; what is short stays whole."""
    messages = [{"role": "user", "content": "ab" * 3000 + "12"}]
    params = SamplingParams(truncate_prompt_tokens=3, max_tokens=1)
    [left] = llm.chat(messages, params, use_tqdm=False)
    assert llm.tokenizer.decode(left.prompt_token_ids) == "12<|end|>"
    params.truncation_side = "right"
    [right] = llm.chat(messages, params, use_tqdm=False)
    assert llm.tokenizer.decode(right.prompt_token_ids) == "use"
    with pytest.raises(InputError, match="characters, more than max_model_len=128 tokens hold"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_what_is_changed_after_a_request_was_made_does_not_reach_it(llm):
    params = SamplingParams(max_tokens=6, temperature=0, logit_bias={5: 3.0})
    want = llm.generate([[4, 2]], params, use_tqdm=False)[0].outputs[0].token_ids
    [request] = llm.engine.door.admit([4, 2], params)
    params.max_tokens, params.logit_bias = 1, None
    assert (request.params.max_tokens, request.params.logit_bias) == (6, {5: 3.0})
    assert [len(r.outputs[0].token_ids) for r in llm.generate([[4, 2]], params, use_tqdm=False)] == [1]
    params.max_tokens, params.logit_bias = 6, {5: 3}
    assert llm.generate([[4, 2]], params, use_tqdm=False)[0].outputs[0].token_ids == want
    params.logit_bias[5] = float("nan")  # in place, where no assignment sees it
    with pytest.raises(InputError, match="^logit_bias={5: nan} must be"):
        llm.generate([[4, 2]], params, use_tqdm=False)
    llm.get_default_sampling_params().max_tokens = 3
    assert llm.get_default_sampling_params().max_tokens == 16


def test_sampling_is_repeatable_by_seed_and_differs_without(llm):
    def sampled(seed):
        params = SamplingParams(max_tokens=12, temperature=3.0, seed=seed, ignore_eos=True)
        return [r.outputs[0].token_ids for r in llm.generate(["ab", "ab"], params, use_tqdm=False)]

    assert sampled(1) == sampled(1)
    assert sampled(1)[0] == sampled(1)[1]
    assert sampled(1) != sampled(2)
    first, second = sampled(None)
    assert first != second


def test_several_answers_share_a_prompt_and_each_is_what_it_is_alone(llm):
    """Seven of one prompt where four can run, beside another: a prompt is computed once, or found."""
    params = SamplingParams(n=7, max_tokens=9, temperature=3.0, seed=2**32 - 3, ignore_eos=True, logprobs=1)
    prompts = [[5, *range(40)], [6]]
    llm.reset_prefix_cache()
    before = llm.engine.stats
    results = llm.generate(prompts, params, use_tqdm=False)
    done = llm.engine.stats
    assert done.num_prompt_tokens - before.num_prompt_tokens < 2 * len(prompts[0])
    assert done.num_free_blocks == done.num_blocks
    for prompt, result in zip(prompts, results, strict=True):
        assert [answer.index for answer in result.outputs] == list(range(7))
        assert len({tuple(answer.token_ids) for answer in result.outputs}) == 7
        for answer in result.outputs:
            alone = SamplingParams(
                max_tokens=9,
                temperature=3.0,
                seed=params.seed + answer.index,
                ignore_eos=True,
                logprobs=1,
            )
            [[want]] = [r.outputs for r in llm.generate([prompt], alone, use_tqdm=False)]
            assert answer == dataclasses.replace(want, index=answer.index)
    with pytest.raises(
        InputError, match="^n=2 must be 1 with temperature=0, where all answers are the same$"
    ):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(InputError, match="^n=7 must be 1: for several, give `submit_all`"):
        llm.engine.submit([1], params)


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


def test_tokens_found_in_the_prefix_cache_are_counted(llm):
    [prompt] = tiny.prompts([20], seed=77)
    [cold] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert cold.num_cached_tokens == 0
    both = llm.generate([prompt, prompt[:16]], GREEDY, use_tqdm=False)
    # Two blocks of 8; of a prompt that is all there, the last token is computed, and so its block.
    assert [result.num_cached_tokens for result in both] == [16, 8]
    assert both[0].outputs == cold.outputs


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
    """In all doors the same, across tokens, long before the tokens that were asked for."""
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
    tiny.until(lambda: handle.metrics.finished_time is not None and not llm.engine._driver.has_work)
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


def test_bad_words_are_not_in_the_answer(llm):
    """A word of one token, in a row beside one that may have it; and one of several."""
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    [free] = llm.generate([[7, 9]], params, use_tqdm=False)
    token_ids = free.outputs[0].token_ids
    words = [llm.tokenizer.decode([token]).strip() for token in token_ids]
    word = next(word for word in words if word and len(llm.tokenizer.encode(word)) == 1)
    text = free.outputs[0].text
    longer = next(text[i : i + 3] for i in range(len(text)) if text[i : i + 3].isalnum())
    for bad in ([word], [longer], [longer, word]):
        asked = [dataclasses.replace(params, bad_words=bad), params]
        without, with_it = llm.generate([[7, 9]] * 2, asked, use_tqdm=False)
        assert with_it.outputs == free.outputs
        ids = without.outputs[0].token_ids
        for each in bad:
            its = llm.tokenizer.encode(each, add_special_tokens=False)
            assert its not in [ids[i : i + len(its)] for i in range(len(ids))]


def test_what_needs_a_tokenizer_is_refused_without_one(path):
    llm = jaxpaged.LLM(path, skip_tokenizer_init=True, **OPTIONS)
    for options in ({"stop": "a"}, {"bad_words": ["a"]}):
        with pytest.raises(InputError, match="must be None for a model without a tokenizer"):
            llm.generate([[1]], SamplingParams(**options), use_tqdm=False)
    llm.engine.close()


def test_no_text_is_given_where_none_is_wanted(llm):
    params = SamplingParams(max_tokens=4, temperature=0, detokenize=False, logprobs=1)
    [result] = llm.generate([[7, 9]], params, use_tqdm=False)
    assert result.outputs[0].text == ""
    assert {each.decoded_token for place in result.outputs[0].logprobs for each in place.values()} == {None}
    assert all(delta.text is None for delta in llm.engine.submit([7, 9], params))


def test_results_come_one_by_one_and_leaving_gives_up_the_rest(llm):
    prompts = tiny.prompts([3, 5, 7])
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    results = llm.generate_each(
        prompts, [dataclasses.replace(params, max_tokens=2), params, params], use_tqdm=False
    )
    assert next(results).prompt_token_ids == prompts[0]
    results.close()
    tiny.until(lambda: not llm.engine._worker._in_flight)
    unread = llm.generate_each(prompts, params, use_tqdm=False)
    del unread
    tiny.until(lambda: not llm.engine._worker._in_flight)


@pytest.mark.slow
def test_without_parameters_the_models_own_defaults_are_taken(tmp_path):
    shutil.copytree(Path(__file__).parents[1] / "goldens" / "gqa_tied", tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.0, "max_new_tokens": 3, "eos_token_id": null}'
    )
    for source, defaults in (
        ("auto", SamplingParams(temperature=0, max_tokens=3)),
        ("vllm", SamplingParams()),
    ):
        llm = jaxpaged.LLM(tmp_path, generation_config=source, **OPTIONS)
        assert llm.get_default_sampling_params() == defaults
        [result] = llm.generate([[1, 2]], use_tqdm=False)
        assert len(result.outputs[0].token_ids) <= defaults.max_tokens
        llm.engine.close()


def test_another_tokenizer_or_none_may_be_asked_for(path, llm, tmp_path, monkeypatch):
    monkeypatch.setattr(Driver, "compile", lambda self: None)
    llm.tokenizer.save_pretrained(tmp_path)
    other = jaxpaged.LLM(path, tokenizer=tmp_path, **OPTIONS)
    assert other.tokenizer.encode("ab 12") == llm.tokenizer.encode("ab 12")
    none = jaxpaged.LLM(path, skip_tokenizer_init=True, **OPTIONS)
    with pytest.raises(InputError, match="prompt must be token ids: the model has no tokenizer"):
        none.generate("ab", use_tqdm=False)
    with pytest.raises(InputError, match="chat: the model must have a chat template"):
        none.chat([{"role": "user", "content": "a"}])


@pytest.mark.slow
def test_by_default_a_second_call_finds_all_prompts_of_the_first(path):
    """Six prompts through two rows: more than the rows hold at once stays findable."""
    llm = jaxpaged.LLM(path, **OPTIONS | {"num_blocks": None, "max_num_seqs": 2})
    prompts = tiny.prompts([60, 70, 80, 90, 100, 110], seed=5)
    for hits in ([0] * 6, [(len(prompt) - 1) // 8 * 8 for prompt in prompts]):
        results = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [result.num_cached_tokens for result in results] == hits


def test_threads_that_generate_at_once_share_the_engine(llm):
    batches = [tiny.prompts([1 + 7 * i, 40, 3, 20 + i], seed=i) for i in range(6)]
    lengths = [3, 30, 12, 1]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
    calls = [tiny.start(llm.generate, prompts, params, use_tqdm=False) for prompts in batches]
    results = [call.result(120) for call in calls]
    for prompts, answers in zip(batches, results, strict=True):
        assert [r.prompt_token_ids for r in answers] == prompts
        want = [tiny.reference_answer(tuple(p), n) for p, n in zip(prompts, lengths, strict=True)]
        assert [r.outputs[0].token_ids for r in answers] == want


def test_ctrl_c_gives_up_what_is_left_and_the_engine_goes_on(llm, brake, monkeypatch):
    hold = brake(llm.engine)
    hold.allow(2)

    class Bar:
        def __init__(self, **_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def set_postfix_str(self, *_, **__):
            raise KeyboardInterrupt

    before = llm.engine.stats.num_new_tokens
    monkeypatch.setattr(llm_module, "tqdm", Bar)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] for i in range(20)], tiny.greedy(100))
    hold.off()
    tiny.until(lambda: not llm.engine._worker._in_flight and not llm.engine._driver.has_work)
    assert llm.engine.stats.num_new_tokens - before <= 4 * 3
    monkeypatch.undo()
    [result] = llm.generate("ab 12", GREEDY, use_tqdm=False)
    assert result.outputs[0].token_ids == reference_answer(result.prompt_token_ids)


def test_a_dead_engine_is_told_to_those_who_wait_and_to_those_who_come(path, monkeypatch):
    llm = jaxpaged.LLM(path, **OPTIONS)

    def breaks(*_, **__):
        raise MemoryError("no more")

    monkeypatch.setattr(llm.engine._driver, "turn", breaks)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="stopped by MemoryError: no more") as caught:
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        assert isinstance(caught.value.__cause__, MemoryError)


def test_the_most_urgent_goes_first_and_answers_keep_the_prompts_order(path, brake, monkeypatch):
    llm = jaxpaged.LLM(path, **OPTIONS, scheduling_policy="priority")
    brake(llm.engine).off()  # one step a turn, so that answers that end together are told together
    ended = []
    submit_all = llm.engine.submit_all

    def spy(submissions, sink):
        def heard(item):
            if item.finish_reason:
                ended.append(item.request_id)
            sink(item)

        return submit_all(submissions, heard)

    monkeypatch.setattr(llm.engine, "submit_all", spy)
    prompts = [[i] for i in range(24)]
    priority = [(7 * i) % 24 - 5 for i in range(24)]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    results = llm.generate(prompts, params, use_tqdm=False, priority=priority)
    assert [r.prompt_token_ids for r in results] == prompts
    assert [r.outputs[0].token_ids for r in results] == [tiny.reference_answer((i,), 3) for i in range(24)]
    first = min(ended)
    for turn in range(0, 24, 4):
        assert (
            sorted(priority[i - first] for i in ended[turn : turn + 4]) == sorted(priority)[turn : turn + 4]
        )
    with pytest.raises(InputError, match="priority has 1 entries, must have one for each of 24 prompts"):
        llm.generate(prompts, params, use_tqdm=False, priority=[1])
    with pytest.raises(
        InputError, match=r"prompt 3: priority='high' must be an int in \[-2\*\*31, 2\*\*31\)"
    ):
        llm.generate(prompts, params, use_tqdm=False, priority=[0, 0, 0, "high", *[0] * 20])


def test_priorities_need_their_policy(llm):
    with pytest.raises(InputError, match="^priority=3 must be 0 unless scheduling_policy is 'priority'"):
        llm.generate("a", GREEDY, use_tqdm=False, priority=[3])


PROGRAM = """
import weakref
class Anything: pass
first = weakref.finalize(Anything(), int)  # so that what weakref does at the end comes after what jax does
import sys
import jaxpaged
from jaxpaged.step import loop
traced = []
advance = loop.advance
def spy(*args):
    traced.append(args)
    return advance(*args)
spy.__module__ = loop.__name__  # with another's functions in place of ours, kept programs are not used
loop.advance = spy
llm = jaxpaged.LLM(sys.argv[1], **OPTIONS)
params = jaxpaged.SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
[result] = llm.generate([[1, 2, 3]], params, use_tqdm=False)
print(result.outputs[0].token_ids)
print(len(traced))
handles = [llm.engine.submit([4], params) for _ in range(1000)]
next(iter(handles[0]))
print("the end")
"""


def process(path, **environment):
    """One that loads a model, asks it, and ends with an engine at work."""
    command = [sys.executable, "-c", PROGRAM.replace("OPTIONS", repr(OPTIONS)), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)
    assert done.stdout.endswith("the end\n")
    assert done.stderr == ""
    assert done.returncode == 0
    tokens, traced, *_ = done.stdout.splitlines()
    assert json.loads(tokens) == tiny.reference_answer((1, 2, 3), 100)
    return int(traced)


def test_the_program_ends_cleanly_with_an_engine_at_work(path):
    process(path)


@pytest.mark.slow
def test_a_second_start_traces_no_step(path, tmp_path):
    assert [process(path, JAX_COMPILATION_CACHE_DIR=str(tmp_path)) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "^prompt='' must not be empty"),
        (["a", ""], GREEDY, "^prompt 1: prompt='' must not be empty"),
        (["a", []], GREEDY, "prompt 1: the prompt must have at least one token"),
        (["a", 7], GREEDY, "prompt 1: prompt=7 must be a string, a list of token ids, or a mapping"),
        (
            [{"text": "a"}],
            GREEDY,
            "^key of a prompt='text' must be one of prompt, prompt_token_ids, cache_salt",
        ),
        (["a", [5, 1000]], GREEDY, "prompt 1: prompt token=1000 must be a token id"),
        ([[5, 1000]], GREEDY, "^prompt token=1000 must be a token id"),
        ({"prompt_token_ids": 5}, GREEDY, "^prompt_token_ids=5 must be a list of token ids"),
        ({"prompt_token_ids": "ab"}, GREEDY, "^prompt_token_ids='ab' must be a list of token ids"),
        (
            ["a", [1] * 200],
            GREEDY,
            "prompt 1: the prompt has 200 tokens, must have less than max_model_len=128",
        ),
        (["a", "b"], [GREEDY], "sampling_params has 1 entries, must have one for each of 2 prompts"),
        ("a", [{"max_tokens": 3}], "sampling_params={'max_tokens': 3} must be a SamplingParams"),
        ("a", 3, "sampling_params=3 must be a SamplingParams or a list of them"),
        (
            "a",
            SamplingParams(allowed_token_ids=[0], min_tokens=3),
            r"^allowed_token_ids=\[0\] must have a token to choose as an answer's first: min_tokens=3 bars",
        ),
        (
            "a",
            SamplingParams(allowed_token_ids=[5], bad_words=["#"]),
            r"^allowed_token_ids=\[5\] must have a token to choose as an answer's first: bad_words bar some$",
        ),
        (
            "a",
            SamplingParams(allowed_token_ids=[5, 6], bad_words=["##", "#$"]),
            r"^allowed_token_ids=\[5, 6\] must have a token to choose behind the answer's tokens \[5\]: ",
        ),
        (
            "a",
            SamplingParams(stop_token_ids=[*range(97)], min_tokens=1),
            "^the vocabulary must have a token to choose as an answer's first: min_tokens=1 bars those that",
        ),
        ("a", SamplingParams(logprobs=5), "^logprobs=5 must be at most max_logprobs=4$"),
    ],
)
def test_bad_prompts_are_refused_and_nothing_runs(llm, prompts, params, message):
    steps = llm.engine.stats.num_steps
    with pytest.raises(InputError, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert not llm.engine._worker._in_flight
    assert llm.engine.stats.num_steps == steps


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([[]], "messages=.* must be a list with at least one message"),
        ([{"role": "user"}], "messages.0.content=None must be a string or a list of parts"),
        ([{"role": "user", "content": 3}], "messages.0.content=3 must be a string or a list of parts"),
        (["hello"], "must be a list with at least one message"),
    ],
)
def test_bad_messages_are_refused(llm, messages, message):
    with pytest.raises(InputError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_an_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="option 'blocksize' must be one of attention, block_size, "):
        jaxpaged.LLM("smollm2", blocksize=3)


def test_a_length_beyond_the_models_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(InputError, match="max_model_len=129 must be at most the model's 128"):
        jaxpaged.LLM(path, max_model_len=129)
