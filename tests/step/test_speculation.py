"""Drafts: what is looked up, and how many are made, against `reference.speculation`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.sampling_state import token_bits
from jaxpaged.step import followers, loop, past_answers, speculation
from jaxpaged.step.config import DraftCost, Lookup, SuffixLookup
from jaxpaged.step.feature_values import DraftRows, DraftSizes, no_past
from jaxpaged.step.features import Features, with_values
from jaxpaged.step.plan import DecodeSlots, Plan
from jaxpaged.step.state import Phase, empty_rows
from reference import speculation as reference
from tests.step.lockstep import Event, LockStep, Request
from tests.step.sum_model import VOCAB, next_token
from tests.step.test_scheduler import SETTINGS

LOOKUP = Lookup(most=5, longest=3, shortest=2)
drafted = jax.jit(speculation.draft, static_argnums=3)


def test_what_followed_the_longest_end_is_drafted(monkeypatch):
    """Rows of few different tokens, in chunks of 16 positions."""
    monkeypatch.setattr(followers, "POSITIONS_AT_ONCE", 16)
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, 4, (300, 70)).astype(np.int32)
    token_ids[:40] = np.arange(40)[:, None]  # the same token all along
    num_tokens = np.concatenate([np.arange(70), rng.integers(1, 70, 230)]).astype(np.int32)
    found = jax.jit(followers.followers, static_argnums=2)(token_ids, num_tokens, LOOKUP)
    lookup = reference.Lookup(*dataclasses.astuple(LOOKUP))
    lengths = set()
    for tokens, n, num, follow in zip(token_ids, num_tokens, *map(np.asarray, found), strict=True):
        want = reference.followers(tokens[:n].tolist(), lookup)
        assert follow[:num].tolist() == want
        lengths.add(len(want))
    assert lengths == {0, 1, 2, 3, 4, 5}


def test_only_rows_that_are_wanted_are_looked_up():
    rng = np.random.default_rng(5)
    rows = empty_rows(20, 40, 97)
    rows.token_ids[:] = rng.integers(0, 3, (20, 40))
    rows.num_tokens[:] = rng.integers(1, 41, 20)
    wanted = rng.random(20) < 0.5
    on_device = jax.tree.map(jnp.asarray, rows)
    num, follow = map(np.asarray, followers.look_up(on_device, None, LOOKUP, jnp.asarray(wanted)))
    lookup = reference.Lookup(*dataclasses.astuple(LOOKUP))
    for row in np.flatnonzero(wanted):
        tokens = rows.token_ids[row, : rows.num_tokens[row]].tolist()
        assert follow[row, : num[row]].tolist() == reference.followers(tokens, lookup)
    assert num[wanted].max() == LOOKUP.most


@pytest.mark.parametrize("chunk", [16, 128])
def test_what_mostly_followed_the_longest_end_is_drafted(monkeypatch, chunk):
    """Rows of few different tokens; more occurrences than count, in several chunks and in one."""
    monkeypatch.setattr(followers, "POSITIONS_AT_ONCE", chunk)
    rng = np.random.default_rng(2)
    token_ids = rng.integers(0, 3, (300, 90)).astype(np.int32)
    token_ids[:40] = np.arange(40)[:, None]  # the same token all along
    token_ids[40:200] = rng.random((160, 90)) < 0.1  # and mostly the same
    num_tokens = np.concatenate([np.arange(70), rng.integers(1, 91, 230)]).astype(np.int32)
    token_ids[-1, :88], num_tokens[-1] = [7, 1] * 22 + [7, 2] * 21 + [9, 7], 88  # the last 32 have mostly 2
    lookup = SuffixLookup(most=5, depth=8, factor=1.7, min_prob=0.3)
    found = jax.jit(lambda *args: followers.likely_followers(*args, lookup))(token_ids, num_tokens)
    oracle = reference.SuffixLookup(*dataclasses.astuple(lookup))
    lengths = set()
    for tokens, n, num, follow in zip(token_ids, num_tokens, *map(np.asarray, found), strict=True):
        want = reference.likely_followers(tokens[:n].tolist(), oracle)
        assert follow[:num].tolist() == want
        lengths.add(len(want))
    assert lengths == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("room", [50, 400])
def test_past_answers_of_the_same_salt_are_drafted_from(monkeypatch, room):
    """Answers of few different tokens, in chunks of 16 places; the ring holds all or the last of them."""
    monkeypatch.setattr(followers, "POSITIONS_AT_ONCE", 16)
    monkeypatch.setattr(followers, "PAST_AT_ONCE", 16)
    rng = np.random.default_rng(3)
    lookup = SuffixLookup(most=5, depth=8, factor=1.7, min_prob=0.3, past_tokens=room)
    oracle = reference.SuffixLookup(*dataclasses.astuple(lookup))
    old = empty_rows(20, 40, 97)
    old.arrival[:], old.salt[:] = np.arange(1, 21), rng.integers(0, 2, 20)
    old.prompt_lens[:] = rng.integers(1, 20, 20)
    old.num_tokens[:] = old.prompt_lens + rng.integers(1, 21, 20)
    old.token_ids[:] = rng.integers(0, 5, (20, 40))
    put = jax.jit(past_answers.with_answer)
    ring, kept = no_past(room), reference.Past(room)
    for row in range(20):
        ring = put(ring, old, row)
        answer = old.token_ids[row, old.prompt_lens[row] : old.num_tokens[row]]
        kept.keep(int(old.salt[row]), answer.tolist())
    token_ids, num_tokens = rng.integers(0, 5, (300, 20)).astype(np.int32), rng.integers(0, 21, 300)
    salt, num_tokens = rng.integers(0, 3, 300).astype(np.int32), num_tokens.astype(np.int32)
    found = jax.jit(lambda *args: followers.likely_followers(*args[:2], lookup, *args[2:]))(
        token_ids, num_tokens, ring, salt
    )
    others = 0
    for tokens, n, its_salt, num, follow in zip(
        token_ids, num_tokens, salt, *map(np.asarray, found), strict=True
    ):
        want = reference.likely_followers(tokens[:n].tolist(), oracle, kept.of(int(its_salt)))
        assert follow[:num].tolist() == want
        others += want != reference.likely_followers(tokens[:n].tolist(), oracle)
    assert others > 50


def test_nothing_is_drafted_from_answers_before_a_reset_of_the_prefix_cache():
    """Both forget what other requests' prompts and answers were."""
    [setting] = [each for each in SETTINGS if each.past_tokens]
    state, lookup = setting.state(), setting.config.lookup
    old = empty_rows(1, 20, VOCAB)
    old.arrival[:], old.prompt_lens[:], old.num_tokens[:] = 1, 3, 15
    old.token_ids[0, :15] = np.arange(15) % VOCAB
    ring = jax.jit(past_answers.with_answer)(state.drafts.past, old, 0)
    token_ids = np.zeros((1, 20), np.int32)
    token_ids[0, :4] = [1, 7, 8, 9]  # of the answer
    found = jax.jit(lambda *args: followers.likely_followers(*args[:2], lookup, *args[2:]))
    asked, salt = (token_ids, np.array([4], np.int32)), np.zeros(1, np.int32)
    assert np.asarray(found(*asked, ring, salt)[0]).tolist() == [lookup.most]
    account = dataclasses.replace(state.drafts, past=ring)
    state = loop.reset_prefix_cache(with_values(state, {"drafts": account}))
    assert np.asarray(found(*asked, state.drafts.past, salt)[0]).tolist() == [0]


