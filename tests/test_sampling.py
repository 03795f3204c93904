"""The sampler: its distribution against the NumPy one for every option and mix, and what a draw may depend
on."""

import functools
import random
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from jaxpaged import InputError, sampling
from jaxpaged.config import EngineConfig, LogprobsMode
from jaxpaged.engine.door import Door
from jaxpaged.engine.request import Request
from jaxpaged.engine.request_encoding import filled, row_values
from jaxpaged.memory.sizing import CacheSize
from jaxpaged.sampling import Context, first_ranked, likeliest, sample
from jaxpaged.sampling_filters import filter_rows, filtered
from jaxpaged.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxpaged.sampling_state import SamplingState, token_bits, tokens_of
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import Rows, empty_rows
from reference import sampler as reference

VOCAB = 12
OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 2.0, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.5, "min_p": 1.0},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
]


def options(rows: list[dict], seeds: list[int]) -> SamplingState:
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: [(defaults | row)[name] for row in rows] for name in ("temperature", *defaults)}
    return SamplingState(
        temperature=np.array(columns["temperature"], np.float32),
        top_k=np.array(columns["top_k"], np.int32),
        top_p=np.array(columns["top_p"], np.float32),
        min_p=np.array(columns["min_p"], np.float32),
        seed=np.array(seeds, np.uint32),
        num_logprobs=np.full(len(seeds), -1, np.int32),
        has_rules=np.zeros(len(seeds), bool),
    )


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    values = np.random.default_rng(0).normal(scale=1.5, size=VOCAB).astype(np.float32)
    values[5] = values[3]  # a tie, which the lower id wins
    return values


@pytest.mark.parametrize("row", OPTIONS, ids=str)
def test_draws_follow_the_reference_distribution(row, logits):
    """A chi-square test; the draws are fixed by their seeds."""
    num_draws = 4000
    draws = jax.jit(sample)(
        jnp.tile(logits, (num_draws, 1)),
        options([row] * num_draws, list(range(num_draws))),
        jnp.full(num_draws, 7, jnp.int32),
    )
    assert_follow(draws, reference.probabilities(logits, **row))


def test_draws_from_a_large_vocabulary_follow_softmax():
    """Several groups of it, of which one is empty, and the last one padding for the most part."""
    num_draws, size = 30_000, sampling.DRAWN_GROUP
    logits = np.random.default_rng(5).normal(scale=1.5, size=4 * size + 3).astype(np.float32)
    logits[size : 2 * size] = -np.inf
    logits[-3:] += 3
    rows = options([{"temperature": 1.0}] * num_draws, list(range(num_draws)))
    draws = jax.jit(sample)(jnp.tile(logits, (num_draws, 1)), rows, jnp.full(num_draws, 3, jnp.int32))
    assert_follow(draws, reference.probabilities(logits, 1.0))


def assert_follow(draws: jax.Array, chance: np.ndarray) -> None:
    counts = np.bincount(draws, minlength=len(chance))
    assert not counts[chance == 0].any(), "a token was drawn that the options exclude"
    want = len(draws) * chance[chance > 0]
    statistic = np.sum((counts[chance > 0] - want) ** 2 / want)
    # Of mean n and variance 2 n, for n degrees of freedom: five standard deviations.
    degrees = len(want) - 1
    assert statistic <= degrees + 5 * np.sqrt(2 * degrees)


# The probabilities, in any mix: what the door writes for a request, against the oracle given its parameters.

NUM_ROWS, ROOM, LENGTH = 8, 97, 600  # rows, vocabulary, and tokens: more than are looked at together
FEW = 7  # different tokens in a text, so that they come again


