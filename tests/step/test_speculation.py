"""Drafts: what is looked up, and how many are made, against `reference.speculation`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.step import followers, speculation
from jaxpaged.step.config import Lookup, SuffixLookup
from jaxpaged.step.state import DraftRows
from reference import speculation as reference
from tests.step.lockstep import Event, LockStep, Request
from tests.step.sum_model import next_token
from tests.step.test_scheduler import SETTINGS

LOOKUP = Lookup(most=5, longest=3, shortest=2)


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


def test_a_row_drafts_more_after_hits_and_waits_after_misses():
    rng = np.random.default_rng(1)
    oracle = reference.Drafting(reference.Lookup(*dataclasses.astuple(LOOKUP)))
    rows = DraftRows(*(jnp.array([value], jnp.int32) for value in (LOOKUP.most, 0, 0, [0, 0, 0], 0)))
    seen = set()
    for _ in range(300):
        may = oracle.draft([1, 1, 1, 1, 1, 1, 1, 1], 5, 8)
        num, num_right = len(may), int(rng.integers(0, len(may) + 1)) if rng.random() < 0.3 else 0
        oracle.note(num, num_right)
        arrays = (jnp.array([value], jnp.int32) for value in (num, num_right))
        rows = speculation.after(rows, jnp.ones(1, bool), *arrays, LOOKUP)
        mine = [field[0].tolist() for field in jax.tree.leaves(rows)]
        assert mine[:4] == [oracle.most, oracle.misses, oracle.wait, oracle.counts]
        seen.add(oracle.wait)
    assert seen >= {0, 1, 3, 7, 15, reference.LONGEST_WAIT}


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
