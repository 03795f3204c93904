"""Long random histories: rules that drive a `History`, the search for one that fails, and a short one of it.

Needs hypothesis, the extra `verify`.
"""

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from jaxpaged.research.verify import reducing
from jaxpaged.research.verify.history import MAX_BLOCKS, MAX_EVICTED, MAX_SEQS, NUM_BLOCKS, History
from jaxpaged.research.verify.reducing import Line

rows = st.integers(0, MAX_SEQS - 1)
some_rows = st.lists(rows, max_size=MAX_SEQS, unique=True).map(sorted)
tokens = st.integers(1, 2)
SHORTER = 12  # times 25 random histories are tried for one that is shorter


def having(verb: str) -> Callable[..., Any]:
    return precondition(lambda self: self.lockstep.has(verb))


def machine(make: Callable[[], History], block_size: int) -> type[RuleBasedStateMachine]:
    """Return a state machine whose rules are the verbs of the history that `make` starts."""
    room = MAX_BLOCKS * block_size
    # Lengths of appends: none, one token, up to a block, up to a row's room, or one more than that.
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
            self.lockstep = make()

        def on_device(self) -> list[int]:
            return self.lockstep.oracle.device_rows()

        def numbers(self, data: st.DataObject, fractions: list[float]) -> list[int]:
            """Draw a fraction of each row's tokens, sometimes one more than a row has."""
            drawn = data.draw(st.lists(st.sampled_from(fractions), min_size=MAX_SEQS, max_size=MAX_SEQS))
            tokens = self.lockstep.oracle.tokens
            held = [len(tokens[row]) if row in self.on_device() else 0 for row in range(MAX_SEQS)]
            numbers = [round(f * n) for f, n in zip(drawn, held, strict=True)]
            if data.draw(st.integers(0, 9)) == 0:
                numbers[data.draw(rows)] += 1
            return numbers

        def append(self, num_new_tokens: list[int], token: int) -> None:
            on_host = self.lockstep.oracle.on_host
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

        @having("fork")
        @rule(count=st.integers(1, 2), sensible=st.sampled_from([True, True, True, False]), data=st.data())
        @precondition(lambda self: self.on_device())
        def fork(self, count: int, sensible: bool, data: st.DataObject) -> None:
            oracle = self.lockstep.oracle
            empty = [row for row in range(MAX_SEQS) if row not in oracle.tokens]
            sensible = sensible and bool(self.on_device()) and len(empty) >= count
            source = st.sampled_from(self.on_device()) if sensible else rows
            destination = st.sampled_from(empty) if sensible else rows
            sources = data.draw(st.lists(source, min_size=count, max_size=count))
            destinations = data.draw(st.lists(destination, min_size=count, max_size=count, unique=sensible))
            if self.lockstep.is_defined("fork", sources, destinations):
                self.lockstep.run("fork", sources, destinations)

        @having("free")
        @rule(rows=some_rows)
        @precondition(lambda self: self.on_device())
        def free(self, rows: list[int]) -> None:
            self.lockstep.run("free", rows)

        @having("free_twice")
        @rule(row=rows)
        def free_twice(self, row: int) -> None:
            self.lockstep.run("free_twice", row)

        @having("truncate")
        @rule(data=st.data())
        @precondition(lambda self: self.on_device())
        def truncate(self, data: st.DataObject) -> None:
            self.lockstep.run("truncate", self.numbers(data, [0, 0, 0.2, 0.5, 1]))

        @having("window")
        @rule(data=st.data())
        @precondition(lambda self: self.on_device())
        def window(self, data: st.DataObject) -> None:
            self.lockstep.run("window", self.numbers(data, [0, 0, 0.5, 0.8, 1]))

        @having("swap_out")
        @rule(rows=some_rows)
        @precondition(lambda self: self.on_device())
        def swap_out(self, rows: list[int]) -> None:
            self.lockstep.run(
                "swap_out", [row for row in rows if self.lockstep.is_defined("swap_out", [row])]
            )

        @having("swap_in")
        @rule(rows=some_rows)
        @precondition(lambda self: self.lockstep.oracle.on_host)
        def swap_in(self, rows: list[int]) -> None:
            self.lockstep.run("swap_in", rows)

        @having("free_host")
        @rule(rows=some_rows)
        @precondition(lambda self: self.lockstep.oracle.on_host)
        def free_host(self, rows: list[int]) -> None:
            self.lockstep.run("free_host", rows)

        @having("reset")
        @rule(now=st.integers(0, 4))
        def reset(self, now: int) -> None:
            if now == 0:  # seldom, or no history gets far
                self.lockstep.run("reset")

    probe = make()
    if not probe.keeps_content:

        class Admitting(Histories):
            @having("can_allocate")
            @rule(num_tokens=st.integers(1, (NUM_BLOCKS + 1) * block_size), row=rows)
            def admit(self, num_tokens: int, row: int) -> None:
                """Ask `can_allocate` for tokens, and append them if the row is free and has room."""
                self.lockstep.run("can_allocate", num_tokens)
                if row not in self.lockstep.oracle.tokens and num_tokens <= room:
                    self.lockstep.run("append", [num_tokens * (i == row) for i in range(MAX_SEQS)], 1)

        return Admitting

    # Prompts of few different blocks, so that they share their beginnings.
    blocks = st.lists(tokens, min_size=1, max_size=MAX_BLOCKS)
    ids = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=MAX_EVICTED)
    odd_ids = st.lists(st.sampled_from([-1, 1, NUM_BLOCKS]), min_size=1, max_size=2)

    class Cached(Histories):
        @having("admit")
        @rule(row=rows, blocks=blocks, cut=st.integers(0, block_size - 1), salt=st.integers(0, 1))
        def admit(self, row: int, blocks: list[int], cut: int, salt: int) -> None:
            prompt = [token for token in blocks for _ in range(block_size)]
            prompt = prompt[: len(prompt) - cut]
            if self.lockstep.is_defined("admit", row, prompt, salt):
                self.lockstep.run("admit", row, prompt, salt)

        @having("commit")
        @rule(data=st.data())
        @precondition(lambda self: self.on_device())
        def commit(self, data: st.DataObject) -> None:
            self.lockstep.run("commit", self.numbers(data, [0, 0.5, 1, 1]))

        @having("touch")
        @rule(block_ids=st.one_of(ids, odd_ids))
        def touch(self, block_ids: list[int]) -> None:
            self.lockstep.run("touch", block_ids)

        @having("evict")
        @rule(block_ids=st.one_of(ids, odd_ids))
        def evict(self, block_ids: list[int]) -> None:
            self.lockstep.run("evict", block_ids)

        @having("reset_cache")
        @rule()
        def reset_cache(self) -> None:
            self.lockstep.run("reset_cache")

    return Cached


