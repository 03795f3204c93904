"""Structured outputs in the engine: the oracle's answers in any company, and the room of their automata."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpaged import config
from jaxpaged.checks import InputError
from jaxpaged.engine.arena import Arena, Grammar
from jaxpaged.engine.grammars import Grammars
from jaxpaged.engine.handle import collect
from jaxpaged.engine.request import Delta
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.automata import BLOCK_WORDS
from jaxpaged.step.feature_values import GRAMMARS
from jaxpaged.step.state import FinishReason, Phase
from jaxpaged.structured_outputs import StructuredOutputsParams
from tests import tiny, tiny_grammars
from tests.tiny_grammars import asking

REASONING = {"after_token_id": 96, "reasoning_token_id": 95}
# A program that others have, too.
OPTIONS = tiny.SWAP | {"scheduling_policy": "priority"}


@pytest.fixture(scope="module")
def driver():
    return tiny_grammars.with_grammars(tiny.driver(**OPTIONS))


def test_answers_are_the_oracles_in_any_company(driver):
    """Rows are swapped out; others are recalled for who is more urgent, and computed again."""
    params = [
        SamplingParams(temperature=0, max_tokens=99, **asking(0)),
        SamplingParams(
            temperature=0, max_tokens=50, **asking(1, **REASONING), frequency_penalty=0.5, min_tokens=45
        ),
        SamplingParams(
            temperature=0,
            max_tokens=50,
            **asking(3, **REASONING),
            frequency_penalty=0.5,
            logit_bias={95: 9.0, 96: 7.0},
            min_tokens=40,
        ),
        SamplingParams(temperature=0, max_tokens=45, **asking(4, after_token_id=96), min_tokens=3),
        SamplingParams(temperature=0.9, max_tokens=30, **asking(5), seed=3, n=2, logprobs=2),
        tiny.greedy(40),
    ]
    prompts = tiny.prompts([1, 38, 37, 39, 20, 11])
    usual = tiny.add(driver, 1, prompts, params, priority=1)
    deltas: dict[int, list[Delta]] = {}
    seen: set[Phase] = set()

    def turn(steps):
        for delta in driver.turn(max_steps=steps):
            deltas.setdefault(delta.request_id, []).append(delta)
        rows = jax.device_get(driver.state.rows)
        gave_way = np.isin(rows.phase, [Phase.WAITING, Phase.SWAPPED]) & (rows.num_tokens > rows.prompt_lens)
        follows = (rows.features[GRAMMARS].first > 0) & (rows.features[GRAMMARS].state > 0)
        seen.update(Phase(p) for p in rows.phase[gave_way & follows].tolist())

    for _ in range(28):
        turn(1)
    urgent = tiny.add(driver, 50, [[i] for i in range(8)], [SamplingParams(temperature=0, max_tokens=3)] * 8)
    turn(1)
    assert any(queued.answer and queued.request.grammar for queued in driver.queue), "recalled"
    while driver.has_work:
        turn(1)
    assert Phase.SWAPPED in seen
    answers = {request_id: collect(its) for request_id, its in deltas.items()}
    greedy = zip(usual[:4], params[:4], strict=True)
    for (request, its), prompt in zip(greedy, prompts, strict=False):
        want = tiny.reference_greedy(prompt, its, tiny_grammars.oracle(its.structured_outputs))
        assert answers[request.request_id].token_ids == want, request.request_id
    plain, reasoned = (answers[request.request_id].token_ids for request in usual[1:3])
    assert {*plain}.isdisjoint({95, 96})
    assert (reasoned[0], reasoned.index(96) < 20) == (95, True)
    assert answers[usual[0].request_id].finish_reason is FinishReason.STOP
    assert answers[usual[-1].request_id].token_ids == tiny.reference_answer(tuple(prompts[-1]), 40)
    assert all(len(answers[request.request_id].token_ids) == 3 for request in urgent)
    oracle = tiny_grammars.oracle(params[4].structured_outputs)
    for request in usual[4:6]:
        answer = answers[request.request_id]
        for place, token in enumerate(answer.token_ids):
            allowed = oracle.allowed(answer.token_ids[:place])
            assert token in allowed
            assert answer.scores[place].logprob <= 0
            told = [value for _, value in answer.scores[place].top]
            assert sum(np.exp(told)) > 1 - 1e-5 or len(allowed) > 2, "among what is allowed"
        alone = dataclasses.replace(request, request_id=request.request_id + 100, index=0)
        driver.add(alone)
        assert tiny.drain(driver)[alone.request_id].token_ids == answer.token_ids
    tiny.assert_nothing_is_held(driver)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [{"prompt_lookup_min": 1}, {"method": "grammar"}], ids=str)
def test_forced_text_is_drafted_and_no_answer_changes(drafts):
    """An automaton that forces 60 tokens takes few steps; the answers are the oracles', with their scores."""
    driver = tiny_grammars.with_grammars(
        tiny.driver(**tiny.SWAP, speculative_config=drafts, decode_widths=(2,))
    )
    params = [
        SamplingParams(temperature=0.9, max_tokens=99, **asking(0), logprobs=1),
        SamplingParams(temperature=0, max_tokens=30, **asking(4), frequency_penalty=0.5, min_tokens=25),
    ]
    [forced, other], prompts = tiny.add(driver, 1, tiny.prompts([5, 9]), params), tiny.prompts([5, 9])
    answers, steps = tiny.drain(driver), driver.stats.num_steps
    assert answers[forced.request_id].token_ids == [*range(1, 61), tiny_grammars.END]
    assert max(score.logprob for score in answers[forced.request_id].scores) < 1e-5
    assert min(score.logprob for score in answers[forced.request_id].scores) > -1e-5
    counts = answers[forced.request_id].drafts
    assert counts.num_draft_tokens == counts.num_accepted_draft_tokens >= 40, (
        "in the two slots that are empty"
    )
    oracle = tiny_grammars.oracle(params[1].structured_outputs)
    assert answers[other.request_id].token_ids == tiny.reference_greedy(prompts[1], params[1], oracle)
    driver.add(dataclasses.replace(forced, request_id=9))
    assert tiny.drain(driver)[9].token_ids == answers[forced.request_id].token_ids
    assert driver.stats.num_steps - steps <= 2 + 60 // 4, "four slots"
    tiny.assert_nothing_is_held(driver)


