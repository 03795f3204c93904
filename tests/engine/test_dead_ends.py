"""Options that leave no token to choose, against a look at all answers one by one."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.engine.dead_ends import dead_end

TOKENS = st.integers(0, 2)


def first_stuck(allowed, words, stops, min_tokens, max_tokens):
    """Return the length of the shortest answer that cannot go on, found token by token from the empty one."""
    answers = [()]
    for length in range(max_tokens):
        nexts = []
        for answer in answers:
            may = [
                token
                for token in allowed
                if not (token in stops and length < min_tokens)
                and not any((*answer, token)[-len(word) :] == tuple(word) for word in words)
            ]
            if not may:
                return length
            nexts += [(*answer, token) for token in may if token not in stops]
        answers = nexts
    return None


@settings(max_examples=400, deadline=None)
@given(
    allowed=st.sets(TOKENS, min_size=1),
    words=st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=6),
    stops=st.sets(TOKENS, max_size=2),
    min_tokens=st.integers(0, 3),
    max_tokens=st.integers(1, 5),
)
def test_a_dead_end_is_found_where_an_answer_can_come_to_one(allowed, words, stops, min_tokens, max_tokens):
    found = dead_end(allowed, words, stops, min(min_tokens, max_tokens), max_tokens)
    want = first_stuck(allowed, words, stops, min(min_tokens, max_tokens), max_tokens)
    assert (None if found is None else len(found)) == want


def test_words_that_leave_a_way_out_are_no_dead_end():
    assert dead_end([1, 2], [[1, 1], [2, 2]], [], 0, None) is None
    assert dead_end([1, 2], [[1, 1], [1, 2]], [], 0, None) == (1,)
    assert dead_end(range(3), [list(pair) for pair in itertools.permutations(range(3), 2)], [], 0, 9) is None
