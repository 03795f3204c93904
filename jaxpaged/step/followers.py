"""Look-up of drafts: what followed where a row's last tokens occurred before, in its own text or in past
answers, by arrays.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.step import past_answers
from jaxpaged.step.config import Lookup, SuffixLookup
from jaxpaged.step.feature_values import Past
from jaxpaged.step.state import Rows

# Positions that one turn of the search looks at: the time follows the length of what is there.
POSITIONS_AT_ONCE = 256
# The same in past answers, of which most turns find no row's newest token, and end with that.
PAST_AT_ONCE = 2048
# Occurrences of an end that count, the last ones.
MOST_OCCURRENCES = 32

type Found = tuple[Int[Array, " rows"], Int[Array, "rows most"]]


def look_up(
    rows: Rows, past: Past | None, lookup: Lookup | SuffixLookup, wanted: Bool[Array, " rows"]
) -> Found:
    """Return how many drafts each wanted row may make, at most `lookup.most`, and the drafts.

    A CPU takes one row after the other, so that the time follows the number of those that are wanted.
    """

    def followers_of(
        token_ids: Int[Array, "some max_model_len"],
        num_tokens: Int[Array, " some"],
        salt: Int[Array, " some"],
    ) -> Found:
        if isinstance(lookup, Lookup):
            return followers(token_ids, num_tokens, lookup)
        return likely_followers(token_ids, num_tokens, lookup, past, salt)

    def in_turn(*of_rows: Array) -> Found:
        num_rows = wanted.shape[0]
        (which,) = jnp.nonzero(wanted, size=num_rows, fill_value=0)

        def one(i: Int[Array, ""], all_: Found) -> Found:
            num, follow = followers_of(*(lax.dynamic_slice_in_dim(each, which[i], 1) for each in of_rows))
            return all_[0].at[which[i]].set(num[0]), all_[1].at[which[i]].set(follow[0])

        nothing = jnp.zeros(num_rows, jnp.int32), jnp.zeros((num_rows, lookup.most), jnp.int32)
        return lax.fori_loop(0, jnp.sum(wanted), one, nothing)

    return lax.platform_dependent(
        rows.token_ids, rows.num_tokens, rows.salt, cpu=in_turn, default=followers_of
    )


def followers(
    token_ids: Int[Array, "rows max_model_len"], num_tokens: Int[Array, " rows"], lookup: Lookup
) -> Found:
    """Return the tokens that followed where a row's last tokens occurred before, and how many there are.

    The longest end of the tokens that occurs counts, of `lookup.longest` tokens at most; then the occurrence
    with the most tokens behind it, up to `lookup.most`; then the last one. 0 where none is long enough.
    """
    type Best = tuple[Int[Array, " rows"], Int[Array, " rows"]]

    def search(i: Int[Array, ""], best: Best) -> Best:
        position, length = _lengths(token_ids, num_tokens, i, lookup.longest)
        follow = jnp.minimum(num_tokens[:, None] - position, lookup.most)
        rank = jnp.where((length >= lookup.shortest) & (follow > 0), length * (lookup.most + 1) + follow, 0)
        chunk_rank = jnp.max(rank, axis=1)
        chunk_position = jnp.max(jnp.where(rank == chunk_rank[:, None], position, 0), axis=1)
        best_rank, best_position = best
        is_better = chunk_rank >= best_rank
        return jnp.maximum(best_rank, chunk_rank), jnp.where(is_better, chunk_position, best_position)

    zeros = jnp.zeros_like(num_tokens)
    rank, position = lax.fori_loop(0, _num_chunks(num_tokens), search, (zeros, zeros))
    follow = _tokens_at(token_ids, position[:, None] + jnp.arange(lookup.most, dtype=jnp.int32))
    return rank % (lookup.most + 1), follow


def likely_followers(
    token_ids: Int[Array, "rows max_model_len"],
    num_tokens: Int[Array, " rows"],
    lookup: SuffixLookup,
    past: Past | None = None,
    salt: Int[Array, " rows"] | None = None,
) -> Found:
    """Return the tokens that mostly followed where a row's last tokens occurred before, and how many.

    The longest end of the tokens that occurs counts, of `lookup.longest` tokens at most, in the row or in
    past answers of its salt; of its occurrences the last MOST_OCCURRENCES, those in past answers being older.
    Token by token the draft is what most of them have next; of several tokens the one that came last. Those
    that have another token, or none, count no more. One that comes to the end of the row's tokens goes on
    with the drafts.

    An end gives `lookup.factor` drafts for each of its tokens, and no more when fewer than `lookup.min_prob`
    of its occurrences are left.
    """
    index = jnp.arange(num_tokens.shape[0], dtype=jnp.int32)[:, None]
    place = jnp.arange(MOST_OCCURRENCES, dtype=jnp.int32)
    # Positions in past answers come before the row's own, which are counted from here on.
    num_past = 0 if past is None else past.token_ids.shape[0]
    # The longest end so far, how often it occurs, and a ring of its last occurrences.
    type Ends = tuple[Int[Array, " rows"], Int[Array, " rows"], Int[Array, "rows occurrences"]]

    def search(i: Int[Array, ""], ends: Ends) -> Ends:
        position, length = _lengths(token_ids, num_tokens, i, lookup.longest)
        length = jnp.where(position < num_tokens[:, None], length, 0)
        return with_lengths(num_past + position, length, ends)

    def search_past(i: Int[Array, ""], ends: Ends) -> Ends:
        assert past is not None
        assert salt is not None
        last = _ends(token_ids, num_tokens, lookup.longest)
        first = i * PAST_AT_ONCE
        chunk = past_answers.stretch(past, first - lookup.longest, PAST_AT_ONCE + lookup.longest)
        tokens, owner = chunk.token_ids, chunk.owner[lookup.longest :]
        position = first + jnp.arange(PAST_AT_ONCE, dtype=jnp.int32)
        may = (chunk.salt[lookup.longest :] == salt[:, None]) & (position < past.num_tokens)

        def same(distance: int) -> Bool[Array, "rows chunk"]:
            begin = lookup.longest - 1 - distance
            here = slice(begin, begin + PAST_AT_ONCE)
            tokens_here = jnp.where(chunk.owner[here] == owner, tokens[here], -1)
            return may & (tokens_here == last[:, distance][:, None]) & (tokens_here >= 0)

        newest = same(0)

        def search_all(ends: Ends) -> Ends:
            here, length = newest, newest.astype(jnp.int32)
            for distance in range(1, lookup.longest):
                here &= same(distance)
                length += here
            return with_lengths(position, length, ends)

        return lax.cond(jnp.any(newest), search_all, lambda ends: ends, ends)

    def with_lengths(position: Int[Array, " chunk"], length: Int[Array, "rows chunk"], ends: Ends) -> Ends:
        may_count = jnp.any(jnp.max(length, axis=1) >= jnp.maximum(ends[0], 1))
        return lax.cond(may_count, lambda: with_longest(position, length, ends), lambda: ends)

    def with_longest(position: Int[Array, " chunk"], length: Int[Array, "rows chunk"], ends: Ends) -> Ends:
        best, count, ring = ends
        longest = jnp.maximum(best, jnp.max(length, axis=1))
        count = jnp.where(longest > best, 0, count)
        hit = (length == longest[:, None]) & (length > 0)
        num_hits = jnp.sum(hit, axis=1, dtype=jnp.int32)
        number = jnp.cumsum(hit, axis=1, dtype=jnp.int32) - hit
        is_kept = hit & (number >= num_hits[:, None] - MOST_OCCURRENCES)
        at = jnp.where(is_kept, (count[:, None] + number) % MOST_OCCURRENCES, MOST_OCCURRENCES)
        ring = ring.at[index, at].set(jnp.broadcast_to(position, at.shape), mode="drop")
        return longest, count + num_hits, ring

    zeros = jnp.zeros_like(num_tokens)
    nothing = zeros, zeros, jnp.zeros((num_tokens.shape[0], MOST_OCCURRENCES), jnp.int32)
    if past is not None:
        nothing = lax.fori_loop(0, cdiv(past.num_tokens, PAST_AT_ONCE), search_past, nothing)
    length, count, position = lax.fori_loop(0, _num_chunks(num_tokens), search, nothing)
    count = jnp.minimum(count, MOST_OCCURRENCES)
    # By the end's tokens, and by its occurrences: Python's numbers are those of the oracle.
    drafts_of = [min(int(n * lookup.factor), lookup.most) for n in range(lookup.longest + 1)]
    max_drafts = jnp.array(drafts_of, jnp.int32)[length]
    shares = range(MOST_OCCURRENCES + 1)
    least_of = [next((k for k in range(1, n) if k / n >= lookup.min_prob), n) for n in shares]
    least = jnp.array(least_of, jnp.int32)[count]
    type Path = tuple[Bool[Array, "rows occurrences"], Int[Array, " rows"], Int[Array, "rows most"]]

    def more(k: Int[Array, ""], path: Path) -> Path:
        """Choose the next token of each row, and keep the occurrences that have it."""
        alive, num, drafts = path
        behind = position - num_past + k
        drafted = drafts.at[index, behind - num_tokens[:, None]].get(mode="clip")
        tokens = jnp.where(behind < num_tokens[:, None], _tokens_at(token_ids, behind), drafted)
        if past is not None:
            tokens = jnp.where(position < num_past, past_answers.token_behind(past, position, k), tokens)
            alive &= tokens >= 0
        same = (tokens[:, :, None] == tokens[:, None]) & alive[:, None]
        votes = jnp.where(alive, jnp.sum(same, axis=2, dtype=jnp.int32), 0)
        is_best = alive & (votes == jnp.max(votes, axis=1, keepdims=True))
        last = jnp.argmax(jnp.where(is_best, position, -1), axis=1)
        token = tokens[index[:, 0], last]
        alive &= tokens == token[:, None]
        goes_on = (num == k) & (k < max_drafts) & (jnp.sum(alive, axis=1) >= least)
        return alive, num + goes_on, drafts.at[:, k].set(token)

    drafts = jnp.zeros((num_tokens.shape[0], lookup.most), jnp.int32)
    _, num, drafts = lax.fori_loop(0, lookup.most, more, (place < count[:, None], zeros, drafts))
    return num, drafts


def _num_chunks(num_tokens: Int[Array, " rows"]) -> Int[Array, ""]:
    return cdiv(jnp.max(num_tokens), POSITIONS_AT_ONCE)


def _tokens_at(
    token_ids: Int[Array, "rows max_model_len"], position: Int[Array, "rows n"]
) -> Int[Array, "rows n"]:
    """Return each row's tokens at these positions, -1 before the first."""
    index = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(position < 0, -1, token_ids.at[index, position].get(mode="clip"))


