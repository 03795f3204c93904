"""Reduction of a failing history: fewer steps, fewer pairs of steps, smaller arguments, to a fixpoint."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxpaged.research.verify.history import MAX_SEQS

Line = tuple[str, list[Any]]
MAX_PAIRED = 24  # of more steps no pairs are tried
MAX_JOINED = 6  # appends of which two are tried as one
# Verbs whose only argument names rows or blocks, of which some may be left out; touch and evict name one.
NAMING = {"free": 0, "free_host": 0, "swap_out": 0, "swap_in": 0, "touch": 1, "evict": 1}


def reduced(lines: list[Line], fails: Callable[[list[Line]], bool], until: float) -> list[Line]:
    """Return a failing history from which nothing more can be left out.

    It still fails. It would not without any one of its steps, without any two, with two appends made one, or
    with one argument smaller. What was tried until the time `until` of the monotonic clock counts.
    """
    known: dict[str, bool] = {}

    def still_fails(candidate: list[Line]) -> bool:
        key = json.dumps(candidate)
        if key not in known and time.monotonic() < until:
            known[key] = fails(candidate)
        return known.get(key, False)

    last = None
    while lines != last:
        last = lines
        lines = _without_runs(lines, still_fails)
        for simpler in (_without_two, _with_admitted_appended, _with_two_as_one, _with_less):
            lines = _to_fixpoint(lines, simpler, still_fails)
    return lines


def _without_runs(lines: list[Line], fails: Callable[[list[Line]], bool]) -> list[Line]:
    """Leave out runs of steps: halves first, single steps last, these to a fixpoint."""
    size = max(len(lines) // 2, 1)
    while True:
        before, start = len(lines), 0
        while start < len(lines):
            candidate = lines[:start] + lines[start + size :]
            if fails(candidate):
                lines = candidate
            else:
                start += size
        if size == 1 and len(lines) == before:
            return lines
        size = max(size // 2, 1)


def _to_fixpoint(
    lines: list[Line],
    simpler: Callable[[list[Line]], Iterator[list[Line]]],
    fails: Callable[[list[Line]], bool],
) -> list[Line]:
    """Take the first simpler history that fails, again and again."""
    while (failing := next(filter(fails, simpler(lines)), None)) is not None:
        lines = failing
    return lines


def _without_two(lines: list[Line]) -> Iterator[list[Line]]:
    if len(lines) <= MAX_PAIRED:
        for a, b in itertools.combinations(range(len(lines)), 2):
            yield lines[:a] + lines[a + 1 : b] + lines[b + 1 :]


def _with_admitted_appended(lines: list[Line]) -> Iterator[list[Line]]:
    """Yield histories in which a prompt is not looked up, but appended."""
    for place, (verb, args) in enumerate(lines):
        if verb == "admit":
            numbers = [len(args[1]) * (row == args[0]) for row in range(MAX_SEQS)]
            yield [*lines[:place], ("append", [numbers, 0]), *lines[place + 1 :]]


def _with_two_as_one(lines: list[Line]) -> Iterator[list[Line]]:
    """Yield histories in which a step appends what two did, in the place of the first or the second.

    A step serves its rows in order, so that they are renamed in all ways, too.
    """
    places = [place for place, (verb, _) in enumerate(lines) if verb == "append"][:MAX_JOINED]
    orders = list(itertools.permutations(range(MAX_SEQS))) if len(places) > 1 else []
    for order in orders:
        renamed = [(verb, _renamed(verb, args, order)) for verb, args in lines]
        for a, b in itertools.combinations(places, 2):
            numbers = [x + y for x, y in zip(renamed[a][1][0], renamed[b][1][0], strict=True)]
            both: Line = ("append", [numbers, renamed[b][1][1]])
            yield [*renamed[:a], both, *renamed[a + 1 : b], *renamed[b + 1 :]]
            yield [*renamed[:a], *renamed[a + 1 : b], both, *renamed[b + 1 :]]


def _renamed(verb: str, args: list[Any], order: Sequence[int]) -> list[Any]:
    """Return a verb's arguments with row i called `order[i]`."""
    if verb in ("append", "truncate", "window", "commit"):
        return [[args[0][order.index(row)] for row in range(MAX_SEQS)], *args[1:]]
    if verb in ("free", "free_host", "swap_out", "swap_in"):
        return [sorted(order[row] for row in args[0])]
    if verb == "fork":
        return [[order[row] for row in rows] for rows in args]
    return [order[args[0]], *args[1:]] if verb in ("admit", "free_twice") else args


def _with_less(lines: list[Line]) -> Iterator[list[Line]]:
    for place, (verb, args) in enumerate(lines):
        for smaller in _smaller(verb, args):
            yield [*lines[:place], (verb, smaller), *lines[place + 1 :]]


def _smaller(verb: str, args: list[Any]) -> Iterator[list[Any]]:
    """Yield a verb's arguments with one of them smaller."""
    if verb in NAMING:
        yield from ([rest] for rest in _without_one(args[0]) if len(rest) >= NAMING[verb])
    elif verb == "fork":
        pairs = list(zip(*args, strict=True))
        yield from (list(map(list, zip(*rest, strict=True))) for rest in _without_one(pairs) if rest)
    elif verb == "admit":
        yield from ([args[0], rest, *args[2:]] for rest in _without_one(args[1]) if rest)
    for place, arg in enumerate(args):
        for smaller in _numbers(arg):
            yield [*args[:place], smaller, *args[place + 1 :]]


def _without_one(values: list[Any]) -> Iterator[list[Any]]:
    for place in reversed(range(len(values))):
        yield values[:place] + values[place + 1 :]


def _numbers(arg: Any) -> Iterator[Any]:
    """Yield an argument with one of its numbers smaller, the smallest first."""
    if isinstance(arg, list):
        for place, each in enumerate(arg):
            for smaller in _numbers(each):
                yield [*arg[:place], smaller, *arg[place + 1 :]]
    elif arg > 0:
        yield from sorted({0, 1, arg // 2, arg - 1} - {arg})
