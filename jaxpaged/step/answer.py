"""Answer of a step: sampled tokens, appended to the rows that are due."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.sampling import (
    Scores,
    is_among,
    no_scores,
    reported_values,
    score,
)
from jaxpaged.status import Status
from jaxpaged.step import channels, features, speculation
from jaxpaged.step.channels import Values, Verified
from jaxpaged.step.choice import Slots, allowed, choose
from jaxpaged.step.config import MAX_STEPS, StepConfig
from jaxpaged.step.model import Hidden, Model
from jaxpaged.step.plan import DecodeSlots
from jaxpaged.step.row_chunks import in_row_chunks
from jaxpaged.step.speculation import Drafts
from jaxpaged.step.state import EngineState, FinishReason, Phase


def answer(
    model: Model,
    state: EngineState,
    hidden: Hidden,
    slots: DecodeSlots,
    due: Bool[Array, " rows"],
    drafts: Drafts | None,
    config: StepConfig,
) -> tuple[EngineState, Scores, Int[Array, " rows"]]:
    """Sample a token for each row that is due, append it, and finish the rows that end with it.

    A row with drafts also gets those that are right, and the token behind them.

    Rows of beam searches are not changed. Returns the scores in each decode slot, where they are wanted, and
    how many drafts of each row are right.
    """
    rows, scores, sampler = state.rows, state.scores, config.sampler
    index = jnp.arange(rows.phase.shape[0], dtype=jnp.int32)
    max_seqs, num_slots = index.shape[0], slots.row.shape[0]
    row_of_slot = jnp.minimum(slots.row, max_seqs - 1)
    slot_is_due = (slots.row < max_seqs) & due[row_of_slot]
    no_news = no_scores(num_slots)
    max_drafts = 0 if config.lookup is None else config.lookup.most
    tracked = tracked_by_slot = features.tracked(rows.features)
    behind = None
    if tracked and drafts is not None:
        tracked_by_slot, behind = speculation.tracked_behind(state, tracked, slots, drafts, max_drafts)
    type Newest = tuple[Int[Array, " rows"], Int[Array, " rows"]]
    type Chosen = tuple[Bool[Array, ""], Newest, Scores, Scores, Values]

    def newest(token_ids: Int[Array, " slots"]) -> Newest:
        """Return how many drafts of each row are right, and its newest token."""
        if drafts is None:
            return jnp.zeros_like(index), token_ids[jnp.minimum(slots.of_row, token_ids.shape[0] - 1)]
        return speculation.accepted(token_ids, rows, slots, drafts, max_drafts)

    def choose_in(width: int) -> Chosen:
        """Choose a token in each of the first `width` slots; no other is in use."""
        row, is_due = row_of_slot[:width], slot_is_due[:width]
        position = rows.num_tokens[row]
        if slots.offset is not None:
            position += slots.offset[:width]
        line = row if behind is None else jnp.arange(width, dtype=jnp.int32)

        def choose_some(some: Slots) -> tuple[Int[Array, " slots"], Values]:
            """Choose tokens, and make the values of those channels that have one for each choice."""
            options = rows.sampling.take(some.row, some.is_due)
            made = choose(some, options, rows, tracked_by_slot, state.features, config)
            made = features.of_choice(rows, some.row, made)
            return made.token_ids, channels.of_choice(state.channels, made)

        def score_some(chosen: tuple[Slots, Int[Array, " slots"]]) -> Scores:
            some, token_ids = chosen
            options = rows.sampling.take(some.row, some.is_due)
            logits, edit = allowed(some, options, rows, tracked_by_slot, state.features, config.processors)
            temperature = rows.beams.temperature[some.row]
            if config.logprobs_mode == "raw_logprobs":
                return score(logits, token_ids, options.num_logprobs, temperature)
            values, are_logits = reported_values(
                config.logprobs_mode, logits, options, edit, rows.beams.width[some.row] > 0
            )
            return score(values, token_ids, options.num_logprobs, temperature, are_logits)

        used_slots = Slots(model.logits(hidden[:width]), row, is_due, position, line)
        num_used = jnp.max(jnp.where(is_due, jnp.arange(width, dtype=jnp.int32) + 1, 0))
        token_ids, new_values = in_row_chunks(choose_some, used_slots, num_used, config.rows_at_once)
        num_accepted, token = newest(token_ids)
        is_told = is_due if slots.offset is None else is_due & (slots.offset[:width] <= num_accepted[row])
        wants = is_told & (rows.sampling.num_logprobs[row] >= 0)

        def note_scores() -> tuple[Scores, Scores]:
            new = in_row_chunks(score_some, (used_slots, token_ids), num_used, config.rows_at_once)
            wanted = jnp.where(wants, row, max_seqs), position % MAX_STEPS
            noted = jax.tree.map(lambda ring, values: ring.at[wanted].set(values, mode="drop"), scores, new)
            if width < num_slots:
                new = jax.tree.map(lambda all_, some: all_.at[:width].set(some), no_news, new)
            return noted, new

        noted = lax.cond(jnp.any(wants), note_scores, lambda: (scores, no_news))
        values = state.channels
        if drafts is not None and slots.offset is not None:
            draft = rows.token_ids.at[row, position].get(mode="clip")
            verified = Verified(token_ids, draft, slots.offset[:width], drafts.num[row])
            new_values |= channels.of_drafts(state.channels, verified)
        if new_values:
            values = channels.noted(values, new_values, (jnp.where(is_told, row, max_seqs), position))
        is_unknown = jnp.bool_(False) if sampler is None else jnp.any(is_told & (token_ids < 0))
        return is_unknown, (num_accepted, token), *noted, values

    no_token = jnp.zeros_like(index), jnp.zeros_like(index)
    nothing = (jnp.bool_(False), no_token, scores, no_news, state.channels)
    if config.decode_widths:
        # Slots are taken from the first on. One narrower choice is enough: each takes seconds to compile.
        few = config.decode_widths[0]
        which = jnp.where(jnp.any(slot_is_due[few:]), 2, jnp.any(slot_is_due).astype(jnp.int32))
        ways = lambda: nothing, functools.partial(choose_in, few), functools.partial(choose_in, num_slots)
        chosen = lax.switch(which, ways)
    else:
        chosen = lax.cond(jnp.any(due), functools.partial(choose_in, num_slots), lambda: nothing)
    is_unknown, (num_accepted, token_ids), scores, new, values = chosen
    if sampler is not None:
        state = replace(state, status=state.status | jnp.where(is_unknown, Status.UNKNOWN_TOKEN, 0))
    due = due & (rows.beams.width == 0)
    newest_place = rows.num_tokens + num_accepted
    num_tokens = rows.num_tokens + jnp.where(due, num_accepted + 1, 0)
    stops = is_among(token_ids, rows.rules.stop_tokens)
    finishes = due & (stops | (num_tokens == rows.max_num_tokens))
    reason = jnp.where(stops, FinishReason.STOP, FinishReason.LENGTH)
    target = jnp.where(due, index, index.shape[0])
    if behind is not None:
        tracked = behind(num_accepted)
    tracked = features.after_token(tracked, state.features, token_ids, due)
    for has_lost in features.has_lost(tracked):
        is_lost = due & ~stops & has_lost
        finishes, reason = finishes | is_lost, jnp.where(is_lost, FinishReason.ERROR, reason)
    rows = replace(
        rows,
        token_ids=rows.token_ids.at[target, newest_place].set(token_ids, mode="drop"),
        num_tokens=num_tokens,
        phase=jnp.where(finishes, Phase.FINISHED, rows.phase),
        finish_reason=jnp.where(finishes, reason, rows.finish_reason),
        features=rows.features | tracked,
    )
    return replace(state, rows=rows, scores=scores, channels=values), new, num_accepted
