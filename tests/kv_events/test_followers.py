"""Followers of an engine's events know exactly what its prefix cache has."""

import dataclasses

import numpy as np
import pytest

from jaxpaged.engine.services import events
from jaxpaged.handover import exchange
from jaxpaged.kv_events import tree
from jaxpaged.kv_events.follower import tell
from jaxpaged.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from jaxpaged.kv_events.tree import GroupKind, Label, Tree
from jaxpaged.models.config import LayerKind
from jaxpaged.routing import Router, keys_of_tokens, salt_of
from jaxpaged.sampling_params import SamplingParams
from reference import kv_events as reference
from tests import tiny

TOLD = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


class Listener:
    """The oracle of a follower, and a router of ours, on one driver."""

    def __init__(self, driver, monkeypatch):
        self.driver, self.plain, self.num_batches = driver, reference.Follower(), 0
        self.router = Router(1)
        monkeypatch.setattr(driver.events, "_listen", self.hear)

    def hear(self, rank, told):
        self.num_batches += 1
        for event in told:
            self.plain.apply({"type": type(event).__name__, **dataclasses.asdict(event)})
        tell(self.router, rank, told)

    def check(self, labels):
        """Compare with what the device has, by the oracle."""
        cache = self.driver.state.tables.pool.prefix_cache
        its = [
            np.asarray(getattr(cache, name)).tolist()
            for name in ("last", "generation", "parent", "token_ids")
        ]
        assert self.plain.known == reference.findable(*its, labels)


@pytest.mark.parametrize("most_changes", [1024, 3])
def test_a_follower_knows_what_the_cache_has(most_changes, monkeypatch):
    """Conversations that do not fit, side by side, with forgotten salts, resets and small reports."""
    monkeypatch.setattr(events, "MOST_CHANGES", most_changes)
    monkeypatch.setattr(tree, "MOST_SALTS", 3)
    driver = tiny.driver(**TOLD)
    driver.door.salts.MOST = 2  # and number 0, which needs no place
    heard = Listener(driver, monkeypatch)
    rng, talks = np.random.default_rng(2), [[] for _ in range(12)]
    used, salts, most = {0: None}, [None, "a", "b", "c"], 0
    for turn in range(60):
        for which in rng.choice(12, 3, replace=False).tolist():
            talk = talks[which]
            if len(talk) > 80:
                talk.clear()
            talk += rng.integers(0, 3, int(rng.integers(1, 30))).tolist()
            salt = salts[which % 4 if turn % 4 else 0]
            [request] = driver.door.admit(talk, tiny.greedy(int(rng.integers(1, 12))), cache_salt=salt)
            used = {number: label for number, label in used.items() if number != request.salt}
            used[request.salt] = None if salt is None else (salt,)
            used = {0: None, **dict([each for each in used.items() if each[0]][-2:])}
            driver.add(*tiny.numbered([request]))
        tiny.drain(driver)
        if turn % 20 == 19:
            assert driver.reset_prefix_cache()
            assert not heard.plain.known
        heard.check(used)
        most = max(most, len(heard.plain.known))
        # What our router takes to be cached is what the device finds.
        found = exchange.locate(
            driver.state, np.array(talk, np.int32), request.salt, driver.step_config.grouping.specs
        )
        keys = keys_of_tokens(talk, 8, salt_of(salt, None))
        assert heard.router.num_cached(0, keys) == len(found.token_ids)
    assert most > 40
    assert heard.num_batches > 60
    tiny.assert_nothing_is_held(driver)


def test_adopted_blocks_are_told_at_once(monkeypatch):
    prompt = tiny.prompts([70])[0]
    giver, driver = tiny.driver(), tiny.driver(**TOLD)
    tiny.generate(giver, [prompt], tiny.greedy(1))
    heard = Listener(driver, monkeypatch)
    blocks = giver.exchange.export_blocks(np.array(prompt, np.int32), None)
    assert driver.exchange.adopt_blocks(blocks) == 8
    heard.check({0: None})
    assert len(heard.plain.known) == 8