class Letters:
    """A tokenizer with a token a letter."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [FEW if letter == " " else ord(letter) - ord("a") for letter in text]


DOOR = Door(
    EngineConfig(block_size=8),
    SimpleNamespace(vocab_size=ROOM, eos_token_ids=(3,)),
    LENGTH,
    CacheSize(10**6, 1, 16, "for a test"),
    StepConfig(max_num_seqs=1, num_tiles=1, tiles_per_pass=1, attention="xla"),
    Letters(),
)


@jax.jit
def distribution(logits: jax.Array, rows: Rows):
    """Return the edited logits, what a sampling row draws from, the greedy token and its scores."""
    row = jnp.arange(len(logits))
    context = Context(row, rows.prompt_lens, rows.num_tokens, rows.token_ids)
    changed = sampling.edited(logits, rows.rules, rows.sampling.has_rules, context)
    chance = jax.nn.softmax(filtered(changed, jnp.max(changed, axis=1), rows.sampling), axis=1)
    greedy = likeliest(changed)
    return changed, chance, greedy, sampling.score(logits, greedy, rows.sampling.num_logprobs)


@st.composite
def mixes(draw: st.DrawFn, exact: bool) -> tuple[list[int], list[int], SamplingParams]:
    """Draw a prompt, the answer so far, and parameters.

    With `exact`, float32 and float64 compute the same, so equal logits are equal in both.
    """

    def some(strategy: st.SearchStrategy, default: object) -> object:
        return draw(strategy) if draw(st.booleans()) else default

    tokens, few = st.integers(0, ROOM - 1), st.integers(0, FEW - 1)
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    prompt, answer = (rng.integers(0, FEW, draw(st.sampled_from(n))) for n in ([1, 5, 300], [0, 1, 4, 290]))
    signed = st.sampled_from([-2, -0.5, 1, 1.5]) if exact else st.floats(-2, 2)
    bias = st.sampled_from([-4, -0.5, 2, 1000]) if exact else st.floats(-30, 30)
    params = SamplingParams(
        max_tokens=None,
        temperature=draw(st.sampled_from([0, 0.5, 1, 2] if exact else [0, 1e-30, 0.3, 0.7, 1.3])),
        top_k=some(st.sampled_from([1, 2, 7, 60, 96, 97, 200]), 0),
        top_p=some(st.sampled_from([1e-7, 0.31, 0.77, 0.993]), 1),
        min_p=some(st.sampled_from([0.013, 0.3, 1]), 0),
        presence_penalty=some(signed, 0),
        frequency_penalty=some(signed, 0),
        repetition_penalty=some(st.sampled_from([0.5, 2, 4] if exact else [0.3, 1.1, 1.7]), 1),
        logit_bias=some(st.dictionaries(tokens, bias, max_size=70), None),
        allowed_token_ids=some(st.lists(tokens, min_size=1, max_size=90), None),
        bad_words=some(
            st.lists(st.lists(few, min_size=1, max_size=4).map(letters), max_size=20, unique=True), ()
        ),
        min_tokens=some(st.sampled_from([1, 4, 5, 400]), 0),
        stop_token_ids=some(st.lists(tokens, max_size=60), ()),
        ignore_eos=draw(st.booleans()),
        logprobs=some(st.integers(0, 4), None),
    )
    state = random.getstate()  # beartype looks at a random item of a tuple, which a strategy may not
    try:
        DOOR.admit(prompt, params)
    except InputError as error:  # of options that leave no token to choose
        if "must have a token to choose" not in str(error):
            raise
        reject()
    finally:
        random.setstate(state)
    return prompt.tolist(), answer.tolist(), params


def letters(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def rows_of(requests: list[Request], answers: list[list[int]]) -> Rows:
    lines = list(map(line_of, requests, answers))
    return filled(empty_rows(len(requests), LENGTH, ROOM), lines)


def line_of(request: Request, answer: list[int]) -> dict:
    token_ids = [*request.prompt_token_ids, *answer]
    return row_values(request, DOOR.config, ROOM, len(token_ids)) | {"token_ids": token_ids}


def rules_of(params: SamplingParams) -> dict:
    """Return the rules as the oracle takes them."""
    eos = () if params.ignore_eos else DOOR.model_config.eos_token_ids
    same = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias")
    return {name: getattr(params, name) for name in (*same, "allowed_token_ids")} | {
        "stop_token_ids": (*eos, *params.stop_token_ids),
        "bad_words": [Letters().encode(word, add_special_tokens=False) for word in params.bad_words],
    }


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), exact=st.booleans())
def test_any_mix_has_the_reference_distribution(data, seed, exact):
    mixed = data.draw(st.lists(mixes(exact), min_size=NUM_ROWS, max_size=NUM_ROWS))
    logits = np.random.default_rng(seed).normal(scale=4, size=(NUM_ROWS, ROOM)).astype(np.float32)
    if exact:
        logits = np.round(logits)  # many ties
        logits[::2] = np.minimum(logits[::2], 0) * np.float32(-0.0) if seed % 3 == 0 else logits[::2]
    requests = [request for prompt, _, params in mixed for request in DOOR.admit(prompt, params)]
    rows = rows_of(requests, [answer for _, answer, _ in mixed])
    changed, chance, greedy, scores = jax.device_get(distribution(logits, rows))
    for i, (prompt, answer, params) in enumerate(mixed):
        want = reference.edited(logits[i], prompt, answer, **rules_of(params))
        np.testing.assert_allclose(changed[i], want, rtol=1e-5, atol=1e-5, err_msg=str(params))
        if not rows.sampling.has_rules[i]:
            np.testing.assert_array_equal(changed[i], logits[i])
        if np.isfinite(want.max()) and params.temperature:
            filters = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            expected = reference.probabilities(want, **filters)
            np.testing.assert_allclose(chance[i], expected, atol=2e-5, err_msg=str(params))
            if exact:  # float32 has no smaller chances
                np.testing.assert_array_equal(chance[i] > 1e-30, expected > 1e-30)
        chosen = int(greedy[i])
        assert chosen == reference.first_likeliest(changed[i])
        ranking, logprobs = reference.ranking(logits[i]), reference.logprobs(logits[i])
        assert scores.rank[i] == 1 + ranking.index(chosen)
        np.testing.assert_allclose(scores.logprob[i], logprobs[chosen], atol=1e-5)
        if params.logprobs:
            assert scores.top_ids[i].tolist() == ranking[:MAX_LOGPROBS]
            np.testing.assert_allclose(scores.top_logprobs[i], logprobs[ranking[:MAX_LOGPROBS]], atol=1e-5)


@jax.jit
def told_in_each_mode(logits: jax.Array, rows: Rows, token_ids: jax.Array):
    """Return the scores of tokens in every mode but the default; the last row is of a beam search."""
    row = jnp.arange(len(logits))
    context = Context(row, rows.prompt_lens, rows.num_tokens, rows.token_ids)
    searches = row == len(logits) - 1
    found = {}
    for mode in get_args(LogprobsMode)[1:]:
        told = sampling.reported_values(
            mode,
            logits,
            rows.sampling,
            lambda logits: sampling.edited(logits, rows.rules, rows.sampling.has_rules, context),
            searches,
        )
        num_top = rows.sampling.num_logprobs
        found[mode] = sampling.score(told.values, token_ids, num_top, None, told.are_logits)
    return found


def test_each_mode_tells_the_reference_numbers():
    rng = np.random.default_rng(2)
    bias, ban = {"logit_bias": {1: 3.0}, "repetition_penalty": 1.5}, {"allowed_token_ids": [*range(20, 60)]}
    asked = [
        row | rules for row, rules in zip([*OPTIONS[::2], OPTIONS[-1]], [{}, bias, ban] * 3, strict=False)
    ]
    params = [SamplingParams(logprobs=4, max_tokens=None, **row) for row in [*asked, OPTIONS[0]]]
    logits = rng.normal(scale=3, size=(NUM_ROWS, ROOM)).astype(np.float32)
    texts = [rng.integers(0, FEW, 20).tolist() for _ in params]
    requests = [request for text, its in zip(texts, params, strict=True) for request in DOOR.admit(text, its)]
    rows = rows_of(requests, [[]] * NUM_ROWS)
    changed = [
        reference.edited(its, text, [], **rules_of(p))
        for its, text, p in zip(logits, texts, params, strict=True)
    ]
    chosen = np.array([reference.first_likeliest(its) for its in changed], np.int32)
    for mode, scores in jax.device_get(told_in_each_mode(logits, rows, chosen)).items():
        for i, p in enumerate(params):
            filters = {name: getattr(p, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            is_search = i == NUM_ROWS - 1
            want = reference.reported(logits[i], changed[i], "raw_logprobs" if is_search else mode, **filters)
            ranking = reference.ranking(want)
            assert scores.rank[i] == 1 + ranking.index(chosen[i]), (mode, p)
            np.testing.assert_allclose(scores.logprob[i], want[chosen[i]], atol=2e-5, err_msg=mode)
            top = ranking[:MAX_LOGPROBS]
            assert scores.top_ids[i].tolist() == top
            np.testing.assert_allclose(scores.top_logprobs[i], want[top], atol=2e-5, err_msg=mode)


def test_the_likeliest_one_after_the_other_are_those_of_top_k():
    """What a GPU's program does in place of `lax.top_k`: with ties, and with rows of few numbers."""
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 3, (4, 50)).astype(np.float32)
    logits[1, 5:] = -np.inf
    logits[2] = rng.normal(size=50)
    got = jax.jit(functools.partial(first_ranked, num=20))(logits)
    np.testing.assert_array_equal(got, jax.lax.top_k(logits, 20)[1])


