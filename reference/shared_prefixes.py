"""Plan of decode rows that share the K and V of their first tokens, and what it reads.

Block tables that begin with the same block ids name the same memory. So a prefix is read once for all rows
behind it. A part is a set of rows that are computed together, in pieces: a range of tokens, and the rows that
read it together. Pieces of a row are in the order of its tokens, and hold each of them once. So a row's sums
have their order, and their bits, whoever else is in the part.

Pieces that rows share begin at multiples of UNIT tokens. A piece, and a part, must save `least_saved` tokens,
and a part a share of what its rows read alone (`pays`); with least_saved = 0 whatever is saved counts.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np

UNIT = 32  # tokens


class Piece(NamedTuple):
    """Tokens [begin, end) that these rows read together."""

    rows: frozenset[int]
    begin: int
    end: int


class Rows(NamedTuple):
    """Rows that may share tokens.

    tables: [num_rows, max_blocks] block ids. shared: [num_rows] tokens that all queries of a row see, which
    rows may share. tokens: [num_rows] tokens that a row sees in all.
    """

    tables: np.ndarray
    shared: np.ndarray
    tokens: np.ndarray
    block_size: int

    def prefix(self, row: int, num_tokens: int) -> tuple[int, ...]:
        """Return the ids of the blocks that hold a row's first tokens."""
        return tuple(self.tables[row, : -(-num_tokens // self.block_size)].tolist())


def plan(rows: Rows, num_query_rows: int, least_saved: int) -> list[list[Piece]]:
    """Return the parts, each as its pieces. Rows in no part read their tokens alone.

    num_query_rows: query heads of one KV head, times the row's queries.
    """
    return _divide(rows, frozenset(range(len(rows.shared))), num_query_rows, least_saved)


def pays(saved: int, alone: int, num_query_rows: int, least_saved: int) -> bool:
    """Return whether `alone` tokens are read enough fewer: a third, half or seven eighths of them."""
    if least_saved == 0:
        return saved > 0
    share = {1: 1 / 3, 2: 1 / 2}.get(num_query_rows, 7 / 8)
    return saved >= least_saved and saved >= share * alone - 1e-6


def tokens_read(pieces: list[Piece]) -> int:
    """Return how many tokens pieces read, each of them once for all of its rows."""
    return sum(piece.end - piece.begin for piece in pieces)


def _divide(rows: Rows, some: frozenset[int], num_query_rows: int, least_saved: int) -> list[list[Piece]]:
    """Return one part of all rows, if that pays, else the parts of those that have more in common."""
    if len(some) < 2:
        return []
    common = _common(rows, some)
    if common > 0:
        pieces = _pieces(rows, some, 0, max(least_saved, 1))
        alone = sum(int(rows.tokens[row]) for row in some)
        if pays(alone - tokens_read(pieces), alone, num_query_rows, least_saved):
            return [pieces]
    return [
        part
        for branch in _branches(rows, some, common)
        for part in _divide(rows, branch, num_query_rows, least_saved)
    ]


def _pieces(rows: Rows, some: frozenset[int], begin: int, least: int) -> list[Piece]:
    """Return the pieces of rows that are computed together, from a token on."""
    if len(some) == 1:
        (row,) = some
        end = int(rows.tokens[row])
        return [Piece(some, begin, end)] if begin < end else []
    common, pieces = _common(rows, some), []
    if (common - begin) * (len(some) - 1) >= least:
        pieces, begin = [Piece(some, begin, common)], common
    return pieces + [
        piece for branch in _branches(rows, some, common) for piece in _pieces(rows, branch, begin, least)
    ]


def _common(rows: Rows, some: frozenset[int]) -> int:
    """Return how many tokens, in whole units, all of these rows have in common."""
    longest = int(min(rows.shared[list(some)]))
    counts = range(UNIT, longest + 1, UNIT)
    return max((n for n in counts if len({rows.prefix(row, n) for row in some}) == 1), default=0)


def _branches(rows: Rows, some: frozenset[int], common: int) -> list[frozenset[int]]:
    """Return the sets of rows that have a unit more in common."""
    sets = defaultdict(set)
    for row in some:
        longer = common + UNIT <= rows.shared[row]
        sets[rows.prefix(row, common + UNIT) if longer else row].add(row)
    return [frozenset(branch) for branch in sets.values()]
