"""Grammars that the host follows: the oracle's answers in any company, and others keep their pace."""

import dataclasses

import jax
import numpy as np
import pytest
from absl import logging

from jaxpaged.api.outputs import FINISH_REASONS
from jaxpaged.checks import InputError
from jaxpaged.engine.by_host import Follower
from jaxpaged.engine.grammars import Grammars
from jaxpaged.engine.handle import collect
from jaxpaged.engine.request import Delta
from jaxpaged.grammar import recursive
from jaxpaged.grammar.compile import Constraint
from jaxpaged.grammar.nodes import Limits
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams
from jaxpaged.step.automata import BLOCK_WORDS, FREE, LOST, RESTS, WAITS
from jaxpaged.step.feature_values import GRAMMARS
from jaxpaged.step.state import FinishReason, Phase
from tests import tiny, tiny_grammars, tiny_recursive
from tests.tiny_recursive import asking

pytest.importorskip("llguidance")

REASONING = {"after_token_id": 96, "reasoning_token_id": 95}
# A program that others have, too.
OPTIONS = tiny.SWAP | {"scheduling_policy": "priority"}


@pytest.fixture(scope="module")
def driver():
    return tiny_recursive.with_languages(tiny.driver(**OPTIONS))


def test_answers_are_the_oracles_in_any_company(driver):
    """Rows that the host follows are swapped out, recalled and computed again, and fork; others run on."""
    greedy = {"temperature": 0, "max_tokens": 50}
    params = [
        SamplingParams(**greedy, **asking("sum", **REASONING), min_tokens=40),
        SamplingParams(**greedy, **asking("tree"), frequency_penalty=0.5, min_tokens=45),
        SamplingParams(**greedy, **tiny_grammars.asking(3), min_tokens=40),
        SamplingParams(
            **greedy,
            **asking("lists", **REASONING),
            logit_bias={95: 9.0, 96: 9.0},
            frequency_penalty=2.0,
            min_tokens=30,
        ),
        SamplingParams(temperature=0.9, max_tokens=30, **asking("sum"), seed=3, n=2, logprobs=2),
        tiny.greedy(40),
    ]
    prompts = tiny.prompts([1, 38, 37, 39, 20, 11])
    usual = tiny.add(driver, 1, prompts, params, priority=1)
    deltas: dict[int, list[Delta]] = {}
    gave_way = set[Phase]()  # of rows that rested meanwhile

    def turn(steps):
        for delta in driver.turn(max_steps=steps):
            deltas.setdefault(delta.request_id, []).append(delta)
        rows = jax.device_get(driver.state.rows)
        stopped = np.isin(rows.phase, [Phase.WAITING, Phase.SWAPPED]) & (rows.num_tokens > rows.prompt_lens)
        gave_way.update(
            Phase(p) for p in rows.phase[stopped & (rows.features[GRAMMARS].state == RESTS)].tolist()
        )
        waiting = [driver.rows[row] for _, row in driver.rows.waiting()]
        return any(entry.answer and entry.follower for entry in waiting)

    assert any(turn(3) for _ in range(100))
    urgent = tiny.add(
        driver, 50, [[i] for i in range(12)], [SamplingParams(temperature=0, max_tokens=3)] * 12
    )
    turn(3)
    recalled = [queued for queued in driver.queue if queued.answer and queued.request.grammar]
    assert any(queued.request.grammar.language for queued in recalled)
    while driver.has_work:
        turn(3)
    assert gave_way
    answers = {request_id: collect(its) for request_id, its in deltas.items()}
    oracles = [
        tiny_recursive.oracle("sum", opens=96, begins=95),
        tiny_recursive.oracle("tree"),
        tiny_grammars.oracle(params[2].structured_outputs),
        tiny_recursive.oracle("lists", opens=96, begins=95),
    ]
    for request, its, prompt, oracle in zip(usual[:4], params[:4], prompts[:4], oracles, strict=True):
        want = tiny.reference_greedy(prompt, its, oracle)
        assert answers[request.request_id].token_ids == want, request.request_id
    plain, reasoned = (answers[usual[i].request_id].token_ids for i in (0, 3))
    assert {*plain}.isdisjoint({95, 96})
    assert (reasoned[0], 96 in reasoned[1:-5]) == (95, True)
    assert answers[usual[-1].request_id].token_ids == tiny.reference_answer(tuple(prompts[-1]), 40)
    assert all(answers[request.request_id].token_ids for request in urgent)
    for request in usual[4:6]:
        answer = answers[request.request_id]
        for place, token in enumerate(answer.token_ids):
            assert token in tiny_recursive.oracle("sum").allowed(answer.token_ids[:place])
        alone = dataclasses.replace(request, request_id=request.request_id + 100, index=0)
        driver.add(alone)
        assert tiny.drain(driver)[alone.request_id].token_ids == answer.token_ids
    tiny.assert_nothing_is_held(driver)


