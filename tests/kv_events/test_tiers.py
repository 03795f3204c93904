"""Followers of an engine's events know what its tiers have, and routers use it."""

import dataclasses

import numpy as np

from jaxpaged.kv_events import tier_mirror
from jaxpaged.kv_events.follower import tell
from jaxpaged.kv_events.messages import BlockRemoved, BlockStored
from jaxpaged.kv_events.tier_mirror import TierMirror
from jaxpaged.kv_events.tree import Label
from jaxpaged.routing import Router, keys_of_tokens, salt_of
from jaxpaged.tiers import keys
from reference import kv_events as reference
from tests.tiers.test_engines import ask, tiered

TOLD = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


class Listener:
    """The oracle of a follower, and a router of ours, on one driver with tiers."""

    def __init__(self, driver, monkeypatch):
        self.driver, self.plain, self.router, self.stored = driver, reference.Follower(), Router(1), []
        monkeypatch.setattr(driver.events, "_listen", self.hear)

    def hear(self, rank, told):
        for event in told:
            self.plain.apply({"type": type(event).__name__, **dataclasses.asdict(event)})
            self.stored += [event] if isinstance(event, BlockStored) and event.medium != "GPU" else []
        tell(self.router, rank, told)

    def check(self, talks):
        """Compare what was told of each tier with what it has of these conversations, each with a salt."""
        tiers = self.driver.offloading.tiers
        tiers.below.flush()
        self.driver.turn()
        space = keys.space_of(self.driver.exchange.block_format)
        for name, medium in (("host", "CPU"), ("disk", "STORAGE")):
            there = set()
            for talk, salt in talks:
                its_keys = keys.chain_keys(space, salt, b"", np.array(talk, np.int32), 8)
                hashes = keys_of_tokens(talk, 8, salt_of(salt, None))
                pairs = zip(its_keys, hashes, strict=True)
                there |= {
                    int.from_bytes(each, "big") for key, each in pairs if tiers.stores[name].contains(key)
                }
            assert self.plain.below.get(medium, set()) == there
        return len(there)


def test_a_follower_knows_what_the_tiers_have(monkeypatch, tmp_path):
    """Conversations that fit neither the device nor host memory; then an engine that finds their files."""
    options = {"kv_offloading_backend": f"disk:{tmp_path / 'kept'}", **TOLD}
    driver = tiered(40, **options)
    heard, rng = Listener(driver, monkeypatch), np.random.default_rng(4)
    talks = [([], "salt" if which == 3 else None) for which in range(8)]
    seen: list = []
    for turn in range(24):
        talk, salt = talks[int(rng.integers(8))]
        if len(talk) < 90:
            talk += rng.integers(0, 97, int(rng.integers(8, 30))).tolist()
        ask(driver, talk, cache_salt=salt)
        seen.append(([*talk], salt))
        if turn % 4 == 3:
            heard.check(seen)
    assert heard.check(seen) > 40
    # What only a tier has counts for a router.
    talk, salt = max(talks, key=lambda pair: len(pair[0]))
    driver.lifecycle.stand_down()  # the device forgets; the tiers do not, and say so again
    assert not heard.plain.known
    assert heard.check(seen) > 40
    assert heard.router.num_cached(0, keys_of_tokens(talk, 8, salt_of(salt, None))) == len(talk) // 8
    driver.close()
    # An engine that finds the files tells of them when somebody asks.
    other = tiered(40, **options)
    heard = Listener(other, monkeypatch)
    ask(other, talk, cache_salt=salt)
    assert heard.check([(talk, salt)]) == len(talk) // 8
    other.offloading.tiers.below.flush()
    num_stored = len(heard.stored)
    assert other.reset_prefix_cache()
    assert len(heard.stored) == num_stored, "nothing is told anew that has gone"
    assert heard.check([(talk, salt)]) == 0
    assert heard.stored[0].extra_keys[0] == (None if salt is None else (salt,))
    other.close()


def test_neighbours_are_told_together_and_nothing_twice():
    mirror, tokens = TierMirror(2, ["CPU"]), np.arange(8, dtype=np.int32)
    digests, hashes = [b"a", b"b", b"c", b"d"], keys_of_tokens(tokens, 2)
    numbers = [int.from_bytes(each, "big") for each in hashes]
    change = mirror.observer("CPU")
    change(b"z", True)  # nobody has said what that is
    mirror.note(digests, tokens, Label())
    for digest in (b"d", b"b", b"a"):
        change(digest, True)
    alone, pair = sorted(mirror.events(), key=lambda event: len(event.block_hashes))
    assert (pair.block_hashes, pair.parent_block_hash, pair.token_ids) == (numbers[:2], None, [0, 1, 2, 3])
    assert (alone.block_hashes, alone.parent_block_hash, alone.medium) == (numbers[3:], numbers[2], "CPU")
    change(b"b", False)
    change(b"b", True)
    assert mirror.events() == []
    change(b"b", False)
    assert mirror.events() == [BlockRemoved([numbers[1]], "CPU", 0)]
    assert [event.block_hashes for event in mirror.retold()] == [numbers[:1], numbers[3:]]
    mirror.lose_all()
    change(b"b", True)  # it was on its way
    [lost] = mirror.events()
    assert {*lost.block_hashes} == {numbers[0], numbers[3]}


def test_what_is_on_its_way_is_known_however_much_came_and_went(monkeypatch):
    monkeypatch.setattr(tier_mirror, "MOST_UNTOLD", 16)
    mirror, rng = TierMirror(2, ["CPU"]), np.random.default_rng(3)
    change, before = mirror.observer("CPU"), []
    for number in range(30):
        digests = [bytes([number, place]) for place in range(4)]
        mirror.note(digests, rng.integers(0, 97, 8, dtype=np.int32), Label())
        for digest in before:
            change(digest, True)
        assert sum(len(event.block_hashes) for event in mirror.events()) == len(before)
        for digest in before:
            change(digest, False)
        assert len(mirror.events()) == bool(before)
        assert len(mirror._known) <= 16
        before = digests
