"""Token automaton: tables that say which tokens may come next, and what state each leads to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int

NOT_ALLOWED = -1
MOST_BEGINNINGS = 64  # tokens of one mask that may be beginnings of one of them


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Tables of a regular language over tokens. S states, C classes of tokens, M distinct masks, V token ids.

    Each state allows at least one token: from each, an accepting state can be reached. End-of-sequence ids
    are one class of their own, allowed exactly in accepting states, where they lead back to the same state.
    """

    token_class: Int[np.ndarray, "V"]  # int32; tokens of one class lead to the same state everywhere
    next_state: Int[np.ndarray, "S C"]  # int32; `NOT_ALLOWED` where a class may not come
    mask_of: Int[np.ndarray, "S"]  # int32: a state's row of `masks`
    masks: Bool[np.ndarray, "M V"]
    accepting: Bool[np.ndarray, "S"]
    forced: Int[np.ndarray, "M"]  # int32: the token of a mask's states where the text is forced, else -1
    start: int = 0
    levels: int = 0  # to which values inside values were cut; 0: they were not

    @property
    def vocab_size(self) -> int:
        return len(self.token_class)

    @property
    def num_states(self) -> int:
        return len(self.next_state)

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        tables = (self.token_class, self.next_state, self.mask_of, self.masks, self.accepting, self.forced)
        return sum(table.nbytes for table in tables)

    def step(self, state: int, token: int) -> int:
        """Return the state after one more token; `NOT_ALLOWED` if the token is not allowed."""
        return int(self.next_state[state, self.token_class[token]])

    def allowed(self, state: int) -> Bool[np.ndarray, "V"]:
        """Return a mask of the tokens that are allowed next."""
        return self.masks[self.mask_of[state]]


def automaton_of(
    steps: Int[np.ndarray, "S K"],
    column_of: Int[np.ndarray, "V"],
    accepting: Bool[np.ndarray, "S"],
    eos_ids: Sequence[int],
    start: int = 0,
    raw: Sequence[bytes] = (),
) -> TokenAutomaton | None:
    """Make an automaton of steps by columns of tokens: state `steps[s, column_of[t]]` is behind `t` in `s`.

    `NOT_ALLOWED` stands where a token may not come; whatever the columns of `eos_ids` say is replaced. `raw`
    has the tokens' bytes, if they are known.

    States that cannot be reached, or from which no end can be, are left out, and so is what leads there.
    Returns None if no end can be reached at all.
    """
    is_eos = np.zeros(len(column_of), bool)
    is_eos[list(eos_ids)] = True
    unused = np.bincount(column_of[~is_eos], minlength=steps.shape[1]) == 0
    steps = np.where(unused[None], NOT_ALLOWED, steps)
    kept = useful_states(steps, accepting, start)
    if not kept[start]:
        return None
    numbers = np.full(len(steps) + 1, NOT_ALLOWED, np.int32)  # the last one is that of `NOT_ALLOWED`
    numbers[:-1][kept] = np.arange(kept.sum())
    steps, accepting = numbers[steps[kept]], accepting[kept]
    ends = np.where(accepting, np.arange(len(steps)), NOT_ALLOWED)
    columns = np.concatenate([steps, ends[:, None]], axis=1).astype(np.int32)
    eos_column = steps.shape[1]
    # Columns that are the same become one class. That of the end stays alone.
    _, first, class_of = np.unique(steps, axis=1, return_index=True, return_inverse=True)
    next_state = np.concatenate([steps[:, first], columns[:, eos_column:]], axis=1)
    token_class = np.where(is_eos, len(first), class_of.reshape(-1)[column_of])
    rows, mask_of = np.unique(next_state >= 0, axis=0, return_inverse=True)
    masks = np.ascontiguousarray(rows[:, token_class])
    return TokenAutomaton(
        token_class=token_class.astype(np.int32),
        next_state=np.ascontiguousarray(next_state, np.int32),
        mask_of=mask_of.reshape(-1).astype(np.int32),
        masks=masks,
        accepting=accepting,
        forced=forced_tokens(masks, eos_ids, raw),
        start=int(numbers[start]),
    )


def behind_reasoning(automaton: TokenAutomaton, begins: int, ends: int) -> TokenAutomaton:
    """Return an automaton whose texts may have reasoning before them, by two more states.

    The start is as the automaton's, and allows the token `begins`, too. That leads to a state where nothing
    is barred, which the token `ends` leaves for the automaton's start. An answer may end within reasoning.
    """
    num_states, num_classes = automaton.next_state.shape
    start, free = num_states, num_states + 1
    token_class = automaton.token_class.copy()
    token_class[[begins, ends]] = num_classes, num_classes + 1  # classes of their own
    columns = automaton.token_class[[begins, ends]]
    old = np.concatenate([automaton.next_state, automaton.next_state[:, columns]], axis=1)
    rows = np.stack([old[automaton.start], np.full(num_classes + 2, free, old.dtype)])
    rows[0, num_classes], rows[1, num_classes + 1] = free, automaton.start
    first = automaton.allowed(automaton.start).copy()
    first[begins] = True
    num_masks = len(automaton.masks)
    return replace(
        automaton,
        token_class=token_class,
        next_state=np.concatenate([old, rows]),
        mask_of=np.append(automaton.mask_of, [num_masks, num_masks + 1]).astype(np.int32),
        masks=np.concatenate([automaton.masks, np.stack([first, np.ones_like(first)])]),
        accepting=np.append(automaton.accepting, [automaton.accepting[automaton.start], True]),
        forced=np.append(automaton.forced, [NOT_ALLOWED, NOT_ALLOWED]).astype(np.int32),
        start=start,
    )


def forced_tokens(
    masks: Bool[np.ndarray, "M V"], eos_ids: Sequence[int], raw: Sequence[bytes] = ()
) -> Int[np.ndarray, "M"]:
    """Return for each mask the longest token where all others are beginnings of it, `NOT_ALLOWED` elsewhere.

    There the text is forced, as in the name of a property. A model mostly writes it in the longest tokens.
    raw: the tokens' bytes; without them a token counts where it is the only one.
    """
    forced = np.full(len(masks), NOT_ALLOWED, np.int32)
    few = masks.sum(axis=1) <= (MOST_BEGINNINGS if raw else 1)
    few &= masks.any(axis=1) & ~masks[:, list(eos_ids)].any(axis=1)
    for line in np.flatnonzero(few).tolist():
        tokens = np.flatnonzero(masks[line]).tolist()
        longest = max(tokens, key=lambda token: len(raw[token])) if raw else tokens[0]
        if not raw or all(raw[longest].startswith(raw[token]) for token in tokens):
            forced[line] = longest
    return forced


def useful_states(steps: Int[np.ndarray, "S K"], accepting: Bool[np.ndarray, "S"], start: int) -> np.ndarray:
    """Return which states can be reached from the start and can reach an end: bool [S]."""
    num_states = len(steps)
    from_state, column = np.nonzero(steps >= 0)
    edges = np.unique(np.stack([from_state, steps[from_state, column]], axis=1), axis=0)
    reached = np.zeros(num_states, bool)
    reached[start] = True
    ending = accepting.copy()
    for marks, here, there in ((reached, 0, 1), (ending, 1, 0)):
        while True:
            new = edges[marks[edges[:, here]], there]
            if marks[new].all():
                break
            marks[new] = True
    return reached & ending