def test_a_draft_that_ends_its_answer_is_chosen_and_not_accepted():
    """Three drafts of each of four rows are right; a stop token is none of them, the first, the second or
    the last.
    """
    rows, most, last = empty_rows(4, 12, VOCAB), 3, 4
    rows.prompt_lens[:], rows.num_tokens[:] = 2, 5
    rows.token_ids[:, 5:8] = [6, 7, 8]
    for row, stop in enumerate((None, 6, 7, 8)):
        if stop is not None:
            rows.rules.stop_tokens[row] = np.asarray(token_bits([stop], VOCAB)).reshape(-1)
    chosen, slots = [], []
    for row in range(4):
        chosen += [6, 7, 8, last]
        slots += [row] * 4
    first = np.arange(0, 16, 4, dtype=np.int32)
    its = DecodeSlots(np.array(slots, np.int32), first, np.tile(np.arange(4, dtype=np.int32), 4))
    drafts = speculation.Drafts(np.full(4, most, np.int32), first + 1, jnp.int32(1), jnp.int32(1))
    num, token = jax.jit(speculation.accepted, static_argnums=4)(
        np.array(chosen, np.int32), rows, its, drafts, most
    )
    assert np.asarray(num).tolist() == [3, 0, 1, 2]
    assert np.asarray(token).tolist() == [last, 6, 7, 8]


