"""One step: schedule, take blocks, run the model, sample, append, publish, free. Pure."""

import functools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory import block_table, kv_cache
from jaxpaged.memory.block_pool import in_any
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.entries import dealt
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.sampling import Scores, no_scores, score
from jaxpaged.status import Status
from jaxpaged.step import (
    admission,
    beams,
    channels,
    draft_pass,
    drafting,
    features,
    past_answers,
    scheduler,
    speculation,
)
from jaxpaged.step.answer import answer
from jaxpaged.step.channels import Values
from jaxpaged.step.config import ByModel, StepConfig
from jaxpaged.step.model import Hidden, Model
from jaxpaged.step.plan import DecodeSlots, Plan, Tiles, decode_tiles, prompt_tiles, slots_of
from jaxpaged.step.scheduler import Decision
from jaxpaged.step.state import Counter, EngineState, Phase, Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptScores:
    """Scores of prompt tokens: for each position of a tile, those of the token behind it."""

    row: Int[Array, " num_tiles"]  # row of each tile; past all rows for a tile without scores
    start: Int[Array, " num_tiles"]  # the tile's first position
    scores: Scores  # [num_tiles, tile_len]; of places before the prompt's last
    values: Values = field(default_factory=dict)  # of channels by place, [num_tiles, tile_len, *shape]


def no_prompt_scores(config: StepConfig, rows: Rows) -> PromptScores:
    """Return empty scores, of the shape that a step fills in. `rows` may be those of all replicas."""
    num_tiles = cdiv(config.num_tiles, config.tiles_per_pass) * config.tiles_per_pass
    beyond_all = jnp.full(num_tiles, rows.phase.shape[-1], jnp.int32)
    shapes = {name: given.shape[rows.phase.ndim + 1 :] for name, given in rows.given.items()}
    return PromptScores(
        beyond_all,
        jnp.zeros_like(beyond_all),
        no_scores(num_tiles, PREFILL_TILE),
        {name: jnp.zeros((num_tiles, PREFILL_TILE, *shape), jnp.float32) for name, shape in shapes.items()},
    )


def step(model: Model, state: EngineState, config: StepConfig) -> tuple[EngineState, Decision]:
    """Make a step, and return the next state and what was decided; without scores of prompts."""
    return advance(model, state, config, no_prompt_scores(config, state.rows))[:2]


def advance(
    model: Model, state: EngineState, config: StepConfig, prompt_scores: PromptScores
) -> tuple[EngineState, Decision, PromptScores, Int[Array, " rows"]]:
    """Advance every running row: some by tiles of their prompt, the others by one token.

    Returns the state, the decision, the scores of prompt tokens (in the arrays of `prompt_scores`), and for
    each row the row that held before the step what it holds now: another one only for beams.

    Prompts are computed in passes of one shape, decoding rows in passes of another, and logits in a third,
    whatever else is in the step. So a token's bits do not depend on the rest of the batch.
    """
    state, decision = scheduler.schedule(state, config)
    plan, scheduled = decision.plan, state.tables
    forks, drafts = state.rows.forking, None
    slots = slots_of(state.rows.running | forks, config.max_num_seqs)
    if config.lookup is not None:
        state, plan, slots, drafts = speculation.draft(state, plan, slots, config)
        decision = replace(decision, plan=plan)
    ran = plan.num_new_tokens > 0
    state = replace(state, rows=features.before_pass(state.rows, ran))
    max_blocks = config.max_blocks_touched(state.tables.block_size)
    state = append(state, plan, max_blocks)
    if drafts is not None and isinstance(config.lookup, ByModel):
        state = drafting.write_drafts(model, state, slots, drafts, config)

    state, hidden, prompt_scores = forward(model, state, plan, slots, config, prompt_scores)
    state, hidden = start_forks(state, hidden, slots, decision.leader_row)
    # A row whose tokens are all in the cache has the hidden state of its newest token: it samples the next.
    num_cached = jnp.where(forks, state.rows.prompt_lens, state.tables.seq_lens)
    if drafts is not None:
        num_cached -= drafts.num
    due = (ran | forks) & (num_cached == state.rows.num_tokens)
    num_before = state.rows.num_tokens
    state, new, num_accepted = answer(model, state, hidden, slots, due, drafts, config)
    if state.rows.features:
        rows = features.after_choice(state.rows, state.rows.num_tokens - num_before)
        state = replace(state, rows=rows)
    num_new, num_returned = jnp.sum(due), jnp.int32(0)
    if drafts is not None and config.lookup is not None:
        state, num_returned = speculation.settle(state, num_accepted, drafts, due, config.lookup)
        state = past_answers.note_ended(state, due & (state.rows.phase == Phase.FINISHED))
        num_new += jnp.sum(num_accepted)

    in_prompt = plan.num_tiles > 0
    state = state.count(
        {
            Counter.NUM_STEPS: 1,
            Counter.NUM_PROMPT_TOKENS: jnp.sum(jnp.where(in_prompt, plan.num_new_tokens, 0)),
            Counter.NUM_DECODE_TOKENS: jnp.sum(jnp.where(in_prompt, 0, plan.num_new_tokens)),
            Counter.NUM_NEW_TOKENS: num_new,
            Counter.NUM_PROMPT_PASSES: cdiv(jnp.sum(plan.num_tiles), config.tiles_per_pass),
        }
    )
    state = publish(state, jnp.any(in_prompt), config)
    state = admission.raise_held_bound(state, scheduled, num_returned)
    state, came_from, source = beams.advance(state, new, slots, due)
    forks_from = jnp.where(source == jnp.arange(source.shape[0]), decision.leader_row, source)
    state = scheduler.fork_tables(state, forks_from, config)
    return clean_up(state, config), decision, prompt_scores, came_from