@pytest.mark.slow
def test_an_engine_takes_the_arena_when_a_request_first_asks(monkeypatch):
    """Requests that run meanwhile stay in their rows, and their answers and scores do not change."""
    monkeypatch.setattr(config, "LATE_ARENA_MIB", 1)
    options = {name: value for name, value in OPTIONS.items() if name != "structured_outputs_mib"}
    sampled = SamplingParams(temperature=0.8, max_tokens=30, seed=5, logprobs=3)

    def answer(*, asks: bool):
        driver = tiny_grammars.with_grammars(tiny.driver(**options))
        [first] = tiny.add(driver, 1, tiny.prompts([20]), [sampled])
        deltas = [delta for _ in range(9) for delta in driver.turn(max_steps=1)]
        assert GRAMMARS not in driver.state.features.keys() | driver.state.rows.features.keys()
        before = driver.state.tables.seq_lens[0]
        if asks:
            params = SamplingParams(temperature=0, max_tokens=30, **asking(1))
            [asked] = tiny.add(driver, 2, tiny.prompts([9]), [params])
            deltas += driver.turn(max_steps=1)
            assert driver.state.tables.seq_lens[0] >= before > 20, "it has kept its row"
        while driver.has_work:
            deltas += driver.turn(max_steps=1)
        tiny.assert_nothing_is_held(driver)
        if asks:
            want = tiny.reference_greedy(
                tiny.prompts([9])[0], params, tiny_grammars.oracle(params.structured_outputs)
            )
            assert collect([each for each in deltas if each.request_id == asked.request_id]).token_ids == want
            with pytest.raises(InputError, match="structured_outputs_mib=1 must be None for a snapshot"):
                driver.snapshot()
        else:
            assert GRAMMARS not in driver.snapshot().state.features
        return collect([each for each in deltas if each.request_id == first.request_id])

    alone, beside = answer(asks=False), answer(asks=True)
    assert alone.token_ids == beside.token_ids
    assert alone.scores == beside.scores


