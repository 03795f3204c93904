"""Token tables of a byte machine: the state behind each token, from each state, for a whole vocabulary."""

import numpy as np

from jaxpaged.grammar.automaton import NOT_ALLOWED, TokenAutomaton, automaton_of
from jaxpaged.grammar.machine import ByteMachine
from jaxpaged.grammar.nodes import GrammarError, Limits
from jaxpaged.grammar.vocabulary import TokenBytes

STATES_AT_ONCE = 128


def token_automaton(machine: ByteMachine, tokens: TokenBytes, limits: Limits) -> TokenAutomaton:
    """Return the automaton over tokens whose texts are the machine's.

    Raises `GrammarError` if no tokens write any of the texts, or the tables are larger than the limits allow.
    """
    num_states, vocab_size = len(machine.steps), len(tokens.raw)
    # A row for "not allowed", so that its steps lead to itself.
    steps = np.append(machine.steps, np.full_like(machine.steps[:1], NOT_ALLOWED), axis=0)
    steps = np.where(steps == NOT_ALLOWED, num_states, steps).astype(np.int32)
    chunks, class_of = [], np.zeros(vocab_size, np.int64)
    for low in range(0, num_states, STATES_AT_ONCE):
        states = np.arange(low, min(low + STATES_AT_ONCE, num_states), dtype=np.int32)
        column_of, table = _columns(states, steps, machine.kind_of, tokens)
        chunks.append((column_of, table))
        # Classes of tokens that no state so far tells apart, and a token of each.
        pairs = class_of * len(table) + column_of
        _, member, class_of = np.unique(pairs, return_index=True, return_inverse=True)
        if num_states * len(member) * 4 > limits.max_table_bytes:
            raise _too_large(limits)
    whole = np.concatenate([table[column_of[member]] for column_of, table in chunks], axis=1).T
    whole = np.where(whole == num_states, NOT_ALLOWED, whole)
    made = automaton_of(whole, class_of, machine.accepting, tokens.eos_ids)
    if made is None:
        raise GrammarError("the grammar cannot be met: the model's tokens write no text of it")
    if made.nbytes > limits.max_table_bytes:
        raise _too_large(limits)
    return made


def _columns(
    states: np.ndarray, steps: np.ndarray, kind_of: np.ndarray, tokens: TokenBytes
) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's column, [V], and the columns, [C, states]: the state behind it from each state."""
    dead = len(steps) - 1
    nothing = np.full(len(states), dead, np.int32)
    numbers: dict[bytes, int] = {nothing.tobytes(): 0}
    rows = [nothing]
    column_of = np.zeros(len(tokens.raw), np.int32)
    behind = states[None]  # [nodes that are alive, states]
    place = np.zeros(1, np.int64)  # of each node of the level before among those; -1: not alive
    for level in tokens.trie:
        alive = place[level.parent] >= 0
        now = steps[behind[place[level.parent[alive]]], kind_of[level.byte[alive]][:, None]]
        is_left = (now != dead).any(axis=1)
        behind = now[is_left]
        place = np.full(len(level.parent), -1)
        place[np.flatnonzero(alive)[is_left]] = np.arange(len(behind))
        if not len(behind):
            break
        ends = place[level.node]
        for token, at in zip(level.token[ends >= 0].tolist(), ends[ends >= 0].tolist(), strict=True):
            row = behind[at]
            column = numbers.setdefault(row.tobytes(), len(rows))
            if column == len(rows):
                rows.append(row)
            column_of[token] = column
    return column_of, np.stack(rows)


def _too_large(limits: Limits) -> GrammarError:
    return GrammarError(f"the grammar's tables have more than {limits.max_table_bytes} bytes")