def test_no_draft_is_at_or_behind_the_last_place_of_an_answer():
    """The token that follows right drafts is an answer's last at most: so far as drafts may go, all but one
    of the tokens that are left.
    """
    setting = dataclasses.replace(SETTINGS[0], name="", most_drafts=5, most_drafting=None, has_arena=False)
    state, left = setting.state(), [1, 2, 3, 6, 9]
    rows = dataclasses.replace(state.rows)
    num_rows, num = rows.phase.shape[0], len(left)
    padding = (0, num_rows - num)
    tokens = np.tile([2, 3, 4, 5, 6, 7] * 4, (num_rows, 1))
    num_tokens = np.pad(np.full(num, 20, np.int32), padding)
    phase = np.pad(np.full(num, Phase.RUNNING, np.int32), padding, constant_values=Phase.EMPTY)
    index = np.arange(num_rows, dtype=np.int32)
    rows = dataclasses.replace(
        rows,
        token_ids=rows.token_ids.at[:, : tokens.shape[1]].set(tokens),
        phase=jnp.asarray(phase),
        order=jnp.asarray(index),
        prompt_lens=jnp.asarray(np.minimum(num_tokens, 9)),
        num_tokens=jnp.asarray(num_tokens),
        max_num_tokens=jnp.asarray(num_tokens + np.pad(np.array(left, np.int32), padding)),
    )
    tables = dataclasses.replace(state.tables, seq_lens=jnp.asarray(np.maximum(num_tokens - 1, 0)))
    state = dataclasses.replace(state, rows=rows, tables=tables)
    found = []
    for row in range(num):  # alone, so that there are slots for all drafts
        is_one = index == row
        plan = Plan(jnp.zeros_like(index), jnp.asarray(is_one.astype(np.int32)))
        max_num_seqs = setting.config.max_num_seqs
        slots = DecodeSlots(
            jnp.full(max_num_seqs, num_rows, jnp.int32).at[0].set(row),
            jnp.where(is_one, 0, max_num_seqs),
            jnp.zeros(max_num_seqs, jnp.int32),
        )
        drafts = drafted(state, plan, slots, setting.config)[3]
        found.append(int(drafts.num[row]))
    room = [min(each - 1, 5, setting.config.max_num_seqs - 1) for each in left]
    assert found == room
    assert {0, 1, 2} <= set(room)


@pytest.mark.slow
def test_an_answer_is_drafted_from_an_equal_one_of_the_same_salt_alone():
    [setting] = [each for each in SETTINGS if each.past_tokens]
    lock = LockStep(setting)
    accepted = []
    for arrival, salt in ((1, 0), (1 + VOCAB, 0), (1 + 2 * VOCAB, 5)):  # the same prompt
        prompt = tuple((1 + i) % VOCAB for i in range(9))
        lock.run([Event((Request(arrival, prompt, 40, salt=salt),))])
        accepted.append(lock.seen["accepted"] - sum(accepted))
    assert accepted[1] > accepted[0]
    assert accepted[2] == accepted[0]


