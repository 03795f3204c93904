"""Speculation: drafts of coming tokens, verified in the empty slots of a decode pass.

A decode pass has `max_num_seqs` slots, however many rows run. A slot that no row needs can compute the token
behind a draft, as if the draft had been chosen already: same shape, same position, same K and V before it. A
draft is right when it is the token that is then chosen. A choice depends only on the logits and on (seed,
position). So the answer is the one without drafts, to the last bit. What lies behind a wrong draft is given
back.

Drafts are looked up in the row's own tokens: what followed where its last tokens occurred before (see
`step.followers`). Or a second model makes them, when the tables have slots for them (see `step.drafting`).
Text that a row's automaton forces comes before what is looked up.

Wrong drafts cost time. What a row may lose by them has a bound, whatever is drafted: see `affordable`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory import block_table, copy_on_write
from jaxpaged.memory.block_pool import in_every
from jaxpaged.memory.entries import dealt, number_through
from jaxpaged.sampling import is_among
from jaxpaged.step import features
from jaxpaged.step.config import PARTS, AnyLookup, ByGrammar, ByModel, StepConfig
from jaxpaged.step.feature_values import DRAFTS, DraftRows
from jaxpaged.step.features import Values
from jaxpaged.step.followers import look_up
from jaxpaged.step.plan import DecodeSlots, Plan
from jaxpaged.step.state import Counter, EngineState, Phase, Rows

# A row whose drafts fail waits 1, 3, 7, ... steps, and at most so many, before it drafts again.
LONGEST_WAIT = 31
# Parts of a step that a row may lose at first, and that all rows may have saved, and owe, at most.
AT_FIRST, MOST_SAVED, MOST_DEBT = PARTS // 2, 4 * PARTS, 64 * PARTS
# Behind more tokens of a row, or so many steps without drafts, a model that drafts computes tiles first.
MOST_BEHIND = 2
DEAR = PARTS // 4  # cost of a draft from which on rows are slower to make more


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafts:
    """Drafts of a step. They are in `Rows.token_ids` behind the tokens that the row has."""

    num: Int[Array, " rows"]
    first_slot: Int[Array, " rows"]  # decode slot of the row's first draft; the others follow
    each: Int[Array, ""]  # cost of one, in parts of a step
    cost: Int[Array, ""]  # of all, with what a model that drafts computes of prompts


def draft(
    state: EngineState, plan: Plan, slots: DecodeSlots, config: StepConfig
) -> tuple[EngineState, Plan, DecodeSlots, Drafts]:
    """Draft tokens for decoding rows, as many as there are empty slots and free blocks; none if too many rows
    run. A second model drafts alike for all, and only for at least half of those that run.

    Returns the state with the drafts behind the rows' tokens, the plan with a token more for each, the slots
    that are taken now, and the drafts. Where a second model makes the drafts, there are zeros for them.
    """
    rows, lookup = state.rows, config.lookup
    assert lookup is not None
    # A row that was preempted computes the tokens it has first.
    is_at_end = state.tables.seq_lens == rows.num_tokens - 1
    decodes = rows.running & (plan.num_tiles == 0) & (plan.num_new_tokens > 0)
    may = decodes & is_at_end & (rows.beams.width == 0)
    drafting = rows.drafting
    num_slots, by_model = slots.row.shape[0], isinstance(lookup, ByModel)
    num_taken = jnp.sum(slots.row < rows.phase.shape[0], dtype=jnp.int32)
    nothing = jnp.zeros((rows.phase.shape[0], lookup.most), jnp.int32)
    has_slots = num_taken < num_slots
    if config.most_drafting is not None:
        has_slots &= num_taken <= config.most_drafting
    room = rows.max_num_tokens - rows.num_tokens - 1
    if isinstance(lookup, ByModel) and lookup.most_prompt is not None:
        may &= (drafting.followed > 0) | (rows.prompt_lens <= lookup.most_prompt * (room + 1))
    num_forced, forced = nothing[:, 0], nothing
    for one_ahead in features.one_ahead(rows.features, state.features):
        may &= ~one_ahead
    forced_text = features.forced(rows.features, state.features)
    if forced_text is not None and not by_model:  # a model drafts by the mask, and so what is forced
        num_forced, forced = forced_text(jnp.where(may & has_slots, room, 0), lookup.most)
    may &= (drafting.wait == 0) & (num_forced == 0)
    max_drafts, each = jnp.minimum(drafting.most, room), jnp.int32(0)
    if config.draft_cost is not None:
        each = config.draft_cost.of(jnp.maximum(num_taken, 1))
        max_drafts = jnp.minimum(max_drafts, affordable(rows, drafting, state.drafts.credit, each))
        may &= max_drafts > 0
        if by_model:
            may &= ~catches_up(drafting) | (state.drafts.credit >= 0)

    def look() -> tuple[Int[Array, " rows"], Int[Array, "rows most"]]:
        if isinstance(lookup, ByModel):
            num_found, follow = jnp.full_like(nothing[:, 0], lookup.most), nothing
        elif isinstance(lookup, ByGrammar):
            return num_forced, forced
        else:
            num_found, follow = look_up(rows, state.drafts.past, lookup, may)
        may_have = max_drafts
        if by_model:
            may_have = jnp.minimum(max_drafts, -((num_taken - num_slots) // num_taken))
        drafts = jnp.where(num_forced[:, None] > 0, forced, follow)
        return jnp.where(may, jnp.minimum(num_found, may_have), num_forced), drafts

    wanted, tokens = lax.cond(has_slots & jnp.any(may), look, lambda: (num_forced, forced))
    num = jnp.zeros_like(wanted).at[rows.order].set(dealt(wanted[rows.order], num_slots - num_taken))
    if by_model:  # its passes must serve at least half of the rows that run, for all of them wait
        num = jnp.where(2 * jnp.sum(num > 0) >= num_taken, num, 0)

    # All drafts or none: blocks are rarely short, and then better kept for others.
    last_ids = copy_on_write.last_blocks(state.tables)
    needed, _ = copy_on_write.new_blocks(state.tables, last_ids, plan.num_new_tokens + num)
    num = jnp.where(in_every(state.tables.total(needed) <= state.tables.pool.num_free), num, 0)

    place = jnp.arange(lookup.most, dtype=jnp.int32)
    position = jnp.where(place < num[:, None], rows.num_tokens[:, None] + place, rows.token_ids.shape[1])
    index = jnp.arange(num.shape[0], dtype=jnp.int32)
    token_ids = rows.token_ids.at[index[:, None], position].set(tokens, mode="drop")
    state = replace(state, rows=replace(rows, token_ids=token_ids))
    row, k, used = number_through(num, num_slots)
    slot = jnp.where(used, num_taken + jnp.arange(num_slots, dtype=jnp.int32), num_slots)
    slots = DecodeSlots(
        row=slots.row.at[slot].set(row, mode="drop"),
        of_row=slots.of_row,
        offset=jnp.zeros_like(slots.row).at[slot].set(k + 1, mode="drop"),
    )
    first_slot = num_taken + jnp.cumsum(num, dtype=jnp.int32) - num
    cost = each * jnp.sum(num)
    if config.draft_cost is not None and by_model:
        num_behind = jnp.where(drafting.followed == 0, rows.prompt_lens, drafting.idle)
        tiles = jnp.where((num > 0) & catches_up(drafting), cdiv(num_behind, PREFILL_TILE), 0)
        cost += config.draft_cost.tile * jnp.sum(tiles)
    plan = replace(plan, num_new_tokens=plan.num_new_tokens + num)
    return state, plan, slots, Drafts(num, first_slot, each, cost)


def catches_up(drafting: DraftRows) -> Bool[Array, " rows"]:
    """Return which rows a model that drafts would have to follow first, in tiles, before it drafts."""
    return (drafting.followed == 0) | (drafting.idle >= MOST_BEHIND)


def affordable(
    rows: Rows, drafting: DraftRows, credit: Int[Array, ""], each: Int[Array, ""]
) -> Int[Array, " rows"]:
    """Return how many drafts more each row may make where one costs so much; it may be negative.

    What a row's drafts have cost may exceed what the right ones have saved by one part for each token of its
    answer, by AT_FIRST parts, and by what all rows' drafts have saved of late. If those have lost more than a
    part for each token, only the first counts. So no answer takes much more time than without drafts.
    """
    _, num_drafted, num_right = jnp.moveaxis(drafting.counts, 1, 0)
    at_first = jnp.where(credit >= 0, AT_FIRST + credit, 0)
    return (PARTS * num_right + rows.num_tokens - rows.prompt_lens + at_first) // each - num_drafted


def tracked_behind(
    state: EngineState, tracked: Values, slots: DecodeSlots, drafts: Drafts, max_drafts: int
) -> tuple[Values, Callable[[Int[Array, " rows"]], Values]]:
    """Return the tracked values of each decode slot, as they are behind the drafts before the slot. Also
    return a function from each row's number of accepted drafts, at most `max_drafts`, to the row's values
    behind them.
    """
    assert slots.offset is not None
    offset, rows, behind = slots.offset, state.rows, [tracked]
    index = jnp.arange(drafts.num.shape[0], dtype=jnp.int32)
    for k in range(max_drafts):
        token = rows.token_ids.at[index, rows.num_tokens + k].get(mode="clip")
        behind.append(features.after_token(behind[-1], state.features, token, k < drafts.num))
    changed = jax.tree.map(lambda *arrays: any(array is not arrays[0] for array in arrays), *behind)
    stacks = jax.tree.map(
        lambda is_changed, *arrays: jnp.stack(arrays, axis=1) if is_changed else arrays[0], changed, *behind
    )
    row = jnp.minimum(slots.row, index.shape[0] - 1)

    def by_slot(is_changed: bool, stack: Array) -> Array:
        return stack[row, offset] if is_changed else stack[row]

    def by_row(num: Int[Array, " rows"]) -> Values:
        return jax.tree.map(lambda is_one, stack: stack[index, num] if is_one else stack, changed, stacks)

    return jax.tree.map(by_slot, changed, stacks), by_row


def accepted(
    chosen: Int[Array, " max_num_seqs"], rows: Rows, slots: DecodeSlots, drafts: Drafts, max_drafts: int
) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """Return how many drafts of each row are right, and the token that was chosen behind them.

    A draft that ends its answer is chosen, not accepted: nothing follows.
    """
    place = jnp.arange(max_drafts + 1, dtype=jnp.int32)
    slot = jnp.where(place == 0, slots.of_row[:, None], drafts.first_slot[:, None] + place - 1)
    tokens = chosen[jnp.minimum(slot, chosen.shape[0] - 1)]
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    drafted = rows.token_ids.at[index, rows.num_tokens[:, None] + place].get(mode="clip")
    stops = jax.vmap(is_among, in_axes=(1, None), out_axes=1)(tokens, rows.rules.stop_tokens)
    is_right = (place < drafts.num[:, None]) & (tokens == drafted) & ~stops
    num = jnp.sum(jnp.cumprod(is_right, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    return num, tokens[index[:, 0], num]


def settle(
    state: EngineState,
    num_accepted: Int[Array, " rows"],
    drafts: Drafts,
    due: Bool[Array, " rows"],
    lookup: AnyLookup,
) -> tuple[EngineState, Int[Array, ""]]:
    """Free the slots behind wrong drafts, and record the results of each row's drafts.

    due: rows that have got a token. Returns the state, and how many blocks were given back.
    """
    before = state.tables.pool.num_free_in_all
    state = state.on_tables(block_table.truncate, drafts.num - num_accepted)
    rows = state.rows
    drafting = after(rows.drafting, rows.running, drafts, num_accepted, lookup)
    if isinstance(lookup, ByModel):  # of a row that is to be computed again nothing is left
        left = jnp.minimum(drafting.followed, state.tables.seq_lens)
        is_away = rows.phase == Phase.SWAPPED
        drafting = replace(drafting, followed=jnp.where(is_away, drafting.followed, left))
    saved = (PARTS + 1) * jnp.sum(num_accepted) + jnp.sum(due & (rows.beams.width == 0))
    credit = jnp.clip(state.drafts.credit + saved - drafts.cost, -MOST_DEBT, MOST_SAVED)
    state = features.with_values(state, {DRAFTS: replace(state.drafts, credit=credit)})
    state = replace(state, rows=features.with_values(rows, {DRAFTS: drafting})).count(
        {
            Counter.NUM_DRAFTS: jnp.sum(drafts.num > 0),
            Counter.NUM_DRAFT_TOKENS: jnp.sum(drafts.num),
            Counter.NUM_ACCEPTED_TOKENS: jnp.sum(num_accepted),
        }
    )
    place = jnp.arange(lookup.most, dtype=jnp.int32)
    state = state.count_places(jnp.sum(num_accepted[:, None] > place, axis=0, dtype=jnp.int32))
    return state, state.tables.pool.num_free_in_all - before


def after(
    drafting: DraftRows,
    running: Bool[Array, " rows"],
    drafts: Drafts,
    num_accepted: Int[Array, " rows"],
    lookup: AnyLookup,
) -> DraftRows:
    """Return how each row's drafts have done, behind a step with these.

    A row may draft about twice as many as were right the last time, or one more where drafts are dear; one
    whose drafts were all wrong waits.
    """
    num = drafts.num
    drafted, hits = num > 0, num_accepted > 0
    more = jnp.where(drafts.each < DEAR, 2 * num_accepted, num_accepted) + 1
    max_drafts = jnp.where(drafted, jnp.minimum(more, lookup.most), drafting.most)
    misses = jnp.where(drafted, jnp.where(hits, 0, drafting.misses + 1), drafting.misses)
    longer = jnp.minimum((1 << jnp.minimum(misses, 8)) - 1, LONGEST_WAIT)
    waited = jnp.maximum(drafting.wait - running, 0)
    counts = drafting.counts + jnp.stack([drafted.astype(jnp.int32), num, num_accepted], axis=1)
    wait, idle = jnp.where(drafted, longer, waited), jnp.where(drafted, 0, drafting.idle + running)
    return replace(drafting, most=max_drafts, misses=misses, wait=wait, counts=counts, idle=idle)
