"""Automata of structured outputs on the device: which tokens a row may choose, and where each leads.

All automata lie in one array of 32-bit words, the arena, each in a range of its own. An automaton has a
header, and behind it tables of 16-bit numbers, masks, and for each mask the token of a forced text. A row
knows where its automaton begins, and its state. Masks and moves are gathers at these places: rows with
different automata are one computation.

A grammar that the host follows has one state, a mask. Behind each token its row rests, and samples nothing,
until the host has written the next mask in its place.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxpaged.arithmetic import cdiv

# States of rows that are no states of their automata.
FREE = -1  # nothing is barred: the row has no automaton
WAITS = -2  # nothing is barred until the token that opens the constrained part
RESTS = -3  # nothing is sampled until the host has written the mask behind the last token
LOST = -4  # a token came that the automaton bars, as a sampler from outside may choose: the answer ends
# Words of a header: number of classes, the first state, and where each table begins behind the header.
NUM_CLASSES, START, CLASSES, NEXT, MASK_OF, MASKS = range(6)
BY_HOST = 6  # 1 where the host follows the grammar
FORCED = 7  # beginning of a table of whole words, as the others
HEADER = 8
MASK_BY_HOST = HEADER + 1  # word of the mask of a grammar that the host follows
NOWHERE = 2**16 - 1  # in place of a next state: there is none
# The arena is dealt out in blocks of so many words; the first block is no automaton's.
BLOCK_WORDS = 1024


@runtime_checkable
class Automaton(Protocol):
    """Protocol of an automaton over tokens, as the arena takes one in; NumPy arrays."""

    @property
    def token_class(self) -> np.ndarray: ...  # [vocab] class of each token
    @property
    def next_state(self) -> np.ndarray: ...  # [num_states, num_classes]; negative: none
    @property
    def mask_of(self) -> np.ndarray: ...  # [num_states] line of `masks`
    @property
    def masks(self) -> np.ndarray: ...  # bool [num_masks, vocab]
    @property
    def forced(self) -> np.ndarray: ...  # [num_masks] the token of a forced text; negative: none
    @property
    def start(self) -> int: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrammarRows:
    """Place of each row in its automaton."""

    first: Int[Array, " rows"]  # word of the arena at which its automaton begins; 0: it has none
    state: Int[Array, " rows"]  # state behind its tokens, or FREE, WAITS, RESTS or LOST
    opens: Int[Array, " rows"]  # token that ends the waiting


def no_grammars(num_rows: int) -> GrammarRows:
    """Return rows without automata, NumPy arrays."""
    zeros = np.zeros(num_rows, np.int32)
    return GrammarRows(zeros, zeros + FREE, zeros.copy())  # type: ignore[arg-type]


def masked(
    grammars: GrammarRows,
    arena: UInt32[Array, " words"],
    logits: Float[Array, "rows vocab"],
    row: Int[Array, " rows"],
    is_due: Bool[Array, " rows"],
) -> tuple[Float[Array, "rows vocab"], Bool[Array, " rows"]]:
    """Return logits without the tokens that the rows' automata bar. Those of other rows stay, to the bit.

    row: the line of `grammars` for each line of logits.

    Returns: the logits, and which lines follow an automaton now.
    """
    first, state = grammars.first[row], grammars.state[row]
    follows = is_due & (first > 0) & (state >= 0)

    def bar() -> Float[Array, "rows vocab"]:
        vocab = logits.shape[1]
        num_words = cdiv(vocab, 32)
        mask = _number(arena, first + _at(arena, first, MASK_OF), jnp.maximum(state, 0))
        place = first + _at(arena, first, MASKS) + mask * num_words
        words = jax.vmap(lambda place: lax.dynamic_slice(arena, (place,), (num_words,)))(place)
        # Bit b of word w is token b * num_words + w: so neighbouring tokens come from neighbouring words.
        bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)[:, None]) & 1
        allowed = bits.reshape(bits.shape[0], -1)[:, :vocab] != 0
        return jnp.where(allowed | ~follows[:, None], logits, -jnp.inf)

    return lax.cond(jnp.any(follows), bar, lambda: logits), follows


def not_empty(
    changed: Float[Array, "rows vocab"], before: Float[Array, "rows vocab"], follows: Bool[Array, " rows"]
) -> Float[Array, "rows vocab"]:
    """Return changed logits; those before the change where it has left an automaton's row no token."""
    is_empty = follows & (jnp.max(changed, axis=1) == -jnp.inf)
    return jnp.where(is_empty[:, None], before, changed)