def _ends(
    token_ids: Int[Array, "rows max_model_len"], num_tokens: Int[Array, " rows"], longest: int
) -> Int[Array, "rows longest"]:
    """Return each row's last tokens, the newest first, -1 before the first."""
    return _tokens_at(token_ids, num_tokens[:, None] - 1 - jnp.arange(longest, dtype=jnp.int32))


def _lengths(
    token_ids: Int[Array, "rows max_model_len"],
    num_tokens: Int[Array, " rows"],
    i: Int[Array, ""],
    longest: int,
) -> tuple[Int[Array, " chunk"], Int[Array, "rows chunk"]]:
    """Return the positions of chunk `i`, and how many tokens before each are the row's last ones, up to
    `longest`.
    """
    num_rows, first = num_tokens.shape[0], i * POSITIONS_AT_ONCE
    ends = _ends(token_ids, num_tokens, longest)
    around = first - longest + jnp.arange(POSITIONS_AT_ONCE + longest, dtype=jnp.int32)
    window = _tokens_at(token_ids, jnp.broadcast_to(around, (num_rows, around.shape[0])))
    same = jnp.ones((num_rows, POSITIONS_AT_ONCE), bool)
    length = jnp.zeros(same.shape, jnp.int32)
    for distance in range(longest):
        begin = longest - 1 - distance
        shifted = window[:, begin : begin + POSITIONS_AT_ONCE]
        same &= (shifted == ends[:, distance][:, None]) & (shifted >= 0)
        length += same
    return first + jnp.arange(POSITIONS_AT_ONCE, dtype=jnp.int32), length
