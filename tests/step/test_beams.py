"""Beam searches against the plain one over whole sequences, and transformers' answers."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpaged import LLM, BeamSearchParams, InputError
from jaxpaged.api.outputs import BeamSearchOutput, beam_search_output
from jaxpaged.config import EngineConfig
from jaxpaged.engine.driver import Driver
from jaxpaged.models import loading, weights
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.weights import StoredWeights
from jaxpaged.step.state import FinishReason
from reference import model as reference_model
from reference.beam_search import BeamSearch, Hypothesis, beam_search
from reference.context_free import TokenGrammar
from reference.sampler import TokenAutomaton
from tests import tiny, tiny_grammars, tiny_recursive
from tests.marks import slow_and_nightly

GOLDENS = Path(__file__).parents[1] / "goldens"
SEARCHES = json.loads((GOLDENS / "beam_searches.json").read_text())
# Float32 against float64: the order of sums decides nothing that differs by more.
TOLERANCE = 1e-4


def logprobs_of(tokens: list[int]) -> np.ndarray:
    return log_softmax(tiny.reference_logits(tuple(tokens))[-1])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    above = logits.astype(np.float64) - logits.max()
    return (above - np.log(np.exp(above).sum())).astype(np.float32)


def searched(
    driver, asked: list[tuple[list[int], BeamSearchParams]], company=(), max_steps: int | None = None
) -> list[BeamSearchOutput]:
    """Return what a search finds, beside prompts that are answered in the same batch."""
    groups = []
    to_the_end = dataclasses.replace(tiny.greedy(20), ignore_eos=True)
    beside = tiny.submit(driver, list(company), to_the_end)
    for prompt, params in asked:
        groups.append(tiny.numbered(driver.door.admit_search(prompt, params)))
        for request in groups[-1]:
            driver.add(request)
    answers = tiny.drain(driver, max_steps)
    for request_id, prompt in zip(beside, company, strict=True):
        assert answers[request_id].token_ids == tiny.reference_answer(tuple(prompt), 20)
    return [beam_search_output(group[0], [answers[r.request_id] for r in group], None) for group in groups]


def assert_same(output: BeamSearchOutput, want: list[Hypothesis]) -> None:
    assert [sequence.tokens for sequence in output.sequences] == [each.tokens for each in want]
    sums = [sequence.cum_logprob for sequence in output.sequences]
    np.testing.assert_allclose(sums, [each.cum_logprob for each in want], atol=TOLERANCE)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_answers_are_those_of_the_plain_search_in_any_company(data):
    """The pool is too small for all at once."""
    ends = (5, 11, 40, 41)
    driver = with_ends(tiny.driver(**tiny.SMALL), *ends)
    asked, want = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        [prompt] = tiny.prompts([data.draw(st.integers(1, 40))], seed=data.draw(st.integers(0, 9)))
        params = BeamSearchParams(
            beam_width=data.draw(st.integers(1, 4)),
            max_tokens=data.draw(st.integers(1, 12)),
            length_penalty=data.draw(st.sampled_from([1.0, 0.0, -0.5, 2.0])),
            ignore_eos=data.draw(st.booleans()),
        )
        asked.append((prompt, params))
        its_ends = () if params.ignore_eos else ends
        most = len(prompt) + params.max_tokens
        search = BeamSearch(prompt, params.beam_width, most, its_ends, params.length_penalty)
        want.append(beam_search(logprobs_of, search))
    company = tiny.prompts([9, 30], seed=1) if data.draw(st.booleans()) else []
    for output, its in zip(searched(driver, asked, company), want, strict=True):
        assert_same(output, its)
    tiny.assert_nothing_is_held(driver)


def with_ends(driver: Driver, *ends: int) -> Driver:
    model_config = dataclasses.replace(tiny.CONFIG, eos_token_ids=ends)
    driver.door = dataclasses.replace(driver.door, model_config=model_config)
    return driver


def barred_logprobs(
    prompt: list[int], constraint: TokenAutomaton | TokenGrammar, tokens: list[int]
) -> np.ndarray:
    """Return the log-probabilities of the allowed tokens, minus infinity for others."""
    logits = np.full(tiny.CONFIG.vocab_size, -np.inf)
    may_come = constraint.allowed(tokens[len(prompt) :])
    allowed = [*range(len(logits))] if may_come is None else sorted(may_come)
    logits[allowed] = tiny.reference_logits(tuple(tokens))[-1][allowed]
    with np.errstate(divide="ignore"):
        return log_softmax(logits)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3, 8])
def test_every_beam_follows_its_own_state_of_the_automaton(seed):
    """Seed 0 allows one token at a time, so that no other beam is left; others have ends, forks and loops."""
    [prompt] = tiny.prompts([20], seed=seed)
    asked = tiny_grammars.asking(seed)
    params = BeamSearchParams(beam_width=2, max_tokens=14, **asked)
    constraint = tiny_grammars.oracle(asked["structured_outputs"])
    search = BeamSearch(prompt, 2, 20 + 14, (tiny_grammars.END,))
    want = beam_search(functools.partial(barred_logprobs, prompt, constraint), search)
    driver = constrained_driver()
    company = tiny.prompts([30, 9], seed=1)
    [output] = searched(driver, [(prompt, params)], company)
    assert_same(output, want)
    for sequence in output.sequences:
        answer = sequence.tokens[len(prompt) :]
        assert all(token in constraint.allowed(answer[:i]) for i, token in enumerate(answer))
    tiny.assert_nothing_is_held(driver)


@pytest.mark.parametrize(("opens", "reasons"), [(None, False), (96, False), (96, True)])
def test_every_beam_has_its_own_place_in_a_recursive_grammar(opens, reasons):
    """Behind a token that opens the grammar some beams are followed, while others are free.

    reasons: whether the likeliest first token begins reasoning, and other ones the grammar.
    """
    pytest.importorskip("llguidance")
    [prompt] = tiny.prompts([20], seed=7)
    begins = likeliest(prompt, 1)[0] if reasons else None
    asked = tiny_recursive.asking("sum", after_token_id=opens, reasoning_token_id=begins)
    params = BeamSearchParams(beam_width=3, max_tokens=12, **asked)
    constraint = tiny_recursive.oracle("sum", opens, begins)
    search = BeamSearch(prompt, 3, 20 + 12, (tiny_recursive.END,))
    want = beam_search(functools.partial(barred_logprobs, prompt, constraint), search)
    driver = constrained_driver()
    company = tiny.prompts([30, 9], seed=1)
    [output] = searched(driver, [(prompt, params)], company)
    assert_same(output, want)
    tiny.assert_nothing_is_held(driver)


@functools.cache
def constrained_driver() -> Driver:
    """Return the engine of the tests of structured outputs, with the same program."""
    return tiny_recursive.with_languages(tiny.driver(**tiny.SWAP, scheduling_policy="priority"))


def likeliest(tokens: list[int], count: int) -> list[int]:
    return np.argsort(-logprobs_of(tokens))[:count].tolist()


@pytest.mark.slow
def test_what_ends_is_compared_by_its_length_without_the_end():
    """One ends in the first step, the other in the second: with lengths of one and two that is the better,
    with lengths of two and two it would not be.
    """
    [prompt] = tiny.prompts([1], seed=5)
    first, second = likeliest(prompt, 2)
    ends = (second, *likeliest([*prompt, first], 2))
    [want] = beam_search(logprobs_of, BeamSearch(prompt, 1, 1 + 4, ends, length_penalty=2.0))
    assert (want.tokens[:2], want.has_ended) == ([*prompt, first], True)
    assert logprobs_of(prompt)[second] > want.cum_logprob
    params = BeamSearchParams(beam_width=1, max_tokens=4, length_penalty=2.0)
    [output] = searched(with_ends(tiny.driver(), *ends), [(prompt, params)])
    assert_same(output, [want])


def test_a_search_goes_on_while_a_longer_answer_may_be_better():
    """For a while what has ended is better than what runs; with a penalty of 2 the longest is the best."""
    [prompt] = tiny.prompts([6], seed=0)
    end = likeliest(prompt, 2)[1]
    search = BeamSearch(prompt, 1, 6 + 36, (end,), length_penalty=2.0)
    was_behind = False
    while not search.is_done:
        search.step([logprobs_of(beam.tokens) for beam in search.beams])
        was_behind |= search.ended[0].score(2.0) > search.beams[0].score(2.0)
    [want] = search.answers
    assert was_behind
    assert not want.has_ended
    params = BeamSearchParams(beam_width=1, max_tokens=36, length_penalty=2.0)
    [output] = searched(with_ends(tiny.driver(), end), [(prompt, params)])
    assert_same(output, [want])


def test_what_ended_is_told_with_its_end_and_its_scores():
    [prompt] = tiny.prompts([12], seed=3)
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0)
    [first] = likeliest(prompt, 1)
    # In one run, in which rows exchange what they hold before any of it is read.
    [output] = searched(with_ends(tiny.driver(), first), [(prompt, params)], max_steps=32)
    best = output.sequences[0]
    assert (best.tokens, best.finish_reason, best.stop_reason) == ([*prompt, first], "stop", first)
    assert best.cum_logprob == pytest.approx(best.logprobs[0][first].logprob)
    for sequence in output.sequences:
        answer = sequence.tokens[len(prompt) :]
        told = [its[token] for token, its in zip(answer, sequence.logprobs, strict=True)]
        assert sum(each.logprob for each in told) == pytest.approx(sequence.cum_logprob, abs=TOLERANCE)
        for i, (each, its) in enumerate(zip(told, sequence.logprobs, strict=True)):
            want = logprobs_of([*prompt, *answer[:i]])
            assert each.logprob == pytest.approx(want[answer[i]], abs=TOLERANCE)
            by_rank = sorted(its, key=lambda token: its[token].rank)
            assert by_rank == np.argsort(-want)[: 2 * params.beam_width].tolist()


def test_of_equally_good_answers_the_one_that_ended_earlier_is_the_first():
    """A model of zeros finds all tokens alike, so behind a prompt of one token the answer [1], and after it
    [0, 1] and [2, 1], have the same score; there is room for two.
    """
    nothing = {name: np.zeros_like(tensor) for name, tensor in tiny.weights().items()}
    driver = tiny.driver(lambda load_as: Decoder(StoredWeights(tiny.CONFIG, NAMES, nothing, load_as)))
    alike = np.full(tiny.CONFIG.vocab_size, -np.log(np.float32(tiny.CONFIG.vocab_size)))
    search = BeamSearch([9], 2, 1 + 3, (1,))
    while not search.is_done:
        search.step([alike for _ in search.beams])
    assert [each.tokens for each in search.ended] == [[9, 1], [9, 0, 1]]
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    requests = tiny.numbered(with_ends(driver, 1).door.admit_search([9], params))
    for request in requests:
        driver.add(request)
    ended = [answer for answer in tiny.drain(driver).values() if answer.finish_reason is FinishReason.STOP]
    ended.sort(key=lambda answer: answer.beam.rank)
    assert [answer.token_ids for answer in ended] == [[1], [0, 1]]


def test_a_temperature_divides_the_logits():
    driver = tiny.driver()
    [prompt] = tiny.prompts([5], seed=4)
    params = BeamSearchParams(beam_width=2, max_tokens=3, temperature=2.5)
    [output] = searched(driver, [(prompt, params)])

    def flatter(tokens):
        return log_softmax(tiny.reference_logits(tuple(tokens))[-1] / 2.5)

    assert_same(output, beam_search(flatter, BeamSearch(prompt, 2, len(prompt) + 3)))


def test_the_plain_searchs_answers_are_transformers():
    checkpoint = loading.open_checkpoint(GOLDENS / "gqa_tied")
    by_role = weights.by_role(checkpoint.config, checkpoint.names, checkpoint.load_weights())

    @functools.cache
    def logprobs(tokens):
        return log_softmax(reference_model.logits(checkpoint.config, by_role, list(tokens))[-1])

    for golden in (golden for golden in SEARCHES if golden["model"] == "gqa_tied"):
        num_tokens = len(golden["prompt"]) + len(golden["answers"][0])
        search = BeamSearch(golden["prompt"], golden["width"], num_tokens, length_penalty=0)
        found = beam_search(lambda tokens: logprobs(tuple(tokens)), search)
        assert [each.tokens[len(golden["prompt"]) :] for each in found] == golden["answers"]
        if golden["cum_logprobs"]:
            sums = [each.cum_logprob for each in found]
            np.testing.assert_allclose(sums, golden["cum_logprobs"], atol=1e-3)


# The plain search's they are in the other tests.
@pytest.mark.parametrize("model", slow_and_nightly(["gqa_tied", "smollm2"], ["gqa_tied"]))
def test_answers_are_transformers(model):
    path = model if model == "smollm2" else GOLDENS / model
    llm = LLM(path, dtype="float32", max_num_seqs=10, max_model_len=128, num_blocks=1 + 80)
    for golden in (golden for golden in SEARCHES if golden["model"] == model):
        num_new = len(golden["answers"][0])
        params = BeamSearchParams(
            beam_width=golden["width"], max_tokens=num_new, length_penalty=0, ignore_eos=True
        )
        [output] = llm.beam_search([golden["prompt"]], params)
        assert [sequence.tokens[-num_new:] for sequence in output.sequences] == golden["answers"]
        if golden["cum_logprobs"]:
            sums = [sequence.cum_logprob for sequence in output.sequences]
            np.testing.assert_allclose(sums, golden["cum_logprobs"], atol=1e-3)
        texts = [llm.tokenizer and llm.tokenizer.decode(s.tokens) for s in output.sequences]
        assert [sequence.text for sequence in output.sequences] == texts


def test_a_search_that_cannot_run_is_refused():
    driver = tiny.driver(**tiny.SMALL)
    cases = [
        ({"beam_width": 0}, "beam_width=0 must be an int in [1, 10]"),
        ({"beam_width": 11}, "beam_width=11 must be"),
        ({"max_tokens": 0}, "max_tokens=0 must be"),
        ({"length_penalty": 9.5}, "length_penalty=9.5 must be in [-5, 5]"),
        ({"temperature": -1}, "temperature=-1 must be"),
        ({"ignore_eos": 3}, "ignore_eos=3 must be"),
        ({"beam_width": 5}, "beam_width=5 must be at most max_num_seqs=4"),
        ({"beam_width": 4, "max_tokens": 50}, "with max_tokens=50 and beam_width=4 needs 29 blocks"),
    ]
    for options, words in cases:
        with pytest.raises(InputError, match=re.escape(words)):
            driver.door.admit_search(
                [1] * 9, BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | options)
            )
    with pytest.raises(InputError, match="params=3 must be a BeamSearchParams"):
        driver.door.admit_search([1], 3)


def test_given_up_it_leaves_nothing_behind():
    """A search is aborted while its prompt is computed, while it decodes, and in the queue."""
    driver = tiny.driver()
    [prompt] = tiny.prompts([100], seed=5)
    params = BeamSearchParams(beam_width=4, max_tokens=20)
    for turns in (0, 1, 2, 4):
        its = [tiny.numbered(driver.door.admit_search(prompt, params)) for _ in range(2)]
        for request in [*its[0], *its[1]]:
            driver.add(request)
        deltas = [delta for _ in range(turns) for delta in driver.turn(max_steps=1)]
        deltas += driver.abort([request.request_id for group in its for request in group])
        while driver.has_work:
            deltas += driver.turn()
        assert len(deltas) == 16
        assert {delta.finish_reason for delta in deltas} == {FinishReason.ABORT}
        tiny.assert_nothing_is_held(driver)


@pytest.mark.slow
def test_beams_hold_hardly_more_blocks_than_they_must():
    """Eight beams of 256 tokens: the blocks that differ in something, counted after every step."""
    config = dataclasses.replace(tiny.CONFIG, max_model_len=512)
    load = functools.partial(tiny.load, config=config)
    options = tiny.DEFAULTS | {"max_num_seqs": 8, "num_blocks": 1 + 8 * 36}
    driver = Driver(EngineConfig(**options), config, load)
    [prompt] = tiny.prompts([27], seed=6)
    requests = tiny.numbered(driver.door.admit_search(prompt, BeamSearchParams(beam_width=8, max_tokens=256)))
    for request in requests:
        driver.add(request)
    held, least = [], []
    block_size = driver.config.block_size
    while driver.has_work:
        driver.turn(max_steps=1)
        state = driver.state
        lens, lines = np.asarray(state.tables.seq_lens), np.asarray(state.rows.token_ids)
        contents = {
            tuple(lines[row, : min(end + block_size, lens[row])].tolist())
            for row in range(len(lens))
            for end in range(0, int(lens[row]), block_size)
        }
        least.append(len(contents))
        held.append(driver.cache_size.num_blocks - 1 - int(state.tables.pool.num_free))
    assert max(least) > 40
    assert sum(held) <= 1.2 * sum(least)
    assert max(held) <= 1.2 * max(least)
