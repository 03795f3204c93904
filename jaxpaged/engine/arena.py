"""Automata of structured outputs as the engine holds them: in the host's memory, and in the device's arena.

The arena has a fixed size. An automaton takes neighbouring blocks of it when the first request with it gets
a row, and keeps them while any request with it has a row; then until others need them. A request whose
automaton finds no room waits in the queue, and those without one overtake it.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from jaxpaged.engine.by_host import Follower, Language, is_awaited
from jaxpaged.step.automata import BLOCK_WORDS, FREE, LOST, RESTS, WAITS, state_behind
from jaxpaged.structured_outputs import StructuredOutputsParams


@dataclasses.dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled constraint: a new object each time.

    One that the host follows has places in the arena for each request, and not for all together.
    """

    automaton: Any  # `step.automata.Automaton`; None where the host follows the grammar
    words: np.ndarray  # the automaton as the arena has it
    language: Language | None = None  # what the host follows
    num_places: int = 1  # of equal size: one for each beam of a search that the host follows
    begins: int | None = None  # token that begins reasoning before it, where an answer has any

    @property
    def num_blocks(self) -> int:
        """Blocks that it takes in the arena."""
        return len(self.words) // BLOCK_WORDS

    def opens(self, params: StructuredOutputsParams) -> int | None:
        """Return the token that a row waits for before it; None where its automaton has the reasoning."""
        return None if self.begins is not None and self.language is None else params.after_token_id

    def for_one(self) -> "Grammar":
        """Return the grammar of one request."""
        return self.for_search(1)

    def for_search(self, width: int) -> "Grammar":
        """Return the grammar of so many beams of one search."""
        if self.language is None:
            return self
        return dataclasses.replace(self, words=np.tile(self.words, width), num_places=width)

    def follower(self, opens: int | None, *, is_beam: bool = False) -> Follower | None:
        """Return the host's follower of an answer that begins; None if the device follows it."""
        if self.language is None:
            return None
        return Follower(self.language, opens, begins=self.begins, is_beam=is_beam)

    def problem(self, answer: list[int], opens: int | None) -> str | None:
        """Return why an answer cannot go on from these tokens; None if it can. For any thread."""
        if self.language is None:
            is_lost = state_behind(self.automaton, answer, opens) == LOST
            return "it has a token that they bar" if is_lost else None
        follower = Follower(self.language, opens, begins=self.begins)
        follower.due(answer)
        return follower.problem

    def chunks(self, size: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield its blocks, `size` at a time, [size, BLOCK_WORDS], and how many of them are its own."""
        blocks = self.words.reshape(-1, BLOCK_WORDS)
        for i in range(0, len(blocks), size):
            chunk = blocks[i : i + size]
            yield np.pad(chunk, ((0, size - len(chunk)), (0, 0))), len(chunk)


class Arena:
    """The device's arena, and which grammar lies where. For one thread.

    num_words: words of the arena; the first block is nobody's.
    """

    def __init__(self, num_words: int) -> None:
        self._num_blocks = num_words // BLOCK_WORDS
        # First block of each grammar, the longest unused first.
        self._first: collections.OrderedDict[Grammar, int] = collections.OrderedDict()

    def row_values(
        self, grammar: Grammar | None, answer: list[int], opens: int | None = None, index: int = 0
    ) -> dict[str, int]:
        """Return what `GrammarRows` holds of a request of whose answer so much is known.

        opens: the token behind which the grammar begins; None: at the answer's beginning.
        index: number of the answer, or of the beam.
        """
        if grammar is None:
            return {"first": 0, "state": FREE, "opens": 0}
        if grammar.language is not None:  # its mask will be written
            state = WAITS if is_awaited(opens, grammar.begins, answer) and opens not in answer else RESTS
        else:
            state = state_behind(grammar.automaton, answer, opens)
        first = self.first_word(grammar, index)
        return {"first": first, "state": state, "opens": opens if opens is not None else WAITS}

    def first_word(self, grammar: Grammar, index: int = 0) -> int:
        """Return the word at which a grammar begins, which has places, for one of its beams."""
        size = len(grammar.words) // grammar.num_places
        return self._first[grammar] * BLOCK_WORDS + index % grammar.num_places * size

    def has_room(self, grammar: Grammar, in_use: Collection[Grammar | None]) -> bool:
        """Check whether `find` would give the grammar a place."""
        staying = {placed: first for placed, first in self._first.items() if placed in in_use}
        return grammar in self._first or self._gap(grammar.num_blocks, staying) is not None

    def find(self, grammar: Grammar, in_use: Collection[Grammar | None]) -> tuple[int | None, bool]:
        """Give a grammar a place if it has none: in the first gap, or where the longest unused ones were.

        Returns: its first word, None if there is no room; and whether it has to be written there.
        """
        if grammar in self._first:
            self._first.move_to_end(grammar)
            return self.first_word(grammar), False
        # Those of requests that have ended are of no use to others.
        for placed in [
            placed for placed in self._first if placed.language is not None and placed not in in_use
        ]:
            del self._first[placed]
        if not self.has_room(grammar, in_use):
            return None, False
        unused = iter([placed for placed in self._first if placed not in in_use])
        while (place := self._gap(grammar.num_blocks, self._first)) is None:
            del self._first[next(unused)]
        self._first[grammar] = place
        return place * BLOCK_WORDS, True

    def _gap(self, num_blocks: int, taken: dict[Grammar, int]) -> int | None:
        """Return the first block behind which so many are free; None if there is none."""
        place = 1
        for grammar, first in sorted(taken.items(), key=lambda item: item[1]):
            if first - place >= num_blocks:
                return place
            place = first + grammar.num_blocks
        return place if self._num_blocks - place >= num_blocks else None
