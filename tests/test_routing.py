"""Prompts are sent where the plain lists of `reference.routing` send them."""

import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.routing import TEXT_BLOCK, Router, keys_of_text, keys_of_tokens
from reference import routing as reference

BLOCK = 4  # tokens


@pytest.mark.parametrize(
    ("max_blocks", "max_lead", "tells"), [(24, 2, False), (6, 0, True), (1000, 3.5, True)]
)
def test_prompts_go_where_the_oracle_sends_them(max_blocks, max_lead, tells):
    """Beginnings recur, loads go up and down, replicas come and go, and some tell what they have."""
    rng = np.random.default_rng(0)
    router, oracle = Router(max_blocks, max_lead), reference.Router(max_blocks, max_lead)
    names = [f"r{i}" for i in range(4)]
    openings = [rng.integers(0, 9, 20).tolist() for _ in range(5)]
    chosen, hits = [], 0
    for turn in range(1500):
        if turn % 100 == 99:
            gone = [name for name in ("r0", "r1", "r2") if name not in names]
            names = [*rng.permutation(names)[1:].tolist(), *(gone[:1] or [f"r{turn}"])]
            router.keep(names)
            oracle.keep(names)
        opening = openings[rng.integers(len(openings))][: rng.integers(21)]
        prompt = opening + rng.integers(0, 9, rng.integers(1, 16)).tolist()
        blocks = [tuple(prompt[i : i + BLOCK]) for i in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        keys = keys_of_tokens(prompt, BLOCK)
        loads = {name: int(rng.integers(0, 6)) for name in names}
        for name in names:
            assert router.num_cached(name, keys) == oracle.num_cached(name, blocks)
        first, *others = router.rank(keys, loads)
        assert first == oracle.best(blocks, loads)
        assert {first, *others} == {*names}
        assert (
            others[-1] != min(loads, key=loads.get) or max(loads.values()) <= min(loads.values()) + max_lead
        )
        hits += router.num_cached(first, keys)
        chosen.append(first)
        router.note(first, keys)
        oracle.note(first, blocks)
        if tells and first in ("r0", "r1"):
            known = oracle.reported.get(first, [])
            new = [i for i in range(1, len(keys) + 1) if tuple(blocks[:i]) not in known]
            stored = [keys[i - 1] for i in new], [tuple(blocks[:i]) for i in new]
            old = [i for i in range(1, len(keys) + 1) if i not in new and rng.random() < 0.3]
            removed = [keys[i - 1] for i in old], [tuple(blocks[:i]) for i in old]
            for each, its in ((router, 0), (oracle, 1)):
                each.tell(first, stored[its], removed[its])
            if rng.random() < 0.05:
                router.forget(first)
                oracle.forget(first)
        assert all(len(router._cached[name]) <= max_blocks for name in router)
    assert hits > 300
    assert {*router} <= {*names}


def test_a_key_stands_for_all_before_it_and_for_the_salt():
    text = "x" * (3 * TEXT_BLOCK + 5)
    keys = keys_of_text(text)
    assert len(keys) == len({*keys}) == 3
    assert keys_of_text(text[: 2 * TEXT_BLOCK]) == keys[:2]
    assert not {*keys_of_text(text, salt="a")} & {*keys}
    assert not {*keys_of_text("y" + text[1:])} & {*keys}
    # Where the salt ends is part of it.
    assert keys_of_text(text, salt="x" * TEXT_BLOCK)[0] != keys[1]
    ids = np.arange(10)
    assert keys_of_tokens(ids, 4) == keys_of_tokens(ids.tolist(), 4) == keys_of_tokens(range(9), 4)
    assert keys_of_text("\ud800" * TEXT_BLOCK)  # half a surrogate pair is somebody's mistake, but not ours


def test_nothing_cached_and_equal_loads_take_turns():
    router = Router(8)
    chosen = []
    for i in range(6):
        keys = keys_of_tokens([i] * 4, 4)
        chosen.append(router.rank(keys, dict.fromkeys("abc", 0))[0])
        router.note(chosen[-1], keys)
    assert chosen == [*"abcabc"]
    router.keep("ab")
    assert router.rank([], dict.fromkeys("abc", 0)) == [*"cab"]  # c is as new
    assert Router(8).rank([], {}) == []


def test_a_replica_far_ahead_is_last_whatever_it_has_cached():
    router, keys = Router(8, max_lead=2), keys_of_tokens(range(8), 4)
    router.note("a", keys)
    assert router.rank(keys, {"b": 0, "a": 2}) == ["a", "b"]
    assert router.rank(keys, {"b": 0, "a": 3, "c": 4}) == ["b", "a", "c"]


@pytest.mark.parametrize("options", [{"max_blocks": 0}, {"max_blocks": 8, "max_lead": -1}])
def test_senseless_limits_are_refused(options):
    with pytest.raises(InputError, match="must be"):
        Router(**options)