def test_a_row_keeps_its_bits_in_any_company():
    """Alone in a batch of the same shape, and beside rows that ask for everything."""
    rng = np.random.default_rng(3)
    everything = SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=0.3,
        frequency_penalty=0.7,
        repetition_penalty=1.2,
        logit_bias=dict.fromkeys(range(40), 1.5),
        allowed_token_ids=list(range(80)),
        bad_words=["ab", "c"],
        min_tokens=9,
        logprobs=4,
    )
    asked = [everything, SamplingParams(temperature=0.8, logprobs=2), SamplingParams(temperature=0)]
    logits = rng.normal(scale=4, size=(NUM_ROWS, ROOM)).astype(np.float32)
    texts = [rng.integers(0, FEW, 40).tolist() for _ in range(NUM_ROWS)]
    requests = [request for i, text in enumerate(texts) for request in DOOR.admit(text, asked[i % 3])]
    together = jax.device_get(distribution(logits, rows_of(requests, texts)))
    for i in range(3):
        others = empty_rows(NUM_ROWS, LENGTH, ROOM)
        mine = filled(empty_rows(1, LENGTH, ROOM), [line_of(requests[i], texts[i])])
        rows = jax.tree.map(lambda x, y: np.concatenate([x[:i], y, x[i + 1 :]]), others, mine)  # noqa: B023
        alone = jax.device_get(distribution(logits, rows))
        for mine, its in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            if i == 2 and mine.ndim == 2 and mine.shape[1] == MAX_LOGPROBS:
                continue  # the likeliest tokens of a row that wants none
            np.testing.assert_array_equal(mine[i], its[i])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_in_which_nothing_can_be_drawn_are_greedy(temperature):
    """Rows of minus infinity, with NaN or infinity, or with all tokens barred; and one with a token left."""
    nothing, one = np.full((2, VOCAB), -np.inf, np.float32)
    one[5] = -3e38
    broken, endless = np.zeros((2, VOCAB), np.float32)
    broken[2], endless[[4, 7]] = np.nan, np.inf
    rows = np.stack([nothing, one, broken, endless])
    some = [{"temperature": temperature, "top_p": 0.9, "min_p": 0.1}] * 4
    drawn = jax.jit(sample)(rows, options(some, [1, 2, 3, 4]), jnp.arange(4, dtype=jnp.int32))
    assert drawn.tolist() == [reference.first_likeliest(row) for row in rows] == [0, 5, 11, 4]


