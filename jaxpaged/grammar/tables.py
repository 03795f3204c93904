"""Token tables of a byte machine: the state behind each token, from each state, for a whole vocabulary."""

import numpy as np

from jaxpaged.grammar.automaton import NOT_ALLOWED, TokenAutomaton, automaton_of
from jaxpaged.grammar.machine import ByteMachine
from jaxpaged.grammar.nodes import GrammarError, Limits, TooLargeError
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
    made = automaton_of(whole, class_of, machine.accepting, tokens.eos_ids, raw=tokens.raw)
    if made is None:
        raise GrammarError("the grammar cannot be met: the model's tokens write no text of it")
    if made.nbytes > limits.max_table_bytes:
        raise _too_large(limits)
    return made


def _columns(
    states: np.ndarray, steps: np.ndarray, kind_of: np.ndarray, tokens: TokenBytes
) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's column, [V], and the columns, [C, states]: the state behind it from each state.

    Nodes of the tokens' tree have few columns between them, so each is computed once for all nodes before it
    with the same column and the same kind of byte.
    """
    nothing = np.full(len(states), len(steps) - 1, np.int32)
    numbers = {nothing.tobytes(): 0, states.tobytes(): 1}
    columns = [nothing, states]
    column_of = np.zeros(len(tokens.raw), np.int32)
    node_columns = np.ones(1, np.int32)  # column of each node of the level before
    for level in tokens.trie:
        before = node_columns[level.parent]
        alive = np.flatnonzero(before)
        alternatives = before[alive] * 256 + kind_of[level.byte[alive]]
        distinct, way_of = np.unique(alternatives, return_inverse=True)
        now = steps[np.stack(columns)[distinct // 256], (distinct % 256)[:, None]]
        column_numbers = np.empty(len(distinct), np.int32)
        for i, column in enumerate(now):
            column_numbers[i] = numbers.setdefault(column.tobytes(), len(columns))
            if column_numbers[i] == len(columns):
                columns.append(column)
        node_columns = np.zeros(len(level.parent), np.int32)
        node_columns[alive] = column_numbers[way_of]
        column_of[level.token] = node_columns[level.node]
        if not node_columns.any():
            break
    return column_of, np.stack(columns)


def _too_large(limits: Limits) -> TooLargeError:
    return TooLargeError(f"the grammar's tables have more than {limits.max_table_bytes} bytes")
