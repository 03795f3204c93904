"""Beam search: with which sequences a group of rows goes on, chosen inside the step.

A group has 2 x width rows: in `width` of them beams run, and as many hold the best that have ended. Its beams
are all equally long; they run, and give way, together. In each step the best continuations of all of them are
the next beams. The first of those from a row stays in it; others take the places of rows from which nothing
goes on, and fork the blocks. `reference/beam_search.py` says the same without rows.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.memory import block_table
from jaxpaged.sampling import Scores, is_in
from jaxpaged.sampling_params import MAX_BEAM_WIDTH, MAX_LOGPROBS
from jaxpaged.step import features
from jaxpaged.step.config import MAX_STEPS
from jaxpaged.step.feature_values import BEAMS
from jaxpaged.step.features import Values
from jaxpaged.step.plan import DecodeSlots
from jaxpaged.step.state import EngineState, FinishReason, Phase, Rows

# Tokens of an answer that are copied at a time from row to row.
COPIED_AT_ONCE = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Choice:
    """Contents of beam rows after the next token. Other rows stay as they are."""

    changes: Bool[Array, " rows"]  # whether the row becomes `source` with its candidate `column` appended
    source: Int[Array, " rows"]
    column: Int[Array, " rows"]
    cum_logprob: Float[Array, " rows"]
    rank: Int[Array, " rows"]
    finishes: Bool[Array, " rows"]


def advance(
    state: EngineState, new: Scores, slots: DecodeSlots, due: Bool[Array, " rows"]
) -> tuple[EngineState, Int[Array, " rows"], Int[Array, " rows"]]:
    """Advance the groups that are due by one token; `new` has the candidates of each slot.

    To be called when what the step has computed is published: for rows exchange what they hold. Returns, too,
    for each row the one that had what it holds now, and the one whose blocks it is to hold from now on, its
    own given back. For most both are the row itself.
    """
    is_due = due & (state.rows.beams.width > 0)
    own_row = jnp.arange(is_due.shape[0], dtype=jnp.int32)
    type Result = tuple[EngineState, Int[Array, " rows"], Int[Array, " rows"]]

    def go_on(state: EngineState) -> Result:
        choice = choose(state.rows, new, slots, is_due)
        came_from = jnp.where(choice.changes, choice.source, own_row)
        # Ended sequences need no blocks.
        forks = (came_from != own_row) & state.rows.running
        state = replace(
            state,
            rows=_continued(state.rows, state.features, new, slots, choice),
            scores=_noted(state, new, slots, choice),
        )
        state = state.on_tables(block_table.free_rows, forks)
        return state, came_from, jnp.where(forks, came_from, own_row)

    # The cache stays outside: a `cond` that it passes through may copy it on a GPU.
    small = replace(state, kv_cache=None, host=None)  # type: ignore[arg-type]
    small, *rows = lax.cond(jnp.any(is_due), go_on, lambda state: (state, own_row, own_row), small)
    return replace(small, kv_cache=state.kv_cache, host=state.host), *rows


def choose(rows: Rows, new: Scores, slots: DecodeSlots, due: Bool[Array, " rows"]) -> Choice:
    """Choose the next beams of every search that is due, and the sequences that end now. Searches are
    handled one at a time.
    """
    beams = rows.beams
    index = jnp.arange(due.shape[0], dtype=jnp.int32)
    no_rows = jnp.zeros_like(due)
    nothing = Choice(no_rows, index, jnp.zeros_like(index), beams.cum_logprob, beams.rank, no_rows)
    type Carry = tuple[Bool[Array, " rows"], Choice]

    def choose_next(carry: Carry) -> Carry:
        left, choice = carry
        head = jnp.argmax(left).astype(jnp.int32)
        return left.at[head].set(False), _choose_in_group(rows, new, slots, head, choice)

    heads = due & (beams.head == index)
    return lax.while_loop(lambda carry: jnp.any(carry[0]), choose_next, (heads, nothing))[1]


def _choose_in_group(
    rows: Rows, new: Scores, slots: DecodeSlots, head: Int[Array, ""], choice: Choice
) -> Choice:
    """Choose the next beams of the search whose first row is `head`, and the sequences that end in it."""
    beams, num_rows = rows.beams, rows.phase.shape[0]
    width, penalty, num_tokens = beams.width[head], beams.length_penalty[head], rows.num_tokens[head]
    in_group = (beams.width > 0) & (beams.head == head)
    place = jnp.arange(MAX_BEAM_WIDTH, dtype=jnp.int32)

    def members(mask: Bool[Array, " rows"]) -> Int[Array, " places"]:
        """Return the masked rows of the search, padded with a row beyond all."""
        (member_rows,) = jnp.nonzero(in_group & mask, size=MAX_BEAM_WIDTH, fill_value=num_rows)
        return member_rows.astype(jnp.int32)

    live, ended = members(rows.running), members(rows.held)

    # The candidates are the likeliest 2 * width tokens of each beam.
    slot = slots.of_row.at[live].get(mode="fill", fill_value=new.rank.shape[0])
    token_ids = new.top_ids.at[slot].get(mode="fill", fill_value=-1)
    column = jnp.broadcast_to(jnp.arange(MAX_LOGPROBS, dtype=jnp.int32), token_ids.shape)
    cum = beams.cum_logprob.at[live].get(mode="fill", fill_value=-jnp.inf)
    value = cum[:, None] + new.top_logprobs.at[slot].get(mode="fill", fill_value=0)
    counts = (token_ids >= 0) & (column < 2 * width) & ~jnp.isnan(value)
    value = jnp.where(counts, value, -jnp.inf).reshape(-1)
    tie = (beams.rank.at[live].get(mode="fill", fill_value=0)[:, None] * MAX_LOGPROBS + column).reshape(-1)
    ends = is_in(token_ids.reshape(-1), rows.rules.stop_tokens[head])

    # Choose the best candidates to continue, and the best sequences that ended earlier or now. Of equal ones
    # the earlier comes first.
    length = jnp.maximum(rows.num_tokens.at[ended].get(mode="clip") - 1, 1)  # without the end token
    former = beams.cum_logprob.at[ended].get(mode="fill", fill_value=-jnp.inf)
    former *= length.astype(jnp.float32) ** -penalty
    former_rank = beams.rank.at[ended].get(mode="fill", fill_value=0)
    now = jnp.where(ends, value, -jnp.inf) * num_tokens.astype(jnp.float32) ** -penalty
    values = jnp.concatenate(
        [
            jnp.stack([jnp.full_like(former, -jnp.inf), former]),
            jnp.stack([jnp.where(ends, -jnp.inf, value), now]),
        ],
        axis=1,
    )
    ties = jnp.concatenate([former_rank, MAX_BEAM_WIDTH + tie])
    best_index, best = _best(values, jnp.broadcast_to(ties, values.shape))
    is_one = (place < width) & (best > -jnp.inf)
    is_new = best_index >= MAX_BEAM_WIDTH
    candidate = jnp.maximum(best_index - MAX_BEAM_WIDTH, 0)
    parent, its_column = candidate // MAX_LOGPROBS, candidate % MAX_LOGPROBS
    # A beam that continues stays in its parent's row. An ended sequence stays in its own.
    wanted = jnp.stack([parent[0], jnp.where(is_new[1], MAX_BEAM_WIDTH, best_index[1])])
    homes = jnp.stack([live, ended])
    home = jnp.take_along_axis(homes, jax.vmap(_places)(wanted, is_one, homes < num_rows), axis=1)
    home = jnp.where(is_one, home, num_rows)
    target = jnp.where(is_new, home, num_rows)

    # The search ends if no later sequence can be better, for sums of log-probabilities do not rise; or if the
    # answer may have no more tokens.
    longest = jnp.where(penalty > 0, rows.max_num_tokens[head], num_tokens + 1).astype(jnp.float32)
    is_decided = best[1, width - 1] >= best[0, 0] * longest**-penalty
    finishes = is_decided | (num_tokens + 1 >= rows.max_num_tokens[head])
    return Choice(  # a row without a beam continues as if alone, and is ignored
        changes=choice.changes.at[live].set(True, mode="drop").at[target].set(True, mode="drop"),
        source=choice.source.at[target].set(live[parent], mode="drop"),
        column=choice.column.at[target].set(its_column, mode="drop"),
        cum_logprob=choice.cum_logprob.at[live]
        .set(-jnp.inf, mode="drop")
        .at[target]
        .set(value[candidate], mode="drop"),
        rank=choice.rank.at[home].set(jnp.broadcast_to(place, home.shape), mode="drop"),
        finishes=choice.finishes | (in_group & (rows.running | rows.held) & finishes),
    )


def _best(
    values: Float[Array, "kinds n"], ties: Int[Array, "kinds n"]
) -> tuple[Int[Array, "kinds places"], Float[Array, "kinds places"]]:
    """Return the indices and the values of the largest entries; of equal ones those with the lower tie
    come first.
    """
    index = jnp.broadcast_to(jnp.arange(values.shape[1], dtype=jnp.int32), values.shape)
    falling, _, best_index = lax.sort((-values, ties, index), num_keys=2)
    return best_index[:, :MAX_BEAM_WIDTH], -falling[:, :MAX_BEAM_WIDTH]


def _places(
    wanted: Int[Array, " places"], is_one: Bool[Array, " places"], exists: Bool[Array, " places"]
) -> Int[Array, " places"]:
    """Give each new entry a place: the first to want a place gets it, the others get those that are left,
    in order.

    Entries that are not `is_one` get any place. A wanted place beyond all means that none is wanted.
    """
    num_places = wanted.shape[0]
    index = jnp.arange(num_places, dtype=jnp.int32)
    same = (wanted[:, None] == wanted) & is_one
    is_first = is_one & (wanted < num_places) & (jnp.argmax(same, axis=1) == index)
    taken = jnp.zeros_like(is_one).at[jnp.where(is_first, wanted, num_places)].set(True, mode="drop")
    left = exists & ~taken
    nth_left = jnp.cumsum(left, dtype=jnp.int32) - 1
    in_order = jnp.zeros_like(index).at[jnp.where(left, nth_left, num_places)].set(index, mode="drop")
    nth = jnp.cumsum(is_one & ~is_first, dtype=jnp.int32) - 1
    return jnp.where(is_first, wanted, in_order[jnp.maximum(nth, 0)])


def _continued(rows: Rows, shared: Values, new: Scores, slots: DecodeSlots, choice: Choice) -> Rows:
    """Return the rows with their next tokens appended to the tokens of the rows that they continue."""
    index = jnp.arange(choice.source.shape[0], dtype=jnp.int32)
    changes, source = choice.changes, choice.source
    position = rows.num_tokens[source]
    token = new.top_ids.at[slots.of_row[source], choice.column].get(mode="clip")
    token_ids = _with_answers_of(rows, source, changes & (source != index))
    token_ids = token_ids.at[jnp.where(changes, index, index.shape[0]), position].set(
        jnp.maximum(token, 0), mode="drop"
    )
    reason = jnp.where(rows.running, FinishReason.LENGTH, FinishReason.STOP)
    tracked = features.of_parents(features.tracked(rows.features), source, changes)
    tracked = features.after_token(tracked, shared, jnp.maximum(token, 0), changes)
    beams = replace(rows.beams, cum_logprob=choice.cum_logprob, rank=choice.rank)
    return replace(
        rows,
        token_ids=token_ids,
        num_tokens=jnp.where(changes, position + 1, rows.num_tokens),
        phase=jnp.where(choice.finishes, Phase.FINISHED, rows.phase),
        finish_reason=jnp.where(choice.finishes, reason, rows.finish_reason),
        features=rows.features | tracked | {BEAMS: beams},
    )


def _with_answers_of(
    rows: Rows, source: Int[Array, " rows"], moves: Bool[Array, " rows"]
) -> Int[Array, "rows max_model_len"]:
    """Return the rows' tokens, with the answers of `source` copied into the rows that move.

    One row after the other, a chunk of tokens at a time: the cost follows the length of the answers. Rows for
    ended sequences come first, for no beam may continue the beam that they copy, and that row may itself be
    overwritten afterwards. A row from which a beam continues stays.
    """
    size = min(COPIED_AT_ONCE, rows.token_ids.shape[1])
    type Carry = tuple[Int[Array, "rows max_model_len"], Bool[Array, " rows"], Int[Array, ""]]

    def copy_chunk(carry: Carry) -> Carry:
        token_ids, left, done = carry
        row = jnp.argmax(jnp.where(left, 1 + rows.held, 0))
        start = rows.prompt_lens[row] + done
        chunk = lax.dynamic_slice(token_ids, (source[row], start), (1, size))
        token_ids = lax.dynamic_update_slice(token_ids, chunk, (row, start))
        goes_on = start + size < rows.num_tokens[source[row]]
        return token_ids, left.at[row].set(goes_on), jnp.where(goes_on, done + size, 0)

    start = (rows.token_ids, moves, jnp.int32(0))
    return lax.while_loop(lambda carry: jnp.any(carry[1]), copy_chunk, start)[0]


def _noted(state: EngineState, new: Scores, slots: DecodeSlots, choice: Choice) -> Scores:
    """Return the scores of the rows' tokens, with those of their next tokens."""
    source, num_rows = choice.source, choice.source.shape[0]
    slot = jnp.minimum(slots.of_row[source], new.rank.shape[0] - 1)
    next_ = Scores(
        logprob=new.top_logprobs[slot, choice.column],
        rank=choice.column + 1,
        top_ids=new.top_ids[slot],
        top_logprobs=new.top_logprobs[slot],
    )
    at = jnp.where(choice.changes, jnp.arange(num_rows), num_rows), state.rows.num_tokens[source] % MAX_STEPS
    return jax.tree.map(
        lambda ring, values: ring[source].at[at].set(values, mode="drop"), state.scores, next_
    )
