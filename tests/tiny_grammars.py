"""Grammars over the tiny model's tokens, for tests of the engine: each is made from a number."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpaged.engine.driver import Driver
from jaxpaged.engine.grammars import Grammars
from jaxpaged.grammar.automaton import TokenAutomaton, automaton_of
from jaxpaged.structured_outputs import StructuredOutputsParams
from reference import sampler
from tests import tiny

VOCAB = tiny.CONFIG.vocab_size
END = 0  # the end-of-sequence token of drivers that `with_grammars` returns


def with_grammars(driver: Driver, compile_: Callable[[StructuredOutputsParams], Any] | None = None) -> Driver:
    """Let a driver's requests have grammars, and token 0 for their end."""
    make_ready, num_words = driver.late_arena.prepare, driver.config.most_arena_words
    grammars = Grammars(compile_ or compiled, VOCAB, num_words, make_ready=make_ready)
    model_config = dataclasses.replace(driver.door.model_config, eos_token_ids=(END,))
    driver.door = dataclasses.replace(driver.door, grammars=grammars, model_config=model_config)
    return driver


@functools.cache
def moves_of(seed: int) -> tuple[list[dict[int, int]], list[int]]:
    """Return a random automaton's moves by states, and its accepting states; seed 0: 1, 2, 3 and so on."""
    if seed == 0:
        return [{i + 1: i + 1} for i in range(60)] + [{}], [60]
    rng = random.Random(seed)
    num_states = rng.randint(2, 9)
    moves = []
    for state in range(num_states):
        tokens = rng.sample(range(1, VOCAB), rng.choice([1, 1, 2, 5, 40]))
        moves.append(
            {token: rng.randrange(num_states) for token in tokens} | {tokens[0]: (state + 1) % num_states}
        )
    return moves, sorted(rng.sample(range(num_states), rng.randint(1, 2)))


def compiled(params: StructuredOutputsParams) -> TokenAutomaton:
    """Return the automaton of a constraint whose `regex` is a number, as `moves_of` takes it."""
    moves, accepting = moves_of(int(params.regex or 0))
    steps = np.full((len(moves), VOCAB), -1, np.int32)
    for state, its in enumerate(moves):
        steps[state, [*its]] = [*its.values()]
    is_accepting = np.zeros(len(moves), bool)
    is_accepting[accepting] = True
    made = automaton_of(steps, np.arange(VOCAB), is_accepting, (END,))
    assert made is not None
    return made


def oracle(params: StructuredOutputsParams) -> sampler.TokenAutomaton:
    """Return the oracle of a constraint."""
    moves, accepting = moves_of(int(params.regex or 0))
    return sampler.TokenAutomaton(moves, accepting, (END,), params.after_token_id, params.reasoning_token_id)


def asking(seed: int, **more: Any) -> dict[str, Any]:
    """Return the sampling option of a random grammar."""
    return {"structured_outputs": StructuredOutputsParams(regex=str(seed), **more)}