def moved(
    grammars: GrammarRows,
    arena: UInt32[Array, " words"],
    token_ids: Int[Array, " rows"],
    moves: Bool[Array, " rows"],
) -> GrammarRows:
    """Return the rows behind one more token each, where they move."""
    first, state = grammars.first, grammars.state
    has_one = moves & (first > 0)
    follows, opens = has_one & (state >= 0), has_one & (state == WAITS) & (token_ids == grammars.opens)
    its_class = _number(arena, first + _at(arena, first, CLASSES), token_ids)
    cell = jnp.maximum(state, 0) * _at(arena, first, NUM_CLASSES) + its_class
    reached = _number(arena, first + _at(arena, first, NEXT), cell)
    state = jnp.where(follows, jnp.where(reached == NOWHERE, LOST, reached), state)
    state = jnp.where(opens, _at(arena, first, START), state)
    state = jnp.where((follows | opens) & by_host(grammars, arena), RESTS, state)
    return GrammarRows(first, state, grammars.opens)


def forced(
    grammars: GrammarRows, arena: UInt32[Array, " words"], max_tokens: int
) -> tuple[Int[Array, " rows"], Int[Array, "rows most"]]:
    """Return how many tokens of forced text come next in each row, at most `max_tokens`, and these tokens."""
    first = grammars.first
    table, mask_of = first + _at(arena, first, FORCED), first + _at(arena, first, MASK_OF)
    type Carry = tuple[GrammarRows, Bool[Array, " rows"]]

    def one_more(carry: Carry, _: None) -> tuple[Carry, tuple[Bool[Array, " rows"], Int[Array, " rows"]]]:
        here, goes_on = carry
        mask = _number(arena, mask_of, jnp.maximum(here.state, 0))
        token = arena.at[table + mask].get(mode="clip").astype(jnp.int32)
        goes_on &= (here.state >= 0) & (token >= 0)
        token = jnp.maximum(token, 0)
        return (moved(here, arena, token, goes_on), goes_on), (goes_on, token)

    start = grammars, (first > 0) & ~by_host(grammars, arena)
    _, (is_one, tokens) = lax.scan(one_more, start, None, length=max_tokens)
    return jnp.sum(is_one, axis=0, dtype=jnp.int32), tokens.T


def forced_in(
    grammars: GrammarRows, arena: UInt32[Array, " words"], room: Int[Array, " rows"], max_tokens: int
) -> tuple[Int[Array, " rows"], Int[Array, "rows most"]]:
    """Return the number of forced tokens of each row, at most `room` and `max_tokens`, and the tokens; 0 for
    rows without room.
    """
    follows = (room > 0) & (grammars.first > 0) & (grammars.state >= 0)

    def look() -> tuple[Int[Array, " rows"], Int[Array, "rows most"]]:
        num, tokens = forced(grammars, arena, max_tokens)
        return jnp.where(follows, jnp.minimum(num, room), 0), tokens

    nothing = jnp.zeros((room.shape[0], max_tokens), jnp.int32)
    return lax.cond(jnp.any(follows), look, lambda: (nothing[:, 0], nothing))


def by_host(grammars: GrammarRows, arena: UInt32[Array, " words"]) -> Bool[Array, " rows"]:
    """Return which rows have a grammar that the host follows."""
    return (grammars.first > 0) & (_at(arena, grammars.first, BY_HOST) > 0)


def _at(arena: UInt32[Array, " words"], first: Int[Array, " rows"], what: int) -> Int[Array, " rows"]:
    """Return a word of the rows' headers."""
    return arena.at[first + what].get(mode="clip").astype(jnp.int32)