def test_rows_that_the_host_follows_make_a_step_a_turn_and_others_as_many_as_they_may(driver):
    followed = SamplingParams(temperature=0, max_tokens=12, **asking("sum"), min_tokens=12)
    first, other = tiny.add(driver, 200, tiny.prompts([5, 6]), [followed, tiny.greedy(40)])
    told: dict[int, list[int]] = {first.request_id: [], other.request_id: []}
    while driver.has_work:
        for delta in driver.turn(max_steps=8):
            told[delta.request_id].append(len(delta.token_ids))
    assert max(told[first.request_id]) == 1
    assert sum(told[first.request_id]) == 12
    assert told[other.request_id][:5] == [8] * 5
    assert len(told[first.request_id]) <= len(told[other.request_id]) + 8, "one in each run"
    alone = dataclasses.replace(first, request_id=300)
    driver.add(alone)
    turns = 0
    while driver.has_work:
        driver.turn(max_steps=8)
        turns += 1
    assert turns <= 14, "alone, each turn samples a token"


def test_a_beam_search_is_refused_whose_masks_could_never_fit(driver):
    small = Grammars(tiny_recursive.compiled, tiny_grammars.VOCAB, 4 * BLOCK_WORDS)
    door = dataclasses.replace(driver.door, grammars=small)
    with pytest.raises(InputError, match=r"beam_width=4 must be one whose masks have room in"):
        door.admit_search([1], BeamSearchParams(beam_width=4, max_tokens=4, **asking("sum")))


def test_an_answer_whose_grammar_cannot_be_followed_ends_with_an_error_and_no_other_does(driver, monkeypatch):
    """No token comes unconstrained: from the host's parser, in a beam search, or behind a barred token."""
    said = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setitem(recursive.BOUNDS, "max_items_in_row", 20)
    source = Constraint({"grammar": 'start: s\ns: s s | "1"\n'}, Limits()).source()
    ambiguous = recursive.Language(source, tiny_recursive.TOKENS)
    grammars = Grammars(lambda params: ambiguous, tiny_grammars.VOCAB, driver.config.arena_words)
    usual = driver.door
    driver.door = dataclasses.replace(usual, grammars=grammars)
    greedy = SamplingParams(temperature=0, max_tokens=30, min_tokens=30, **asking("sum"))
    try:
        prompts = tiny.prompts([5, 6, 7])
        lost, free = tiny.add(driver, 400, prompts[:2], [greedy, tiny.greedy(30)])
        width = 2
        asked = BeamSearchParams(beam_width=width, max_tokens=30, **asking("sum"))
        search = [
            dataclasses.replace(each, request_id=410 + i)
            for i, each in enumerate(driver.door.admit_search(prompts[2], asked))
        ]
        for each in search:
            driver.add(each)
        grammar = usual.grammars.get(tiny_grammars.asking(3)["structured_outputs"])
        barred = np.flatnonzero(~grammar.automaton.allowed(grammar.automaton.start))[1]
        driver.add(dataclasses.replace(lost, request_id=450, grammar=grammar), answer=[int(barred)])
        ended = tiny.drain(driver)
    finally:
        driver.door = usual
    error = [i for i, delta in ended.items() if delta.finish_reason is FinishReason.ERROR]
    assert sorted(error) == [lost.request_id, *range(410, 410 + 2 * width), 450]
    ones = {i for i, raw in enumerate(tiny_recursive.TOKENS.raw) if raw and set(raw) == {ord("1")}}
    assert 1 < len(ended[lost.request_id].token_ids) < 30
    assert {*ended[lost.request_id].token_ids} <= ones, "all of the answer is by the grammar"
    assert ended[free.request_id].token_ids == tiny.reference_answer(tuple(prompts[1]), 30)
    assert len(ended[450].token_ids) <= 2
    assert FINISH_REASONS[FinishReason.ERROR] == "error"
    assert sum("ends with an error behind" in line and "Current row has" in line for line in said) == 2
    assert any("request 450" in line and "it bars" in line for line in said)
    tiny.assert_nothing_is_held(driver)


