"""Calls of `LLM` beside each other, and how they end: threads, Ctrl-C, errors, and the program's end."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

import jaxpaged
from jaxpaged import InputError, SamplingParams
from jaxpaged.api import gather
from jaxpaged.engine.handle import EngineDeadError
from tests import tiny
from tests.api.tiny_llm import GREEDY, OPTIONS, reference_answer


def test_results_come_one_by_one_and_leaving_gives_up_the_rest(llm):
    prompts = tiny.prompts([3, 5, 7])
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    results = llm.generate_each(
        prompts, [dataclasses.replace(params, max_tokens=2), params, params], use_tqdm=False
    )
    assert next(results).prompt_token_ids == prompts[0]
    results.close()
    tiny.until(lambda: llm.engine.is_idle)
    unread = llm.generate_each(prompts, params, use_tqdm=False)
    del unread
    tiny.until(lambda: llm.engine.is_idle)


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
    monkeypatch.setattr(gather, "tqdm", Bar)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] for i in range(20)], tiny.greedy(100))
    hold.off()
    tiny.until(lambda: llm.engine.is_idle)
    assert llm.engine.stats.num_new_tokens - before <= 4 * 3
    monkeypatch.undo()
    [result] = llm.generate("ab 12", GREEDY, use_tqdm=False)
    assert result.outputs[0].token_ids == reference_answer(result.prompt_token_ids)


def test_a_dead_engine_is_told_to_those_who_wait_and_to_those_who_come(path, monkeypatch):
    llm = jaxpaged.LLM(path, **OPTIONS)

    def breaks(*_, **__):
        raise MemoryError("no more")

    monkeypatch.setattr(tiny.driver_of(llm.engine), "turn", breaks)
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
    """Start a process that loads a model, asks it, and ends while its engine works."""
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