def append(state: EngineState, plan: Plan, max_blocks: int) -> EngineState:
    """Take slots for the plan's tokens. A block that other rows hold too is copied before it is written
    to.
    """
    max_new_blocks = max_blocks * state.tables.num_groups
    tables, info = block_table.append(state.tables, plan.num_new_tokens, max_new_blocks=max_new_blocks)
    cache = kv_cache.copy_within(state.kv_cache, info.copy_sources, info.copy_destinations)
    cache = kv_cache.note_followed(cache, info.new_ids, False)
    return replace(state, tables=tables, kv_cache=cache, status=state.status | info.status)


def start_forks(
    state: EngineState, hidden: Hidden, slots: DecodeSlots, leader_row: Int[Array, " rows"]
) -> tuple[EngineState, Hidden]:
    """Let the forking rows run, each with the hidden state of its leader's last prompt token."""
    rows = state.rows

    def gather() -> Hidden:
        row = jnp.minimum(slots.row, leader_row.shape[0] - 1)
        source = slots.of_row[leader_row[row]]
        if slots.offset is not None:  # a draft's slot keeps its own
            source = jnp.where(slots.offset > 0, jnp.arange(source.shape[0]), source)
        return hidden[source]

    hidden = lax.cond(jnp.any(rows.forking), gather, lambda: hidden)
    if values := channels.by_position(state.channels):
        source = jnp.where(rows.forking, leader_row, jnp.arange(leader_row.shape[0]))

        def of_leaders(values: Values) -> Values:
            return {name: each[source] for name, each in values.items()}

        values = lax.cond(jnp.any(rows.forking), of_leaders, lambda values: values, values)
        state = replace(state, channels=state.channels | values)
    phase = jnp.where(rows.forking, Phase.RUNNING, rows.phase)
    return replace(state, rows=replace(rows, phase=phase)), hidden