def _number(
    arena: UInt32[Array, " words"], table: Int[Array, " rows"], index: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """Return an entry of the rows' tables of 16-bit numbers."""
    word = arena.at[table + index // 2].get(mode="clip")
    return ((word >> (16 * (index % 2)).astype(jnp.uint32)) & 0xFFFF).astype(jnp.int32)


def encoded(automaton: Automaton, vocab_size: int) -> np.ndarray | None:
    """Return an automaton as the arena has it: uint32, a multiple of BLOCK_WORDS.

    vocab_size: tokens that the model gives logits. Those beyond the automaton's are barred.

    Returns None if it has more states or classes than 16 bits can count.
    """
    next_state = np.asarray(automaton.next_state)
    num_states, num_classes = next_state.shape
    if num_states >= NOWHERE or num_classes >= NOWHERE:
        return None
    nowhere = num_classes  # one more class, for tokens that the automaton does not know
    token_class = np.full(vocab_size, nowhere, np.int64)
    known = np.asarray(automaton.token_class)[:vocab_size]
    token_class[: len(known)] = known
    reached = np.full((num_states, num_classes + 1), NOWHERE, np.int64)
    reached[:, :num_classes] = np.where(next_state < 0, NOWHERE, next_state)
    tables = [
        _halves(token_class),
        _halves(reached.reshape(-1)),
        _halves(np.asarray(automaton.mask_of)),
        _words(automaton.masks[:, :vocab_size], vocab_size).reshape(-1),
        np.asarray(automaton.forced).astype("<i4").view("<u4"),
    ]
    places = HEADER + np.cumsum([0, *map(len, tables)])
    header = np.zeros(HEADER, np.uint32)
    header[[NUM_CLASSES, START, CLASSES, NEXT, MASK_OF, MASKS, FORCED]] = (
        *(num_classes + 1, automaton.start),
        *places[:-1],
    )
    words = np.concatenate([header, *tables])
    return np.pad(words, (0, -len(words) % BLOCK_WORDS))


def encoded_for_host(vocab_size: int) -> np.ndarray:
    """Return a grammar that the host follows as the arena has it: one state, whose mask is to be written."""
    words = np.zeros(MASK_BY_HOST + cdiv(vocab_size, 32), np.uint32)
    words[[MASK_OF, MASKS, BY_HOST]] = HEADER, MASK_BY_HOST, 1
    return np.pad(words, (0, -len(words) % BLOCK_WORDS))


def mask_words(allowed: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return a mask, bool [vocab or less], as the arena has it. Tokens that it does not have are barred."""
    return _words(allowed[None, :vocab_size], vocab_size)[0]


def _halves(numbers: np.ndarray) -> np.ndarray:
    """Return 16-bit numbers, two a word, the first in the lower half."""
    return np.pad(numbers.astype("<u2"), (0, len(numbers) % 2)).view("<u4")


def _words(masks: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return masks as words: bit b of word w is token b * num_words + w. uint32 [num_masks, num_words].

    Tokens that a mask does not have are barred.
    """
    num_words = cdiv(vocab_size, 32)
    bits = np.pad(masks, ((0, 0), (0, 32 * num_words - masks.shape[1]))).reshape(-1, 32, num_words)
    # Contiguous first: packing bits that lie apart takes four times as long.
    octets = np.packbits(np.ascontiguousarray(bits.swapaxes(1, 2)), axis=2, bitorder="little")
    return octets.view("<u4")[:, :, 0].astype(np.uint32)


def state_behind(automaton: Any, token_ids: list[int], opens: int | None = None) -> int:
    """Return the state of a row behind tokens of an answer: an automaton's, LOST or WAITS.

    opens: the token behind which the automaton begins; None: at the answer's beginning.
    """
    state = int(automaton.start) if opens is None else WAITS
    classes, next_state = np.asarray(automaton.token_class), np.asarray(automaton.next_state)
    for token in token_ids:
        if state == WAITS:
            state = int(automaton.start) if token == opens else WAITS
        elif state >= 0:
            reached = int(next_state[state, classes[token]]) if token < len(classes) else LOST
            state = reached if reached >= 0 else LOST
    return state
