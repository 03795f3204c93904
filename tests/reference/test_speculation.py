"""Drafts by what mostly followed, in examples worked out by hand."""

import dataclasses

import pytest

from reference.speculation import (
    AT_FIRST,
    MOST_OCCURRENCES,
    MOST_SAVED,
    PARTS,
    ByModel,
    Credit,
    DraftCost,
    Drafting,
    Past,
    SuffixLookup,
    likely_followers,
)

LOOKUP = SuffixLookup(most=4, depth=7, factor=1.0, min_prob=0.1)


def test_a_longer_end_gives_more_drafts():
    assert likely_followers([1, 2, 3, 4, 5, 9, 3], LOOKUP) == [4]
    assert likely_followers([1, 2, 3, 4, 5, 9, 2, 3], LOOKUP) == [4, 5]
    assert likely_followers([1, 2, 3, 4, 5, 9, 1, 2, 3], LOOKUP) == [4, 5, 9]
    double = dataclasses.replace(LOOKUP, factor=2.0)
    assert likely_followers([1, 2, 3, 4, 5, 9, 1, 2, 3], double) == [4, 5, 9, 1]
    assert likely_followers([1, 2, 3], LOOKUP) == []


def test_most_occurrences_decide_and_of_equal_many_the_last():
    assert likely_followers([7, 1, 7, 1, 7, 2, 7], LOOKUP) == [1]
    assert likely_followers([7, 1, 7, 2, 7], LOOKUP) == [2]
    assert likely_followers([8, 7, 1, 7, 2, 8, 7], LOOKUP) == [1, 7], "the longer end counts"
    many, half = [7, 1] * MOST_OCCURRENCES, MOST_OCCURRENCES // 2
    assert likely_followers([*many, *[7, 2] * (half - 1), 9, 7], LOOKUP) == [1]
    assert likely_followers([*many, *[7, 2] * half, 9, 7], LOOKUP) == [2], "too old ones do not count"


def test_drafts_end_where_they_become_unlikely():
    """Both occurrences go on with 3, one of them with 4."""
    tokens = [1, 2, 3, 4, 6, 1, 2, 3, 5, 9, 1, 2]
    assert likely_followers(tokens, dataclasses.replace(LOOKUP, min_prob=0.5)) == [3, 5]
    assert likely_followers(tokens, dataclasses.replace(LOOKUP, min_prob=0.6)) == [3]


def test_what_repeats_itself_goes_on():
    assert likely_followers([5, 5, 5], LOOKUP) == [5, 5]
    assert likely_followers([1, 2, 1, 2, 1], LOOKUP) == [2, 1, 2]


def test_past_answers_count_like_older_text_and_end_where_they_end():
    assert likely_followers([8, 1, 2], LOOKUP, [[1, 2, 5, 6], [9]]) == [5, 6]
    assert likely_followers([8, 2], LOOKUP, [[1, 2]]) == [], "nothing follows there"
    assert likely_followers([8, 1, 2], LOOKUP, [[1], [2, 5]]) == [5], "an end is of one answer"
    many = dataclasses.replace(LOOKUP, factor=4.0)
    assert likely_followers([8, 2], many, [[2, 5], [2, 5, 6]]) == [5, 6]
    assert likely_followers([2, 7, 2], many, [[2, 5]]) == [7, 2, 7, 2], "of equal many the own text's"
    assert likely_followers([2, 7, 2], many, [[2, 5], [2, 5]]) == [5]


def test_the_oldest_tokens_of_past_answers_are_forgotten_and_salts_keep_them_apart():
    past = Past(5)
    past.keep(0, [1, 2, 3])
    past.keep(7, [4])
    past.keep(0, [5, 6])
    assert past.of(0) == [[2, 3], [5, 6]]
    assert past.of(7) == [[4]]
    past.keep(0, [1, 2, 3, 4, 5, 6])
    assert past.answers == [(0, [2, 3, 4, 5, 6])]
    nothing = Past(0)
    nothing.keep(0, [1])
    assert nothing.answers == []


@pytest.mark.parametrize("cost", [DraftCost(1), DraftCost(8), DraftCost(8, 17, 4), DraftCost(16, 64, 80)])
@pytest.mark.parametrize("length", [8, 64, 300])
@pytest.mark.parametrize("num_rows", [1, 4, 15])
def test_drafts_that_are_never_right_cost_little(cost, length, num_rows):
    """One answer after the other, each at most so much, and all together less than 2%."""
    credit, spent = Credit(cost), []
    for _ in range(60):
        row = Drafting(ByModel(7, lambda _: 0), credit=credit, prompt_len=60)
        num_drafts, num_tiles, num_behind = 0, 0, 60
        for num in range(1, length):
            drafts = row.draft([1] * (60 + num), length - num - 1, 60, num_rows=num_rows)
            row.note(len(drafts), 0, num_new=1)
            credit.settle()
            if drafts:
                num_tiles += -(-num_behind // 32) if num_behind >= 2 else 0
                num_drafts, num_behind = num_drafts + len(drafts), 0
            elif num_drafts:
                num_behind += 1
        spent.append(num_drafts * cost.of(num_rows))
        assert spent[-1] <= AT_FIRST + MOST_SAVED + length
        spent[-1] += num_tiles * cost.tile
    assert sum(spent) <= 0.02 * PARTS * 60 * length + MOST_SAVED
    assert sum(spent) > 0, "all that is tried"


def test_drafts_that_are_right_pay_for_more():
    row = Drafting(ByModel(7, lambda _: 0), credit=Credit(DraftCost(8, 17)))
    tokens, made = [1], []
    while len(tokens) < 40:
        drafts = row.draft(tokens, 99, 1)
        tokens += [1] * (len(drafts) + 1)
        row.note(len(drafts), len(drafts), num_new=len(drafts) + 1)
        row.credit.settle()
        made.append(len(drafts))
    assert made[:2] == [1, 2]
    assert made[-1] == 7