def forward(
    model: Model,
    state: EngineState,
    plan: Plan,
    slots: DecodeSlots,
    config: StepConfig,
    prompt_scores: PromptScores,
) -> tuple[EngineState, Hidden, PromptScores]:
    """Compute the plan's tokens: the prompts' in passes of a few tiles, then the decoding rows' in one pass.

    Never both in one pass: there the decoding rows would have another shape in every mix, and other bits.
    Returns the state; for each decode slot the hidden state of its row's newest token, or of its prompt's
    last, where that was computed; and the scores of prompt tokens.
    """
    rows, tables = state.rows, state.tables
    width = config.tiles_per_pass
    type Carry = tuple[KVCache, Hidden, PromptScores, Values]

    def prefill(carry: Carry) -> Carry:
        all_tiles = prompt_tiles(state, plan, cdiv(config.num_tiles, width) * width)

        def one_pass(i: Int[Array, ""], carry: Carry) -> Carry:
            tiles = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * width, width), all_tiles)
            kv_cache, hidden, prompt_scores, values = carry
            kv_cache, hidden, values, out = compute(
                model, rows, tables, kv_cache, hidden, values, tiles, slots, config
            )
            return kv_cache, hidden, score_prompts(model, rows, tiles, out, prompt_scores, i * width), values

        return lax.fori_loop(0, cdiv(jnp.sum(plan.num_tiles), width), one_pass, carry)

    def decode(carry: Carry, width: int = config.max_num_seqs) -> Carry:
        tiles = decode_tiles(state, plan, slots)
        if width < config.max_num_seqs:
            tiles = jax.tree.map(lambda x: x[:width], tiles)
        kv_cache, hidden, prompt_scores, values = carry
        kv_cache, hidden, values, _ = compute(
            model, rows, tables, kv_cache, hidden, values, tiles, slots, config
        )
        return kv_cache, hidden, prompt_scores, values

    def skip(carry: Carry) -> Carry:
        return carry

    nothing = jnp.zeros((config.max_num_seqs, model.hidden_size), model.dtype)
    beyond_all = jnp.full_like(prompt_scores.row, rows.phase.shape[0])
    carry = (
        state.kv_cache,
        nothing,
        replace(prompt_scores, row=beyond_all),
        channels.by_position(state.channels),
    )
    carry = lax.cond(jnp.any(plan.num_tiles > 0), prefill, skip, carry)
    decodes = (plan.num_tiles == 0) & (plan.num_new_tokens > 0)
    if config.decode_widths:
        # Decode slots are assigned from the first on, so a pass of so many rows contains all of them.
        num_slots = jnp.max(jnp.where(decodes, slots.of_row + 1, 0))
        if slots.offset is not None:
            in_use = slots.offset > 0
            num_slots = jnp.maximum(num_slots, jnp.max(jnp.where(in_use, jnp.arange(in_use.shape[0]) + 1, 0)))
        # One condition after the other: of several branches that write to the cache XLA makes copies.
        narrower = 0
        for width in (*config.decode_widths, config.max_num_seqs):
            fits = (num_slots > narrower) & (num_slots <= width)
            carry = lax.cond(fits, functools.partial(decode, width=width), skip, carry)
            narrower = width
    else:
        carry = lax.cond(jnp.any(decodes), decode, skip, carry)
    kv_cache, hidden, prompt_scores, values = carry
    return replace(state, kv_cache=kv_cache, channels=state.channels | values), hidden, prompt_scores


def score_prompts(
    model: Model,
    rows: Rows,
    tiles: Tiles,
    out: Float[Array, "num_tiles tile_len hidden"],
    prompt_scores: PromptScores,
    first: Int[Array, ""],
) -> PromptScores:
    """Score the tokens behind each position of prompt tiles, for rows that ask for it; written from line
    `first` on.

    One tile at a time: so each has the same shape, and the same bits, and the logits of all need not fit.
    """
    wants = (tiles.end > 0) & rows.tells_prompt[tiles.row]

    # The loop has one iteration per scored tile. With a fixed number of iterations XLA would make slices
    # that no CUDA graph can hold.
    (wanted_tiles,) = jnp.nonzero(wants, size=wants.shape[0], fill_value=0)

    def score_tile(i: Int[Array, ""], prompt_scores: PromptScores) -> PromptScores:
        k = wanted_tiles[i].astype(jnp.int32)
        row, start = tiles.row[k], tiles.start[k]
        position = start + jnp.arange(tiles.tile_len, dtype=jnp.int32)
        behind = rows.token_ids.at[row, position + 1].get(mode="clip")
        num_top = jnp.broadcast_to(rows.num_prompt_logprobs[row], position.shape)
        logits = model.logits(out[k])
        new = score(logits, behind, num_top)
        scores = jax.tree.map(
            lambda all_, of_tile: all_.at[first + k].set(of_tile), prompt_scores.scores, new
        )
        values = {
            name: prompt_scores.values[name].at[first + k].set(of_tile)
            for name, of_tile in channels.of_places(rows.given, logits, row, position).items()
        }
        rows_, starts = prompt_scores.row.at[first + k].set(row), prompt_scores.start.at[first + k].set(start)
        return PromptScores(rows_, starts, scores, values)

    return lax.fori_loop(0, jnp.sum(wants), score_tile, prompt_scores)


