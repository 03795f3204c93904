"""Long random histories: every policy against its oracle, at three block sizes, with jit and without."""

import os

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from jaxpaged.memory.policies import POLICIES, named
from jaxpaged.verify.lockstep import MAX_BLOCKS, MAX_EVICTED, MAX_SEQS, NUM_BLOCKS, Lockstep, jitted

# Soaking: JAXPAGED_SOAK=20 runs twenty times as many histories.
SOAK = int(os.environ.get("JAXPAGED_SOAK", "1"))

pytestmark = pytest.mark.usefixtures("small_pieces")
SHRINK = os.environ.get("JAXPAGED_SHRINK") == "1"

rows = st.integers(0, MAX_SEQS - 1)
some_rows = st.lists(rows, max_size=MAX_SEQS, unique=True).map(sorted)
tokens = st.integers(1, 2)


def machine(policy: str, block_size: int, **options: bool) -> type[RuleBasedStateMachine]:
    """A machine whose rules are the verbs of `Lockstep`."""
    room = MAX_BLOCKS * block_size
    # A token, a block, a prompt; now and then more than a row has room for.
    lengths = st.one_of(
        st.just(0), st.just(1), st.integers(0, block_size), st.integers(0, room), st.just(room + 1)
    )
    per_row = st.lists(lengths, min_size=MAX_SEQS, max_size=MAX_SEQS)
    # Mostly what most rows can do, so that not all histories are refusals.
    one_row = st.builds(lambda row, n: [n * (i == row) for i in range(MAX_SEQS)], rows, lengths)
    ones = st.lists(st.integers(0, 1), min_size=MAX_SEQS, max_size=MAX_SEQS)

    class Histories(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.lockstep = Lockstep(policy, block_size, **options)

        def on_device(self) -> list[int]:
            return self.lockstep.oracle.device_rows()

        def lens(self, fractions: list[float]) -> list[int]:
            """So many of each row's tokens."""
            tokens = self.lockstep.oracle.tokens
            held = [len(tokens[row]) if row in self.on_device() else 0 for row in range(MAX_SEQS)]
            return [round(f * n) for f, n in zip(fractions, held, strict=True)]

        def append(self, num_new_tokens: list[int], token: int) -> None:
            on_host = self.lockstep.oracle.on_host  # their row of the device is not theirs at present
            num_new_tokens = [0 if row in on_host else n for row, n in enumerate(num_new_tokens)]
            self.lockstep.run("append", num_new_tokens, token)

        @rule(num_new_tokens=one_row, token=tokens)
        def append_to_one(self, num_new_tokens: list[int], token: int) -> None:
            self.append(num_new_tokens, token)

        @rule(num_new_tokens=per_row, token=tokens)
        def append_to_many(self, num_new_tokens: list[int], token: int) -> None:
            self.append(num_new_tokens, token)

        @rule(num_new_tokens=ones, token=tokens)
        def decode(self, num_new_tokens: list[int], token: int) -> None:
            self.append(num_new_tokens, token)

        @rule(count=st.integers(1, 2), sensible=st.sampled_from([True, True, True, False]), data=st.data())
        def fork(self, count: int, sensible: bool, data: st.DataObject) -> None:
            oracle = self.lockstep.oracle
            empty = [row for row in range(MAX_SEQS) if row not in oracle.tokens]
            sensible = sensible and bool(self.on_device()) and len(empty) >= count
            source = st.sampled_from(self.on_device()) if sensible else rows
            destination = st.sampled_from(empty) if sensible else rows
            sources = data.draw(st.lists(source, min_size=count, max_size=count))
            destinations = data.draw(st.lists(destination, min_size=count, max_size=count, unique=sensible))
            windowed = set(self.lockstep.device.num_skipped.nonzero()[0].tolist())
            if oracle.on_host & set(destinations) or (windowed & set(sources) and not oracle.forks_windowed):
                return
            self.lockstep.run("fork", sources, destinations)

        @rule(rows=some_rows)
        def free(self, rows: list[int]) -> None:
            self.lockstep.run("free", rows)

        @rule(row=rows)
        def free_twice(self, row: int) -> None:
            self.lockstep.run("free_twice", row)

        @rule(data=st.data())
        @precondition(lambda self: self.on_device())
        def truncate(self, data: st.DataObject) -> None:
            fractions = data.draw(
                st.lists(st.sampled_from([0, 0, 0.2, 0.5, 1]), min_size=MAX_SEQS, max_size=MAX_SEQS)
            )
            num_tokens = self.lens(fractions)
            if data.draw(st.integers(0, 9)) == 0:
                num_tokens[data.draw(rows)] += 1
            self.lockstep.run("truncate", num_tokens)

        @rule(data=st.data())
        @precondition(lambda self: self.on_device())
        def window(self, data: st.DataObject) -> None:
            fractions = data.draw(
                st.lists(st.sampled_from([0, 0, 0.5, 0.8, 1]), min_size=MAX_SEQS, max_size=MAX_SEQS)
            )
            num_skipped = self.lens(fractions)
            if data.draw(st.integers(0, 9)) == 0:
                num_skipped[data.draw(rows)] += 1
            self.lockstep.run("window", num_skipped)

        @rule(rows=some_rows)
        @precondition(lambda self: self.on_device())
        def swap_out(self, rows: list[int]) -> None:
            windowed = set(self.lockstep.device.num_skipped.nonzero()[0].tolist())
            if not self.lockstep.oracle.swaps_windowed:
                rows = [row for row in rows if row not in windowed]
            self.lockstep.run("swap_out", rows)

        @rule(rows=some_rows)
        @precondition(lambda self: self.lockstep.oracle.on_host)
        def swap_in(self, rows: list[int]) -> None:
            self.lockstep.run("swap_in", rows)

        @rule(rows=some_rows)
        @precondition(lambda self: self.lockstep.oracle.on_host)
        def free_host(self, rows: list[int]) -> None:
            self.lockstep.run("free_host", rows)

        @rule()
        def reset(self) -> None:
            self.lockstep.run("reset")

    if not named(policy).keeps_content:

        class Admitting(Histories):
            @rule(num_tokens=st.integers(1, (NUM_BLOCKS + 1) * block_size))
            def can_allocate(self, num_tokens: int) -> None:
                self.lockstep.run("can_allocate", num_tokens)

        return Admitting

    # Prompts of few different blocks, so that they share their beginnings.
    blocks = st.lists(tokens, min_size=1, max_size=MAX_BLOCKS)
    ids = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=MAX_EVICTED)
    odd_ids = st.lists(st.sampled_from([-1, 1, NUM_BLOCKS]), min_size=1, max_size=2)

    class Cached(Histories):
        @rule(row=rows, blocks=blocks, cut=st.integers(0, block_size - 1), salt=st.integers(0, 1))
        def admit(self, row: int, blocks: list[int], cut: int, salt: int) -> None:
            if row in self.lockstep.oracle.on_host:
                return
            prompt = [token for token in blocks for _ in range(block_size)]
            self.lockstep.run("admit", row, prompt[: len(prompt) - cut], salt)

        @rule(data=st.data())
        @precondition(lambda self: self.on_device())
        def commit(self, data: st.DataObject) -> None:
            fractions = data.draw(
                st.lists(st.sampled_from([0, 0.5, 1, 1]), min_size=MAX_SEQS, max_size=MAX_SEQS)
            )
            num_tokens = self.lens(fractions)
            if data.draw(st.integers(0, 9)) == 0:
                num_tokens[data.draw(rows)] += 1
            self.lockstep.run("commit", num_tokens)

        @rule(block_ids=st.one_of(ids, odd_ids))
        def touch(self, block_ids: list[int]) -> None:
            self.lockstep.run("touch", block_ids)

        @rule(block_ids=st.one_of(ids, odd_ids))
        def evict(self, block_ids: list[int]) -> None:
            self.lockstep.run("evict", block_ids)

        @rule()
        def reset_cache(self) -> None:
            self.lockstep.run("reset_cache")

    return Cached


def run(policy: str, block_size: int, max_examples: int, steps: int, **options: bool) -> None:
    run_state_machine_as_test(
        machine(policy, block_size, **options),
        settings=settings(
            max_examples=max_examples * SOAK,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            # A history is replayed as it was: shrinking one takes minutes (JAXPAGED_SHRINK=1 does it).
            phases=[p for p in Phase if p is not Phase.explain and (SHRINK or p is not Phase.shrink)],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize(
    "block_size", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_equals_its_oracle(policy: str, block_size: int) -> None:
    run(policy, block_size, max_examples=6, steps=36)
    for verb, times in jitted(policy, block_size).num_traces.items():
        assert times == 1, f"{verb} was compiled {times} times"


def test_prefix_caching_is_exact_when_every_hash_is_the_same() -> None:
    run("lru", 4, max_examples=6, steps=40, collide=True)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_equals_its_oracle_without_jit(policy: str) -> None:
    run(policy, 4, use_jit=False, max_examples=2, steps=15)
