"""Nodes as the oracle's languages, vocabularies for tests, and walks that compare tables with the oracle."""

import functools

import numpy as np

from jaxpaged.grammar.automaton import NOT_ALLOWED
from jaxpaged.grammar.machine import byte_machine
from jaxpaged.grammar.nodes import (
    Both,
    Chars,
    Distinct,
    Either,
    Limits,
    Members,
    Minus,
    Multiples,
    Repeat,
    Then,
)
from jaxpaged.grammar.tables import token_automaton
from jaxpaged.grammar.vocabulary import TokenBytes
from reference import grammar as oracle

EOS = (0, 3)
PIECES = [
    *(
        '{"',
        '":',
        '": ',
        '", "',
        '"}',
        "[]",
        "], [",
        "null",
        "true",
        "fal",
        "se",
        "12",
        "00",
        "-1",
        ".5",
        "e+",
    ),
    *(
        "ab",
        "abc",
        "aba",
        "bb",
        "  ",
        "\n",
        "é",
        "漢字",
        "🙂",
        "\\u",
        "\\n",
        '\\"',
        "name",
        "id",
        "202",
        "-0",
    ),
]
# Bytes alone, pieces, parts of characters, and ids that are never allowed.
VOCABULARY = TokenBytes(
    (
        *(b"", b"", b"x\xff", b"</s>"),
        *(bytes([i]) for i in range(256)),
        *(piece.encode() for piece in PIECES),
        *("é".encode()[1:] + b'"', "漢".encode()[:2], "漢".encode()[2:] + b"a", b"a\xf0\x9f", b"ab", b""),
    ),
    EOS,
)


def language(node) -> oracle.Language:
    """Return a node's texts as a language of the oracle."""
    match node:
        case Chars(ranges):
            return oracle.chars(*ranges)
        case Then(parts):
            return oracle.sequence(map(language, parts))
        case Either(parts):
            return oracle.either(map(language, parts))
        case Repeat(part, least, most):
            return oracle.repeat(language(part), least, most)
        case Both(parts):
            return functools.reduce(oracle.both, map(language, parts))
        case Minus(part, other):
            return oracle.minus(language(part), language(other))
        case Multiples(modulus, places, is_whole):
            return oracle.multiple(modulus, places, is_whole)
        case Distinct(parts, comma, least, most):
            return distinct(list(map(language, parts)), language(comma), least, most)
        case Members(parts, comma, rest, least, most):
            its = [(language(part), must) for part, must in parts]
            return members(its, language(comma), rest, least, most)


def distinct(parts, comma, least, most, count=0) -> oracle.Language:
    """Return parts in every order, each once at most, spelled out."""
    ways = [oracle.EMPTY] if count >= least else []
    for i, part in enumerate(parts if count < most else []):
        behind = distinct(parts[:i] + parts[i + 1 :], comma, least, most, count + 1)
        there = oracle.then(part, behind)
        ways.append(oracle.then(comma, there) if count else there)
    return oracle.either(ways)


def members(parts, comma, rest, least=0, most=None, count=0) -> oracle.Language:
    """Return members from here on, spelled out: each there, behind a comma if not the first, or not."""
    if not parts:
        left = max(least - count, 0)
        if rest is None:
            return oracle.NONE if left else oracle.EMPTY
        if most == count:
            return oracle.EMPTY
        its, spare = language(rest), None if most is None else most - count
        if count:
            return oracle.repeat(oracle.then(comma, its), left, spare)
        others = oracle.repeat(oracle.then(comma, its), max(left - 1, 0), spare and spare - 1)
        there = oracle.then(its, others)
        return there if left else oracle.either([oracle.EMPTY, there])
    (part, is_required), *others = parts
    there = oracle.NONE
    if most is None or count < most:
        there = oracle.then(part, members(others, comma, rest, least, most, count + 1))
        there = oracle.then(comma, there) if count else there
    without = oracle.NONE if is_required else members(others, comma, rest, least, most, count)
    return oracle.either([there, without])


def automaton(node, tokens=VOCABULARY, limits=Limits()):  # noqa: B008
    return token_automaton(byte_machine(node, limits), tokens, limits)


def compare(made, whole, tokens=VOCABULARY, *, num_walks=4, length=40, seed=0) -> None:
    """Walk at random and compare at each state: exactly what begins a text of the language is allowed."""
    rng = np.random.default_rng(seed)
    states, alike = {}, {}
    for _ in range(num_walks):
        state, left = made.start, whole
        for _ in range(length):
            allowed = np.flatnonzero(made.allowed(state))
            if left not in states:
                states[left] = oracle.allowed_tokens(left, tokens.raw, tokens.eos_ids)
            assert set(allowed.tolist()) == states[left], f"{alike.get(state)} and {left}"
            assert made.accepting[state] == oracle.accepts_nothing_more(left)
            ends = [token for token in allowed if token in tokens.eos_ids]
            assert all(made.step(state, token) == state for token in ends)
            going = [token for token in allowed if token not in tokens.eos_ids]
            if not going:
                break
            token = int(rng.choice(going))
            state, left = made.step(state, token), oracle.after_all(left, tokens.raw[token])
            assert state != NOT_ALLOWED


def write(made, tokens, rng, most=400) -> str | None:
    """Write a text by allowed tokens, each as likely; None if it does not end."""
    state, raw = made.start, b""
    for i in range(most):
        allowed = np.flatnonzero(made.allowed(state))
        ends = [token for token in allowed if token in tokens.eos_ids]
        if ends and (len(ends) == len(allowed) or rng.random() < 0.2 + i / most):
            return raw.decode()
        token = int(rng.choice([token for token in allowed if token not in tokens.eos_ids]))
        raw += tokens.raw[token]
        state = made.step(state, token)
    return None


def accepts(made, tokens, text: str) -> bool:
    """Return whether an answer may be this text, written a byte at a time."""
    by_raw = {raw: token for token, raw in enumerate(tokens.raw) if len(raw) == 1}
    state = made.start
    for byte in text.encode():
        state = made.step(state, by_raw[bytes([byte])])
        if state == NOT_ALLOWED:
            return False
    return bool(made.accepting[state])