def test_what_finds_no_room_waits_and_who_needs_none_overtakes(driver):
    def large(seed):
        its = tiny_grammars.compiled(asking(seed)["structured_outputs"])
        words = driver.door.grammars.get(asking(seed)["structured_outputs"]).words
        return Grammar(its, np.pad(words, (0, 150 * BLOCK_WORDS)))

    asked = SamplingParams(temperature=0, max_tokens=6)
    first, second, other = tiny.numbered(
        [request for prompt in ([1], [2], [3]) for request in driver.door.admit(prompt, asked)]
    )
    first, second = (
        dataclasses.replace(each, grammar=large(seed)) for each, seed in ((first, 6), (second, 7))
    )
    for each in (first, second, other):
        driver.add(each)
    ended = []
    answers: dict[int, list[Delta]] = {}
    while driver.has_work:
        for delta in driver.turn(max_steps=1):
            answers.setdefault(delta.request_id, []).append(delta)
            ended += [delta.request_id] if delta.finish_reason else []
    assert ended.index(other.request_id) < ended.index(second.request_id)
    for each, seed in ((first, 6), (second, 7)):
        oracle = tiny_grammars.oracle(asking(seed)["structured_outputs"])
        want = tiny.reference_greedy(each.prompt_token_ids.tolist(), asked, oracle)
        assert collect(answers[each.request_id]).token_ids == want


def test_the_arena_is_dealt_out_by_first_fit_and_taken_back_from_the_longest_unused():
    a, b, c, d = (Grammar(None, np.zeros(n * BLOCK_WORDS, np.uint32)) for n in (4, 3, 2, 5))
    arena = Arena(12 * BLOCK_WORDS)  # 11 blocks for use

    def find(grammar, *in_use):
        first, is_new = arena.find(grammar, in_use)
        return None if first is None else first // BLOCK_WORDS, is_new

    assert [find(a), find(b, a), find(c, a, b)] == [(1, True), (5, True), (8, True)]
    assert find(a, b) == (1, False)
    assert not arena.has_room(d, {a, c})
    assert find(d, a, c) == (None, False)
    assert find(b, a, c) == (5, False), "what finds no room drives nobody out"
    assert find(d, b) == (None, False), "nowhere are 5 neighbouring blocks free"
    assert find(d, c) == (1, True)
    assert [arena.has_room(each, {c, d}) for each in (a, b, c)] == [False, False, True]
    assert arena.row_values(None, []) == {"first": 0, "state": -1, "opens": 0}


def test_what_could_never_fit_or_run_is_refused_at_the_door(driver):
    compiled = []
    count = lambda params: compiled.append(params) or tiny_grammars.compiled(params)  # noqa: E731
    grammars = Grammars(count, tiny_grammars.VOCAB, BLOCK_WORDS)
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"^structured_outputs.regex makes an automaton of 61 states and \d+ "
        ):
            grammars.get(StructuredOutputsParams(regex="0"))
    assert len(compiled) == 1, "the refusal is remembered"
    endless = dataclasses.replace(driver.door.model_config, eos_token_ids=())
    door = dataclasses.replace(driver.door, model_config=endless)
    with pytest.raises(InputError, match="None for a model without an end-of-sequence token"):
        door.admit([1], SamplingParams(**asking(1)))
    with pytest.raises(InputError, match=r"after_token_id=97 must be a token id, an int in \[0, 97\)"):
        driver.door.admit([1], SamplingParams(**asking(1, after_token_id=97)))
    with pytest.raises(InputError, match=r"reasoning_token_id=97 must be a token id, an int in \[0, 97\)"):
        driver.door.admit([1], SamplingParams(**asking(1, after_token_id=1, reasoning_token_id=97)))
    door = dataclasses.replace(driver.door, grammars=None)
    with pytest.raises(InputError, match="must be None without structured_outputs_mib"):
        door.admit([1], SamplingParams(**asking(1)))
    for given, what in (
        ({}, "none is given"),
        ({"regex": "a", "json_object": True}, "regex, json_object are given"),
        ({"regex": "a", "reasoning_token_id": 3}, "reasoning_token_id=3 must be None, or an int >= 0 beside"),
        ({"regex": "a", "after_token_id": 3, "reasoning_token_id": 3}, "beside another after_token_id"),
    ):
        with pytest.raises(InputError, match=what):
            StructuredOutputsParams(**given)
