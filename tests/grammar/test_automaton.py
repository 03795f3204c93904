"""Token automata: tables made small, and nothing left in them that leads nowhere."""

import numpy as np

from jaxpaged.grammar.automaton import NOT_ALLOWED, automaton_of
from reference import grammar as oracle

RAW = [
    b"",
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"c",
    b"abc",
    b"x",
    b"",
]  # the first is end of sequence, the last no text
EOS = [0]


def trie(texts):
    """Return steps [S, V] and accepting [S] of a choice, a state for each beginning of a text."""
    prefixes = sorted({text[:i] for text in texts for i in range(len(text) + 1)})
    steps = np.full((len(prefixes), len(RAW)), NOT_ALLOWED)
    for state, prefix in enumerate(prefixes):
        for token, raw in enumerate(RAW):
            if raw and prefix + raw in prefixes:
                steps[state, token] = prefixes.index(prefix + raw)
    return steps, np.array([prefix in texts for prefix in prefixes])


def followed(automaton, language):
    """Compare every state that can be reached with the oracle; return how many there are."""
    seen, waiting = set(), [(automaton.start, language)]
    while waiting:
        state, left = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        allowed = np.flatnonzero(automaton.allowed(state)).tolist()
        assert set(allowed) == oracle.allowed_tokens(left, RAW, EOS)
        assert allowed == [t for t in range(len(RAW)) if automaton.step(state, t) != NOT_ALLOWED]
        assert automaton.accepting[state] == oracle.accepts_nothing_more(left)
        waiting += [(automaton.step(state, t), oracle.after_all(left, RAW[t])) for t in allowed if t != 0]
    return len(seen)


def test_a_choice_allows_what_the_oracle_allows():
    texts = [b"ab", b"abab", b"abc", b"ba"]
    automaton = automaton_of(trie(texts)[0], np.arange(len(RAW)), trie(texts)[1], EOS)
    language = oracle.either(oracle.text(text.decode()) for text in texts)
    assert followed(automaton, language) == automaton.num_states
    assert automaton.next_state.shape[1] == len(RAW) - 1  # tokens that never may come are one class
    assert all(automaton.step(s, 0) == (s if automaton.accepting[s] else -1) for s in range(8))


def test_what_no_token_can_end_is_left_out():
    """No token writes the "d" that "ad" ends with, so "a" must not be written."""
    steps, accepting = trie([b"ad", b"b"])
    automaton = automaton_of(steps, np.arange(len(RAW)), accepting, EOS)
    assert np.flatnonzero(automaton.allowed(automaton.start)).tolist() == [2]
    assert automaton.num_states == 2
    steps, accepting = trie([b"ad"])
    assert automaton_of(steps, np.arange(len(RAW)), accepting, EOS) is None


def test_a_text_is_forced_where_all_tokens_are_beginnings_of_one():
    """Behind "abc", which may be the end or go on, nothing is forced, nor where two texts begin."""
    steps, accepting = trie([b"abc", b"abca"])
    automaton = automaton_of(steps, np.arange(len(RAW)), accepting, EOS, raw=RAW)
    state, tokens = automaton.start, []
    while (token := automaton.forced[automaton.mask_of[state]]) != NOT_ALLOWED:
        tokens.append(RAW[token])
        state = automaton.step(state, int(token))
    assert tokens == [b"abc"]  # "a" may come behind it, or the end
    steps, accepting = trie([b"abc", b"ba"])
    automaton = automaton_of(steps, np.arange(len(RAW)), accepting, EOS, raw=RAW)
    assert automaton.forced[automaton.mask_of[automaton.start]] == NOT_ALLOWED
    assert automaton.forced[automaton.mask_of[automaton.step(automaton.start, 3)]] == 5
    only = automaton_of(steps, np.arange(len(RAW)), accepting, EOS)
    assert sorted({*only.forced.tolist()}) == [NOT_ALLOWED, 1, 2, 5]  # without bytes, the only tokens


def test_nothing_is_forced_where_nothing_may_come():
    """A vocabulary without an end: behind a whole text no token is left."""
    steps, accepting = trie([b"abc"])
    for raw in ((), RAW):
        automaton = automaton_of(steps, np.arange(len(RAW)), accepting, (), raw=raw)
        last = automaton.step(automaton.start, RAW.index(b"abc"))
        assert not automaton.allowed(last).any()
        assert automaton.forced[automaton.mask_of[last]] == NOT_ALLOWED


def test_the_oracle_knows_utf8():
    language = oracle.chars((0x7F, 0x10FFFF))
    for point in (0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF):
        assert oracle.after_all(language, chr(point).encode()) == oracle.EMPTY
    for raw in (b"\x7e", b"\xc1\x80", b"\xe0\x80", b"\xed\xa0", b"\xf4\x90", b"\x80", b"\xff"):
        assert oracle.after_all(language, raw) == oracle.NONE
    assert oracle.after_all(oracle.chars((0xE9, 0xE9)), b"\xc3\xa8") == oracle.NONE
