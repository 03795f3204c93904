"""Recursive grammars that the host follows: the next mask of each row, behind the tokens that were read."""

import copy
from collections.abc import Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np

from jaxpaged.arithmetic import cdiv
from jaxpaged.grammar.nodes import LostError
from jaxpaged.step.automata import MASK_BY_HOST, WAITS, mask_words

MASK_LINES = 8  # masks written in one dispatch


class Place(Protocol):
    """Place of an answer in a grammar, as `jaxpaged.grammar.recursive.Matcher` is one. May raise
    `LostError`.
    """

    def advance(self, token: int) -> bool: ...
    def allowed(self) -> np.ndarray: ...
    def copy(self) -> Self: ...


class Language(Protocol):
    """Recursive grammar, as `jaxpaged.grammar.recursive.Language` is one."""

    def matcher(self) -> Place: ...


class Follower:
    """Follower of one answer in its row. For one thread.

    opens: the token behind which the grammar begins; None: at the answer's beginning.
    begins: the token that `opens` is waited for behind, where an answer begins with it; one that does not
        begins with the grammar. None: `opens` is waited for in any case.
    is_beam: the answer is a beam's. Its row rests behind every token, for the beams of a search go on
        together: where nothing is barred, too.

    problem: why the grammar cannot be followed any further; None while it can. The answer must end then, for
        no token of it may come unconstrained.
    """

    def __init__(
        self, language: Language, opens: int | None, *, begins: int | None = None, is_beam: bool = False
    ) -> None:
        self._language, self._opens, self._begins, self._is_beam = language, opens, begins, is_beam
        self._place: Place | None = None
        self._is_dead = False  # a beam that broke the grammar, and so ends without an answer
        self._num_read = 0  # tokens of the answer
        self._num_told = -1  # tokens that the last mask was behind
        self.problem: str | None = None

    def copy(self) -> Self:
        """Return the follower of another answer that is the same so far."""
        made = copy.copy(self)
        made._place = None if self._place is None else self._place.copy()
        return made

    def due(self, answer: Sequence[int]) -> tuple[int, np.ndarray | None] | None:
        """Return the state that the row is to get behind its answer, and its mask, None if nothing is barred.

        None: nothing has come since the last time, the grammar has not begun and the row knows that, or there
        is a problem.
        """
        if self.problem is not None:
            return None
        try:
            return self._due(answer)
        except LostError as error:
            self.problem = str(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust code is no `Exception`
            self.problem = f"its parser raised {type(error).__name__}: {error}"
        return None

    def _due(self, answer: Sequence[int]) -> tuple[int, np.ndarray | None] | None:
        if self._place is None and not self._num_read and not is_awaited(self._opens, self._begins, answer):
            self._place = self._language.matcher()
        for place, token in enumerate(answer[self._num_read :], self._num_read):
            if place == 0 and token == self._begins:
                self._place = None
            elif self._place is None:
                self._place = self._language.matcher() if token == self._opens else None
            elif not self._is_dead and not self._place.advance(token):
                if not self._is_beam:
                    raise LostError(f"the token {token} came, which it bars")
                self._is_dead = True
        self._num_read = len(answer)
        if self._num_told == self._num_read:
            return None
        if self._place is not None and not self._is_dead:
            allowed = self._place.allowed()
            if not allowed.any():
                raise LostError("it is complete, and the model has no token that ends an answer")
            if self._begins is not None and not answer:
                allowed[self._begins] = True
            due: tuple[int, np.ndarray | None] = 0, allowed
        elif self._is_beam:
            due = 0, None
        elif self._begins is not None and len(answer) == 1:  # the row rests behind the token
            due = WAITS, None
        else:
            return None
        self._num_told = self._num_read
        return due


def is_awaited(opens: int | None, begins: int | None, answer: Sequence[int]) -> bool:
    """Check whether an answer's first token, if it is known, lets its grammar begin behind `opens` only."""
    return opens is not None and (begins is None or (len(answer) > 0 and answer[0] == begins))


class Line(NamedTuple):
    """Line of what is written: the next mask of a row."""

    row: int
    first: int  # word of the arena at which its grammar begins
    state: int  # of the row from then on
    allowed: np.ndarray | None  # bool [vocab]; None: nothing is barred


def mask_arrays(
    lines: Sequence[Line], num_rows: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return at most MASK_LINES lines as `loop.write_masks` takes them: masks, their words, rows and
    states.
    """
    masks = np.full((MASK_LINES, cdiv(vocab_size, 32)), 2**32 - 1, np.uint32)
    firsts = np.zeros(MASK_LINES, np.int32)
    rows = np.full((2, MASK_LINES), num_rows, np.int32)  # beyond all
    for i, line in enumerate(lines):
        firsts[i], rows[:, i] = line.first + MASK_BY_HOST, (line.row, line.state)
        if line.allowed is not None:
            masks[i] = mask_words(line.allowed, vocab_size)
    return masks, firsts, rows
