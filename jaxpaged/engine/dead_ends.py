"""Finds answers that cannot go on: where the options of a request bar each token that might follow."""

from collections.abc import Collection, Sequence


def dead_end(
    allowed: Collection[int],
    words: Sequence[Sequence[int]],
    stops: Collection[int],
    min_tokens: int,
    max_tokens: int | None,
) -> tuple[int, ...] | None:
    """Return the shortest answer that may come about, and behind which no token may follow.

    `allowed`: token ids to choose from; `words`: ids that must not stand behind one another in an answer;
    `stops`: tokens that end an answer, and are barred until it has `min_tokens`. None: there is no such
    answer of less than `max_tokens`.

    What is barred behind an answer depends on the beginnings of words that it ends with, all of them ends of
    the longest one. So it is enough to look behind each word's beginning, where nothing stands before it:
    what stood before could bar more, but only by a longer beginning, which is looked at for itself.
    """
    if len(allowed) > len(words) + len(stops):
        return None
    barred: dict[tuple[int, ...], set[int]] = {}
    for word in words:
        barred.setdefault(tuple(word[:-1]), set()).add(word[-1])
    lengths = sorted({len(beginning) for beginning in barred})
    ends = frozenset(stops)
    late = frozenset(allowed)
    early = late - ends

    def bars(answer: tuple[int, ...]) -> set[int]:
        """Return what words bar behind an answer."""
        ends = (answer[len(answer) - n :] for n in lengths if n <= len(answer))
        return set().union(*(barred.get(end, ()) for end in ends))

    def may_choose(answer: tuple[int, ...]) -> frozenset[int]:
        return early if len(answer) < min_tokens else late

    for answer in sorted({*barred, ()}, key=len):
        if max_tokens is not None and len(answer) >= max_tokens:
            break
        if not may_choose(answer) <= bars(answer) or not ends.isdisjoint(answer):
            continue
        so_far = [answer[:i] for i in range(len(answer))]
        if all(
            token in may_choose(before) and token not in bars(before)
            for token, before in zip(answer, so_far, strict=True)
        ):
            return answer
    return None