def test_a_row_drafts_more_after_hits_and_waits_after_misses():
    rng = np.random.default_rng(1)
    oracle = reference.Drafting(reference.Lookup(*dataclasses.astuple(LOOKUP)))
    rows = DraftRows(*(jnp.array([value], jnp.int32) for value in (LOOKUP.most, 0, 0, [0, 0, 0], 0, 0)))
    seen = set()
    for _ in range(300):
        may = oracle.draft([1, 1, 1, 1, 1, 1, 1, 1], 5, 8)
        num, num_right = len(may), int(rng.integers(0, len(may) + 1)) if rng.random() < 0.3 else 0
        oracle.each = 8 if len(seen) % 2 else 16
        made = speculation.Drafts(jnp.array([num]), jnp.zeros(1), jnp.int32(oracle.each), jnp.int32(0))
        oracle.note(num, num_right)
        rows = speculation.after(rows, jnp.ones(1, bool), made, jnp.array([num_right]), LOOKUP)
        mine = [field[0].tolist() for field in jax.tree.leaves(rows)]
        assert mine[:4] == [oracle.most, oracle.misses, oracle.wait, oracle.counts]
        seen.add(oracle.wait)
    assert seen >= {0, 1, 3, 7, 15, reference.LONGEST_WAIT}


@pytest.mark.parametrize("parts", [-1, 0, 77])
def test_what_a_row_may_draft_follows_from_what_its_drafts_have_cost(parts):
    rng = np.random.default_rng(4)
    rows = empty_rows(50, 8, 97, Features.on(drafts=DraftSizes(5)))
    rows.prompt_lens[:] = rng.integers(1, 40, 50)
    rows.num_tokens[:] = rows.prompt_lens + rng.integers(1, 200, 50)
    rows.drafting.counts[:, 2] = rng.integers(0, 40, 50)
    rows.drafting.counts[:, 1] = rows.drafting.counts[:, 2] + rng.integers(0, 40, 50)
    sizes, seen = (8, 20), set()
    for num_rows in range(1, 16):
        each = DraftCost(*sizes).of(num_rows)
        found = speculation.affordable(rows, rows.drafting, jnp.int32(parts), jnp.int32(each))
        for row in range(50):
            credit = reference.Credit(reference.DraftCost(*sizes), parts)
            oracle = reference.Drafting(reference.Lookup(5, 3, 2), credit=credit)
            oracle.counts, oracle.each = rows.drafting.counts[row].tolist(), credit.cost.of(num_rows)
            assert oracle.affordable(int(rows.num_tokens[row] - rows.prompt_lens[row])) == found[row]
        seen |= {each, *np.sign(found).tolist()}
    assert seen == {-1, 0, 1, *seen}
    assert {28, 20 + 64 * 8 * 15 // (64 + 8 * 14)} <= seen


@pytest.mark.slow
def test_what_repeats_itself_takes_fewer_steps_and_ends_where_it_must():
    """The sum of all tokens, modulo 13, doubles from token to token: after 12 it begins again."""
    [setting] = [each for each in SETTINGS if each.name == "drafts"]
    lock = LockStep(setting)
    tokens = [1]
    while len(tokens) < 40:
        tokens.append(next_token(setting.reaches, tokens))
    lock.run([Event((Request(1, tuple(tokens[:26]), 80),))])
    assert lock.seen["accepted"] > 30
    assert lock.num_steps < 1 + (80 - 26) // 2
    for arrival in range(2, 9):  # it stops at a draft, the first or second one, or behind both
        lock.run([Event((Request(arrival, tuple(tokens[:26]), 80, stop_token_ids=(tokens[25 + arrival],)),))])