def test_sets_of_tokens_are_what_they_were_made_of():
    has_token, is_among = jax.jit(sampling.has_token, static_argnums=1), jax.jit(sampling.is_among)
    rng = np.random.default_rng(0)
    for vocab in (1, 31, 32, 33, 97):
        members = set(rng.integers(0, vocab, 9).tolist())
        bits = token_bits(members, vocab)
        assert tokens_of(bits) == members
        mask = np.asarray(has_token(bits[None], vocab))[0]
        assert set(np.flatnonzero(mask).tolist()) == members
        tokens = np.arange(vocab, dtype=np.int32)
        assert is_among(tokens, np.tile(bits, (vocab, 1))).tolist() == mask.tolist()


def test_a_draw_depends_on_its_seed_and_position_only(logits):
    draw = jax.jit(sample)
    rows = [dict(OPTIONS[i % len(OPTIONS)], temperature=1.0) for i in range(8)]
    spread = np.random.default_rng(1).normal(size=(8, VOCAB)).astype(np.float32)
    positions = np.arange(8, dtype=np.int32)
    together = draw(spread, options(rows, list(range(8))), positions)
    for i in range(8):
        alone = draw(spread[i : i + 1], options(rows[i : i + 1], [i]), positions[i : i + 1])
        assert alone[0] == together[i]
    flat = np.zeros((64, 1000), np.float32)
    free = [{"temperature": 1.0}] * 64
    same = np.full(64, 3, np.int32)
    assert len(set(draw(flat, options(free, list(range(64))), same).tolist())) > 50
    assert len(set(draw(flat, options(free, [5] * 64), np.arange(64, dtype=np.int32)).tolist())) > 50
    assert len(set(draw(flat, options(free, [5] * 64), same).tolist())) == 1