def compute(
    model: Model,
    rows: Rows,
    tables: BlockTables,
    kv_cache: KVCache,
    hidden: Hidden,
    values: Values,
    tiles: Tiles,
    slots: DecodeSlots,
    config: StepConfig,
) -> tuple[KVCache, Hidden, Values, Float[Array, "num_tiles tile_len hidden"]]:
    """Run the model over tiles whose tokens have slots already.

    The hidden states of each row's newest token, and of its prompt's last, go to `hidden`; what channels have
    by position goes to `values`. Returns the hidden states of all positions, too, for rows whose prompts are
    scored.
    """
    row, positions, valid = tiles.places()
    # A prompt that is computed again may end for a follower, which has no answer yet.
    is_prompts_last = tiles.end == rows.prompt_lens[tiles.row]
    is_newest = (tiles.end > 0) & (is_prompts_last | (tiles.end == rows.num_tokens[tiles.row]))
    is_last = is_newest[:, None] & (positions == tiles.end[:, None] - 1)
    wanted = is_last | rows.tells_prompt[tiles.row][:, None]
    slots_by_group = [
        block_table.slot_mapping(tables, row, positions, valid, group).reshape(-1)
        for group in range(tables.num_groups)
    ]
    is_one = tables.num_groups == 1 and not config.grouping.weights
    batch = PassBatch(
        slot_mapping=slots_by_group[0] if is_one else jnp.stack(slots_by_group),
        block_tables=tables.block_tables,
        query_starts=tiles.start,
        seq_lens=tiles.end,
        implementation=config.attention,
        **features.of_pass(rows.features, tiles),
        table_rows=tiles.row if is_one else tables.lines_of(tiles.row).reshape(-1, tables.num_groups).T,
        grouping=None if is_one else config.grouping,
        wanted=wanted.reshape(-1) if tiles.tile_len > 1 and not values else None,
    )
    token_ids = jnp.where(valid, rows.token_ids.at[row, positions].get(mode="clip"), 0)
    places = jnp.where(valid, positions, 0).reshape(-1)
    kv_cache = replace(kv_cache, values=channels.before_pass(values, positions.size))
    out, kv_cache = draft_pass.serve(model, token_ids.reshape(-1), places, kv_cache, batch, config)
    values = channels.after_pass(values, kv_cache.values, row, positions, valid)
    kv_cache = replace(kv_cache, values={})
    out = out.reshape(*positions.shape, -1)
    last = out[jnp.arange(positions.shape[0]), tiles.end - 1 - tiles.start]
    slot = jnp.where(is_newest, slots.of_row[tiles.row], hidden.shape[0])
    if slots.offset is not None and tiles.tile_len == 1:
        slot = jnp.where(slots.offset[: slot.shape[0]] > 0, jnp.arange(slot.shape[0]), slot)
    return kv_cache, hidden.at[slot].set(last, mode="drop"), values, out


def publish(state: EngineState, computes_prompt: Bool[Array, ""], config: StepConfig) -> EngineState:
    """Make full blocks findable, now that their K and V are written.

    Blocks that only decoding has filled can wait. Their keys are of an answer (`admission.cache_keys`), so
    they are of use only to their own request, if it is preempted and computed again. They are published
    beside a prompt's blocks, or when blocks are so few that the next step may preempt. What has left a
    group's window by then is not missed: the request begins again where it stopped.
    """
    if state.tables.pool.prefix_cache is None:
        return state
    rows, block_size = state.rows, state.tables.block_size
    num_groups: int | Array = state.tables.num_groups
    if state.tables.num_classes > 1:
        num_groups = jnp.asarray(config.groups_by_class, jnp.int32)
    is_tight = in_any(state.tables.pool.num_free < jnp.sum(rows.running) * num_groups)
    # The first group's blocks are the way to all others, and must not leave its window unpublished.
    is_eager = config.reuse_answers or not config.keeps_sequence
    max_blocks = config.max_blocks_touched(block_size)
    type Carry = tuple[BlockTables, Int[Array, ""]]

    def num_full(tables: BlockTables) -> Int[Array, " rows"]:
        return jnp.maximum(tables.seq_lens // block_size - tables.chains.num_blocks, 0)

    def more(carry: Carry) -> Bool[Array, ""]:
        tables, status = carry
        return jnp.any(num_full(tables) > 0) & (status == Status.OK)

    def insert(carry: Carry) -> Carry:
        tables, status = carry
        num_tokens = (tables.chains.num_blocks + dealt(num_full(tables), max_blocks)) * block_size
        keys = functools.partial(admission.cache_keys, rows, config=config)
        tables, info = block_table.cache_full_blocks(tables, keys, num_tokens, max_blocks=max_blocks)
        return tables, status | info.status

    now = computes_prompt | is_tight | is_eager
    start = (state.tables, jnp.int32(Status.OK))
    tables, status = lax.cond(now, lambda: lax.while_loop(more, insert, start), lambda: start)
    return replace(state, tables=tables, status=state.status | status)


def clean_up(state: EngineState, config: StepConfig) -> EngineState:
    """Free the blocks of finished rows, and those that have left running rows' windows."""
    state = state.on_tables(block_table.free_rows, state.rows.phase == Phase.FINISHED)
    return state.on_tables(block_table.slide_windows, state.rows.running, config.grouping.specs)