@pytest.mark.nightly
def test_groups_of_layers_are_told_by_their_numbers(monkeypatch):
    """Layers that read all beside a window, whose blocks go one by one."""
    config = tiny.mixed(LayerKind(), LayerKind(sliding_window=11))
    driver = tiny.driver(lambda load_as: tiny.load(load_as, config), config, num_blocks=1 + 4 * 24, **TOLD)
    heard, stored = Listener(driver, monkeypatch), []
    monkeypatch.setattr(
        driver.events, "_listen", lambda rank, its: (stored.extend(its), heard.hear(rank, its))
    )
    for talk in tiny.prompts([100] * 14, seed=11):
        for length in (30, 60, 100):
            tiny.generate(driver, [talk[:length]], SamplingParams(max_tokens=3))
            heard.check({0: None})
    kinds = {
        (e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window)
        for e in stored
        if isinstance(e, BlockStored)
    }
    assert kinds == {(0, "full_attention", None), (1, "sliding_window", 11)}


def changed(*rows):
    """Return what a report tells: of each row slot, generation, parent and tokens; no tokens: it is empty."""
    empty = [(0, 0)]
    return (
        np.array([row[0] for row in rows]),
        np.array([row[1] for row in rows]),
        np.array([len(row) > 2 for row in rows]),
        np.array([row[2] if len(row) > 2 else empty[0] for row in rows]),
        np.array([row[3] if len(row) > 2 else (0, 0) for row in rows], np.int32),
    )


def test_what_lost_its_parent_or_its_salt_is_removed_and_what_came_early_waits():
    """Blocks of two tokens in slots 0 to 4, one of them of a second group, by hand."""
    salted, plain = Label("s"), Tree(2, [GroupKind("full_attention"), GroupKind("sliding_window", 4)])
    group = (-(2**31) + 1,) * 2
    assert plain.apply(*changed((1, 0, (0, 0), (3, 4)), (2, 7, (1, 0), group))) == []
    [first, second] = plain.apply(*changed((0, 0, (-1, 0), (1, 2))))
    assert (first.token_ids, first.parent_block_hash, first.group_idx) == ([1, 2, 3, 4], None, 0)
    assert first.block_hashes == [int.from_bytes(key, "big") for key in keys_of_tokens([1, 2, 3, 4], 2)]
    assert (second.block_hashes, second.parent_block_hash) == (first.block_hashes[1:], first.block_hashes[0])
    assert (second.token_ids, second.group_idx, second.kv_cache_spec_sliding_window) == ([3, 4], 1, 4)
    # The parent goes, and the same content comes again: the others stay lost.
    end, rest, new = plain.apply(*changed((0, 1, (-1, 0), (1, 2))))
    assert (end, rest) == (
        BlockRemoved(first.block_hashes[::-1], group_idx=0),
        BlockRemoved(second.block_hashes, group_idx=1),
    )
    assert new.block_hashes == first.block_hashes[:1]
    assert plain.apply(*changed((1, 1), (2, 8))) == []
    # A salt is told when it is known, and removed when its text has another number.
    assert plain.apply(*changed((3, 0, (-1, 9), (5, 6)))) == []
    [told] = plain.name_salt(9, salted)
    assert (told.token_ids, told.extra_keys) == ([5, 6], [("s",)])
    assert plain.name_salt(9, salted) == []
    assert plain.name_salt(-5, salted) == [BlockRemoved(told.block_hashes, group_idx=0)]
    [told] = plain.name_salt(9, Label("s", 4, "poet"))
    assert (told.lora_id, told.lora_name, told.extra_keys) == (4, "poet", [("poet", "s")])
    assert plain.forget() == [AllBlocksCleared()]
    [again] = plain.apply(*changed((3, 5, (-1, 9), (5, 6))))
    assert again == told
