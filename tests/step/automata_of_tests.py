"""Automata for the lock-step of engines, over the few tokens of its model."""

import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.grammar.automaton import forced_tokens
from jaxpaged.step import automata
from jaxpaged.step.loop import write_masks
from reference import sampler
from tests.step.sum_model import VOCAB

STOP = 0
# What answers may look like: one of two texts; two tokens in turns, with an end between them; and anything in
# which each token bars some, behind token 3.
AUTOMATA = [
    sampler.TokenAutomaton([{2: 1}, {5: 2, 3: 3}, {7: 3}, {}], (3,), (STOP,)),
    sampler.TokenAutomaton([{1: 1, 4: 1}, dict.fromkeys(range(5, VOCAB), 0)], (0,), (STOP,)),
    sampler.TokenAutomaton(
        [{v: (v * 2 + s) % 5 for v in range(1, VOCAB) if (v + s) % 3} for s in range(5)], (1, 4), (STOP,), 3
    ),
]


def arrays_of(automaton: sampler.TokenAutomaton) -> types.SimpleNamespace:
    """Return an automaton as arrays, each token a class of its own."""
    next_state = np.full((len(automaton.moves), VOCAB), -1)
    masks = np.zeros(next_state.shape, bool)
    for state, moves in enumerate(automaton.moves):
        next_state[state, [*moves]] = [*moves.values()]
        if state in automaton.accepting:
            next_state[state, [*automaton.end_tokens]] = state
        masks[state, [*moves, *(automaton.end_tokens if state in automaton.accepting else ())]] = True
    each = np.arange(len(masks))
    forced = forced_tokens(masks, tuple(automaton.end_tokens))
    return types.SimpleNamespace(
        token_class=np.arange(VOCAB), next_state=next_state, mask_of=each, masks=masks, start=0, forced=forced
    )


def arena(num_rows: int) -> jax.Array:
    """Return the arena with all automata, a block each, behind an empty one; then a mask for each row."""
    blocks = [automata.encoded(arrays_of(each), VOCAB) for each in AUTOMATA]
    blocks += [automata.encoded_for_host(VOCAB)] * num_rows
    return jnp.array(np.concatenate([np.zeros(automata.BLOCK_WORDS, np.uint32), *blocks]))


def written(places: Any, allowed: set[int] | None, first: int, row: int, state: int) -> Any:
    """Write a row's mask into its block of the arena, and the row's state."""
    mask = np.zeros(VOCAB, bool)
    mask[[*(allowed or ())]] = True
    masks, firsts = automata.mask_words(mask, VOCAB)[None], [first + automata.MASK_BY_HOST]
    return write_masks(places, masks, np.array(firsts, np.int32), np.array([[row], [state]], np.int32))


def forced(automaton: sampler.TokenAutomaton, prompt_len: int, most: int, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that must come next behind these."""
    return automaton.forced(tokens[prompt_len:], most)


def follows(automaton: sampler.TokenAutomaton, prompt_len: int, tokens: Sequence[int]) -> bool:
    """Return whether the last token has moved an automaton that the host follows: then the row rests."""
    *before, last = tokens[prompt_len:]
    state = automaton.state(before)
    return last == automaton.opens if state is None else state >= 0