def test_an_answer_goes_on_only_from_what_its_grammar_allows(driver):
    one = tiny_recursive.PIECES.index("1") + 1
    allowed = {"sum": [one], "automaton": [1, 2]}
    for name, params in (
        ("sum", SamplingParams(max_tokens=9, **asking("sum"))),
        ("automaton", SamplingParams(max_tokens=9, **tiny_grammars.asking(0))),
    ):
        [request] = driver.door.admit([1], params, continue_from=allowed[name])
        assert request.continues == tuple(allowed[name])
        with pytest.raises(InputError, match="continue_from=.* must be the beginning of an answer that"):
            driver.door.admit([1], params, continue_from=[*allowed[name], 90])
        asked = dataclasses.replace(params.structured_outputs, **REASONING)
        params = dataclasses.replace(params, structured_outputs=asked)
        for begun in ([], [95, 90, 96]):
            driver.door.admit([1], params, continue_from=[*begun, *allowed[name]])
            with pytest.raises(InputError, match="continue_from=.* must be the beginning of an answer that"):
                driver.door.admit([1], params, continue_from=[*begun, *allowed[name], 90])


def test_a_follower_tells_a_mask_once_and_none_before_the_beginning_or_behind_a_barred_token():
    language, one = tiny_recursive.language("sum"), tiny_recursive.PIECES.index("1") + 1
    follower = Follower(language, opens=96)
    assert follower.due([]) is None
    assert follower.due([one, 5]) is None
    state, allowed = follower.due([one, 5, 96, one])
    assert state == 0
    assert {*allowed.nonzero()[0].tolist()} == tiny_recursive.oracle("sum").allowed([one])
    assert follower.due([one, 5, 96, one]) is None
    assert follower.due([one, 5, 96, one, one]) is None
    assert follower.problem == f"the token {one} came, which it bars"
    assert follower.due([one, 5, 96, one, one, one]) is None
    assert Follower(language, None).due([])[0] == 0
    reasons = Follower(language, opens=96, begins=95)
    [state, allowed] = reasons.due([])
    started = tiny_recursive.oracle("sum").allowed([])
    assert (state, {*allowed.nonzero()[0].tolist()}) == (0, started | {95})
    other = reasons.copy()
    assert reasons.due([95]) == (WAITS, None)
    assert reasons.due([95, one, 95]) is None
    assert {*reasons.due([95, one, 95, 96])[1].nonzero()[0].tolist()} == started
    assert {*other.due([one])[1].nonzero()[0].tolist()} == tiny_recursive.oracle("sum").allowed([one])
    assert other.due([one, 95]) is None
    assert other.problem == "the token 95 came, which it bars"
    assert len({FREE, WAITS, RESTS, LOST}) == 4
