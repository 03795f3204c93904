"""Keys and stores of blocks beside their oracle."""

import itertools

import numpy as np
import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.contracts.block_stores import BlockStore, StoredBlock, named
from jaxpaged.memory.cache_specs import FULL, SlidingWindow
from jaxpaged.tiers import keys
from jaxpaged.tiers.groups import served
from jaxpaged.tiers.host import HostStore
from jaxpaged.tiers.rule import Rule
from jaxpaged.tiers.tiers import Tiers
from reference import tiers as oracle
from reference.engine_state import Reach
from tests.outsiders.block_store import Kept

SPACES = b"a" * 32, b"b" * 32


def block(value, num_bytes=1):
    """Make a block of so many bytes, all of one value."""
    return StoredBlock((True,), {"k": np.full((1, num_bytes), value, np.uint8)})


def key_of(number):
    [key] = keys.chain_keys(SPACES[number % 2], None, b"", np.array([number], np.int32), 1)
    return key


class Clock:
    """Clock that a test moves, in whole seconds."""

    def __init__(self, start=1000):
        self.now = start

    def __call__(self):
        return self.now


def history(
    store, capacity, num_steps=400, num_keys=9, seed=0, settle=lambda: None, size_of=None, clock=None
):
    """Run one history of random operations on a store and on the oracle, and compare what they give.

    clock: with it blocks are kept, too, and time passes.
    """
    rng, plain = np.random.default_rng(seed), oracle.Store(capacity)
    for step in range(num_steps):
        number, its = int(rng.integers(num_keys)), rng.random()
        key, name = key_of(number), (number % 2, None, None, (number,))
        if clock is not None and rng.random() < 0.3:
            others = [int(n) for n in rng.choice(num_keys, 3, replace=False)]
            seconds = int(rng.choice([0, 1, 5, 20]))
            store.keep([key_of(n) for n in others], seconds)
            plain.keep([(n % 2, None, None, (n,)) for n in others], seconds)
            clock.now += (passed := int(rng.integers(3)))
            settle()
            plain.wait(passed)
        elif its < 0.4:
            num_bytes, value = int(rng.integers(1, 4)), step % 256
            new = block(value, num_bytes)
            store.put(key, new)
            plain.put(name, size_of(key, new) if size_of else num_bytes, (value, num_bytes))
        elif its < 0.7:
            assert store.contains(key) == plain.contains(name)
        elif its < 0.98:
            found = store.get(key)
            mine = None if found is None else (int(found.arrays["k"][0, 0]), found.num_bytes)
            assert mine == plain.get(name)
        else:
            store.clear(SPACES[number % 2])
            plain.entries = [entry for entry in plain.entries if entry[0][0] != number % 2]
            plain.kept = {name: until for name, until in plain.kept.items() if name[0] != number % 2}
        settle()
    return plain


@pytest.mark.parametrize("keeps", [False, True])
def test_host_memory_is_in_lock_step_with_its_oracle(keeps):
    clock = Clock()
    store = HostStore(11, clock)
    plain = history(store, 11, num_steps=1980 if keeps else 400, clock=clock if keeps else None)
    assert len(store) == len(plain.entries) > 2
    assert store.num_bytes == sum(entry[1] for entry in plain.entries)


def test_a_store_of_ones_own_is_told_what_to_keep_if_it_wants_to_know():
    class Keeping(Kept):
        def keep(self, keys, seconds):
            self.told = keys, seconds

    below = Keeping()
    for store in (below, Kept()):
        its = Tiers(HostStore(6), store)
        its.put(key_of(1), block(1))
        its.keep([key_of(1)], 5)
        assert its.host.kept_bytes == 1
        its.close()
    assert below.told == ([key_of(1)], 5)


@pytest.mark.parametrize("is_told", [False, True])
def test_of_a_chain_that_was_kept_the_end_goes_first(is_told):
    clock = Clock()
    mine, plain, chain = HostStore(6, clock), oracle.Store(6), range(3)
    for number in chain:
        mine.put(key_of(number), block(number))
        plain.put(number, 1, number)
    mine.keep([key_of(number) for number in chain], 5)
    plain.keep([*chain], 5)
    if is_told:
        mine.keep([key_of(number) for number in chain], 0)
        plain.keep([*chain], 0)
    clock.now += 5
    plain.wait(5)
    for number in range(3, 7):
        mine.put(key_of(number), block(number))
        plain.put(number, 1, number)
    assert [plain.contains(number) for number in (2, 1, 0)] == [False, True, True]
    assert [mine.contains(key_of(number)) for number in (2, 1, 0)] == [False, True, True]