def test_filters_keep_what_the_reference_keeps_of_many_tokens_among_them_equal_ones():
    rng = np.random.default_rng(5)
    many = rng.normal(scale=3, size=(24, 1000)).astype(np.float32)
    many[1::3] = np.round(many[1::3])  # hundreds of ties
    many[2::3] = np.minimum(many[2::3], 0) * rng.choice([1, 0, -0.0], size=1000)  # both zeros
    rows = [
        {
            "temperature": 1.0,
            "top_k": int(rng.choice([0, 1, 7, 500, 999, 1000, 2000])),
            "top_p": float(rng.choice([1.0, 0.31, 0.77, 0.993])),
            "min_p": float(rng.choice([0.0, 0.0, 0.013])),
        }
        for _ in many
    ]
    largest = many.max(axis=1)
    kept = np.isfinite(jax.jit(filtered)(many, largest, options(rows, [0] * len(rows))))
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(kept[i], reference.probabilities(many[i], **row) > 0, err_msg=str(row))


@pytest.mark.parametrize("num_rows", [1, 2, 16])
def test_a_top_p_of_1_keeps_all_of_a_large_vocabulary_whatever_its_neighbours_ask_for(num_rows):
    """Probabilities are summed in an order that the shape decides, and their sum may be 1 too early."""
    logits = np.random.default_rng(2).normal(scale=4, size=128_256).astype(np.float32)
    rows = [{"temperature": 1.0, "top_k": 128_256}, *[{"temperature": 1.0, "top_p": 0.5}] * (num_rows - 1)]
    tiled = np.tile(logits - logits.max(), (num_rows, 1))
    kept = jax.jit(filter_rows)(tiled, options(rows, list(range(num_rows))))
    np.testing.assert_array_equal(kept[0], tiled[0])
    assert all(np.isfinite(row).sum() < 10_000 for row in kept[1:])


@pytest.mark.parametrize("temperature", [1e-37, 2e-38])
def test_the_smallest_temperatures_are_greedy(temperature, logits):
    rows = np.stack([logits, np.float32(1e4) * logits, logits - np.float32(1e30)])
    some = [{"temperature": temperature}] * 3
    drawn = jax.jit(sample)(rows, options(some, [1, 2, 3]), np.arange(3, dtype=np.int32))
    near = np.flatnonzero(logits == logits.max())
    assert drawn[0] in near
    assert drawn[1] in near


def test_the_likeliest_token_is_the_first_of_equals_and_always_a_token():
    rows = jnp.array([[0.0, 3, 3, 1], [-jnp.inf, -jnp.inf, -2, -jnp.inf], [jnp.nan, 1, 2, 3], [7, 7, 7, 7]])
    assert likeliest(rows).tolist() == [1, 2, 3, 0]
