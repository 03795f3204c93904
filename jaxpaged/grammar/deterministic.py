"""Deterministic automata over the bytes of UTF-8: what two of them accept, and their fewest states."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8

from jaxpaged.grammar.automaton import NOT_ALLOWED, useful_states
from jaxpaged.grammar.nodes import TooLargeError

MAX_ROUNDS = 200  # of merging


class ByteMachine(NamedTuple):
    """A deterministic automaton over bytes: S states, K kinds of bytes. State 0 is the start."""

    steps: Int[np.ndarray, "S K"]  # int32; `NOT_ALLOWED` where such a byte may not come
    kind_of: UInt8[np.ndarray, "256"]  # kinds of bytes
    accepting: Bool[np.ndarray, "S"]


def matches(machine: ByteMachine, text: str) -> bool:
    """Return whether a text is in the language of a machine."""
    state = 0
    for byte in text.encode(errors="surrogatepass"):
        state = int(machine.steps[state, machine.kind_of[byte]])
        if state == NOT_ALLOWED:
            return False
    return bool(machine.accepting[state])


def paired(one: ByteMachine, other: ByteMachine, max_states: int, *, is_minus: bool = False) -> ByteMachine:
    """Return the machine of texts that both accept, or with `is_minus` the first only, by pairs of states.

    Raises `GrammarError` if there are more than `max_states` pairs.
    """
    num_others = len(other.steps)
    pairs = one.kind_of.astype(np.int32) * 256 + other.kind_of
    kinds, kind_of = np.unique(pairs, return_inverse=True)
    their = np.append(other.steps, np.full_like(other.steps[:1], NOT_ALLOWED), axis=0)[:, kinds % 256]
    their = np.where(their == NOT_ALLOWED, num_others, their)  # a state that accepts nothing
    ours = one.steps[:, kinds // 256]
    numbers = np.full(len(one.steps) * (num_others + 1), NOT_ALLOWED, np.int32)
    numbers[0], count = 0, 1
    waiting, reached, rows = np.zeros(1, np.int64), [], []
    while len(waiting):
        reached.append(waiting)
        first, second = waiting // (num_others + 1), waiting % (num_others + 1)
        alive = ours[first] != NOT_ALLOWED
        if not is_minus:
            alive &= their[second] != num_others
        there = ours[first].astype(np.int64) * (num_others + 1) + their[second]
        there = np.where(alive, there, 0)
        codes_reached = np.unique(there[alive])
        waiting = codes_reached[numbers[codes_reached] == NOT_ALLOWED]
        numbers[waiting] = np.arange(count, count + len(waiting))
        count += len(waiting)
        if count > max_states:
            raise too_many_states(max_states)
        rows.append(np.where(alive, numbers[there], NOT_ALLOWED))
    codes = np.concatenate(reached)
    ends = np.append(other.accepting, False)[codes % (num_others + 1)]
    accepting = one.accepting[codes // (num_others + 1)] & (~ends if is_minus else ends)
    return ByteMachine(np.concatenate(rows).astype(np.int32), kind_of.reshape(-1).astype(np.uint8), accepting)


def useful(machine: ByteMachine) -> ByteMachine | None:
    """Return the machine with equal states merged, and without those that lead nowhere."""
    kept = useful_states(machine.steps, machine.accepting, 0)
    if not kept[0]:
        return None
    return merged(renumbered(machine, np.where(kept, np.cumsum(kept) - 1, NOT_ALLOWED), kept))


def merged(machine: ByteMachine) -> ByteMachine:
    """Return the machine with equivalent states merged, as far as a few rounds find them."""
    groups, num_groups = machine.accepting.astype(np.int32), 0
    for _ in range(MAX_ROUNDS):
        their = np.append(groups, NOT_ALLOWED)[machine.steps]
        rows = np.ascontiguousarray(np.concatenate([groups[:, None], their], axis=1), np.int32)
        group_of_row: dict[bytes, int] = {}
        groups = np.array(
            [group_of_row.setdefault(row.tobytes(), len(group_of_row)) for row in rows], np.int32
        )
        if len(group_of_row) == num_groups:
            _, first = np.unique(groups, return_index=True)  # groups are numbered by their first state
            kept = np.zeros(len(groups), bool)
            kept[first] = True
            return renumbered(machine, groups, kept)
        num_groups = len(group_of_row)
    return machine


def renumbered(machine: ByteMachine, numbers: np.ndarray, kept: np.ndarray) -> ByteMachine:
    """Return the machine of some states, under new numbers; steps to states left out are not allowed."""
    if len(set(numbers[kept].tolist())) == len(numbers):
        return machine
    numbers = np.append(numbers, NOT_ALLOWED).astype(np.int32)
    return ByteMachine(numbers[machine.steps[kept]], machine.kind_of, machine.accepting[kept])


def too_many_states(max_states: int) -> TooLargeError:
    """Return the error for a grammar of more than `max_states` states."""
    return TooLargeError(
        f"the grammar has more than {max_states} states: make repetitions shorter or leave them open"
    )