def run(
    make: Callable[[], History], block_size: int, *, max_examples: int, steps: int, seed: int | None = None
) -> None:
    """Run `max_examples` histories of at most `steps` steps. Raises: what the first that fails raises."""
    histories = machine(make, block_size)
    if seed is not None:
        histories = hypothesis.seed(seed)(histories)
    run_state_machine_as_test(
        histories,
        settings=hypothesis.settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            # `short` makes it short, step by step as it was recorded: in seconds, not in minutes.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
        ),
    )


def failing(
    make: Callable[[], History], block_size: int, *, max_examples: int, steps: int, seed: int
) -> list[Line] | None:
    """Return the first history that fails, up to the failing step; None if none fails."""
    latest: list[History] = []

    def remembered() -> History:
        latest[:] = [make()]
        return latest[0]

    try:
        run(remembered, block_size, max_examples=max_examples, steps=steps, seed=seed)
    except Exception:
        lines = latest[0].history if latest else []
        if failure(make, lines) is None:
            raise
        return lines
    return None


def failure(make: Callable[[], History], lines: list[Line]) -> AssertionError | None:
    """Return the disagreement that a history leads to, or None; steps that cannot be asked for are
    skipped.
    """
    try:
        history = make()
        for verb, args in lines:
            if history.is_defined(verb, *args):
                history.run(verb, *args)
    except AssertionError as error:
        return error
    except Exception:  # ours: the steps that were left out make the rest meaningless
        return None
    return None


def short(make: Callable[[], History], block_size: int, lines: list[Line], seconds: float) -> list[Line]:
    """Return a short failing history in the place of `lines`, which fails, after at most so many seconds.

    It is reduced until nothing can be left out. Then shorter random histories are tried, and one that fails
    is reduced in turn.
    """
    until = time.monotonic() + seconds
    lines = json.loads(json.dumps(lines))  # tuples are lists, as in a file
    lines = [(verb, args) for verb, args in lines]
    seeds = itertools.count(1)
    while True:
        lines = reducing.reduced(lines, lambda candidate: failure(make, candidate) is not None, until)
        for seed in itertools.islice(seeds, SHORTER):
            if len(lines) < 2 or time.monotonic() > until:
                return lines
            shorter = failing(make, block_size, max_examples=25, steps=len(lines) - 1, seed=seed)
            if shorter is not None:
                lines = shorter
                break
        else:
            return lines