def test_keys_are_equal_only_where_the_oracles_are():
    tokens = [list(range(12)), [*range(11), 77], [5, *range(1, 12)], list(range(11))]
    adapters = b"", keys.adapter_digest({"q": (np.ones(2), np.ones(3))}), keys.adapter_digest({})
    mine, plain = [], []
    for space, salt, adapter, its in itertools.product(SPACES, (None, "", "a", "None"), adapters, tokens):
        mine += keys.chain_keys(space, salt, adapter, np.array(its, np.int32), 4)
        plain += oracle.keys(space, salt, adapter, its, 4)
    assert len(mine) == len(plain)
    number = {key: i for i, key in enumerate(dict.fromkeys(plain))}
    mine_number = {key: i for i, key in enumerate(dict.fromkeys(mine))}
    assert [mine_number[key] for key in mine] == [number[key] for key in plain]
    assert len({key.digest for key in mine}) == len(number)
    other = keys.adapter_digest({"q": (np.ones(3), np.ones(2))})
    assert len({*adapters, other}) == 4


def test_groups_go_on_from_where_the_oracles_do():
    rng = np.random.default_rng(0)
    pairs = [(FULL, Reach()), (SlidingWindow(9), Reach(window=9)), (SlidingWindow(40), Reach(window=40))]
    for _ in range(300):
        kinds = [pairs[int(i)] for i in rng.integers(0, 3, int(rng.integers(1, 4)))]
        num_blocks, size = int(rng.integers(1, 9)), int(rng.choice([4, 16]))
        first = int(rng.integers(num_blocks + 1))
        present = [(True,) * len(kinds)] * first
        present += [tuple((rng.random(len(kinds)) < 0.8).tolist()) for _ in range(num_blocks - first)]
        want = oracle.served(present, [reach for _, reach in kinds], first, size)
        specs = [spec for spec, _ in kinds]
        assert served(present[first:], specs, first, size) == want


@pytest.mark.parametrize("compute", [None, 0.5, 2.0])
def test_the_rule_is_that_of_its_oracle(compute):
    rule = Rule()
    assert rule.pays(compute, 10, 10)  # nothing is known
    rule.upload.note(10, 0.5)
    rule.below.note(20, 1.0)
    assert rule.seconds(10, 10) == pytest.approx(1.0)
    tries = next(i for i in range(100) if rule.pays(compute, 10, 10))
    assert (tries == 0) == oracle.pays(1.0, compute)
    assert tries < 10  # a tier that was slow is tried again


def test_stores_from_outside_are_checked():
    assert isinstance(named("tests.outsiders.block_store:Kept"), BlockStore)
    assert isinstance(named(Kept()), Kept)

    class Old(Kept):
        contract = 0

    def broken():
        raise OSError("no\nway")

    for asked, message in (
        ("tests.outsiders.block_store:Lost", "kv_offloading_backend='tests.*Lost' must be a store of blocks"),
        (Old, "kv_offloading_backend=.*Old'> cannot be used: it declares contract = 0"),
        (dict, "kv_offloading_backend=<class 'dict'> must be a store of blocks, or a function without arg"),
        (7, "kv_offloading_backend=7 must be a store of blocks"),
        (broken, "kv_offloading_backend=<function .* cannot be made: no way"),
    ):
        with pytest.raises(InputError, match=message):
            named(asked)
    for options, message in (
        ({"kv_offloading_size": 0}, "kv_offloading_size=0 must be None or a number > 0"),
        (
            {"kv_offloading_size": 1, "enable_prefix_caching": False},
            "kv_offloading_size=1.0 must be None with",
        ),
        (
            {"kv_offloading_size": 1, "data_parallel_size": 2},
            "kv_offloading_size=1.0 must be None with sever",
        ),
        ({"kv_offloading_backend": "tape"}, "kv_offloading_backend='tape' must be host, disk:DIR, or 'pack"),
    ):
        with pytest.raises(InputError, match=message):
            EngineConfig(**options)
