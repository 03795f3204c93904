"""Who runs next, and with how many tokens: pure functions of the state's small integers.

Requests are served in order of priority, then arrival. Running rows come first; of them, the last in order
gives way when blocks run out. A waiting request is admitted when the blocks for all its tokens known so far
are there beside those of the running ones, and some to grow into; nobody overtakes. So the first in order
among the running ones always goes on, and everyone has their turn: first come, first served, a request has
finished after as many steps as it and those unfinished before it have work, where a request's work is a step
for each tile of its prompt and each token of its answer but the first. `reference/engine.py` has the proof.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.engine.state import Counter, EngineState, FinishReason, HostPool, Phase, Rows
from jaxpaged.engine.step_config import StepConfig
from jaxpaged.memory import block_table, kv_cache, prefix_cache, swap
from jaxpaged.memory.entries import dealt, number_through
from jaxpaged.memory.prefix_cache import Hit


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """What each row computes in this step."""

    num_tiles: Int[Array, " rows"]  # prompt tiles; 0 for a row that decodes or does not run
    num_new_tokens: Int[Array, " rows"]  # prompt tokens of these tiles, or 1 for a row that decodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decision:
    """What `schedule` decided: for tests, traces and replay."""

    plan: Plan
    admitted: Bool[Array, " rows"]
    num_hit_blocks: Int[Array, " rows"]  # of the admitted rows
    preempted: Bool[Array, " rows"]
    swapped: Bool[Array, " rows"]  # preempted, and swapped out


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """The work of one forward pass: tiles of `tile_len` neighbouring positions, each of one row.

    A tile computes the positions from `first` to `end`; an unused one has end = 0.
    """

    row: Int[Array, " num_tiles"]
    start: Int[Array, " num_tiles"]  # the tile's first position; of a prompt tile a multiple of tile_len
    first: Int[Array, " num_tiles"]
    end: Int[Array, " num_tiles"]
    tile_len: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Which of the places of a decode step, `max_num_seqs` of them, each running row has."""

    row: Int[Array, " max_num_seqs"]  # beyond all rows where there is none
    of_row: Int[Array, " rows"]  # beyond all slots for a row that does not run


def schedule(state: EngineState, config: StepConfig) -> tuple[EngineState, Decision]:
    """Preempt who has no place, else admit who has; then say what each running row computes.

    The blocks that the plan needs are free afterwards, but not taken yet.
    """
    nobody, no_hits = jnp.zeros(state.tables.max_seqs, bool), jnp.zeros_like(state.rows.phase)
    quiet = Decision(plan(state, config), nobody, no_hits, preempted=nobody, swapped=nobody)

    def replan() -> tuple[EngineState, Decision]:
        after, preempted, swapped = _preempt(state, config)
        after, admitted, num_hits = _admit(after, config, may=~jnp.any(preempted))
        return after, Decision(plan(after, config), admitted, num_hits, preempted, swapped)

    changes = (_blocks_short(state, quiet.plan) > 0) | _may_admit(state, quiet.plan, config)
    return lax.cond(changes, replan, lambda: (state, quiet))


def plan(state: EngineState, config: StepConfig) -> Plan:
    """Share out the step's tiles among the unfinished prompts, in order; every other running row decodes."""
    rows, computed = state.rows, state.tables.seq_lens
    in_prompt = rows.running & (computed < rows.prompt_lens)
    first = computed // PREFILL_TILE
    wants = jnp.where(in_prompt, (rows.prompt_lens - 1) // PREFILL_TILE - first + 1, 0)
    gets = jnp.zeros_like(wants).at[rows.order].set(dealt(wants[rows.order], config.num_tiles))
    end = jnp.minimum(rows.prompt_lens, (first + gets) * PREFILL_TILE)
    prompt_tokens = jnp.where(gets > 0, end - computed, 0)
    return Plan(gets, jnp.where(in_prompt, prompt_tokens, rows.running.astype(jnp.int32)))


def prompt_tiles(state: EngineState, plan: Plan, num_tiles: int) -> Tiles:
    """The plan's prompt tiles, for the state in which its tokens have places already.

    A prompt may get several tiles at once: each sees the ones before it, for all K and V are written first.
    """
    order = state.rows.order
    place, k, used = number_through(plan.num_tiles[order], num_tiles)
    row = order[place]
    end = state.tables.seq_lens[row]
    first = end - plan.num_new_tokens[row]
    start = (first // PREFILL_TILE + k) * PREFILL_TILE
    return Tiles(
        row=row,
        start=jnp.where(used, start, 0),
        first=jnp.maximum(start, first),
        end=jnp.where(used, jnp.minimum(start + PREFILL_TILE, end), 0),
        tile_len=PREFILL_TILE,
    )


def decode_tiles(state: EngineState, plan: Plan, slots: Slots) -> Tiles:
    """One position of every row that decodes, in the row's slot; its token has a place already."""
    max_seqs = state.tables.max_seqs
    row = jnp.minimum(slots.row, max_seqs - 1)
    end = state.tables.seq_lens[row]
    decodes = (slots.row < max_seqs) & (plan.num_tiles[row] == 0) & (plan.num_new_tokens[row] > 0)
    start = jnp.where(decodes, end - 1, 0)
    return Tiles(row=row, start=start, first=start, end=jnp.where(decodes, end, 0), tile_len=1)


def slots_of(running: Bool[Array, " rows"], max_num_seqs: int) -> Slots:
    """The running rows side by side."""
    rank = jnp.cumsum(running, dtype=jnp.int32) - 1
    of_row = jnp.where(running, rank, max_num_seqs)
    index = jnp.arange(running.shape[0], dtype=jnp.int32)
    row = jnp.full(max_num_seqs, running.shape[0], jnp.int32).at[of_row].set(index, mode="drop")
    return Slots(row, of_row)


def any_work(rows: Rows) -> Bool[Array, ""]:
    return jnp.any(rows.running | rows.waiting)


def cache_keys(
    rows: Rows, row: Int[Array, "*n"], positions: Int[Array, "*n"], config: StepConfig
) -> Int[Array, "*n"]:
    """What the prefix cache takes the token at a position of a row for.

    An answer's token differs from a prompt's with the same id: its K and V were computed in another shape,
    and may differ in their last bits. So what is found has just the bits that computing it would give.
    """
    token = rows.token_ids.at[row, positions].get(mode="clip")
    if config.reuse_answers:
        return token
    return jnp.where(positions < rows.prompt_lens[row], token, -1 - token)


def abort(state: EngineState, arrivals: Int[Array, " n"]) -> EngineState:
    """End the unfinished requests with these arrivals; an arrival that is in no row does nothing."""
    rows = state.rows
    aborted = (rows.running | rows.waiting) & jnp.any(rows.arrival[:, None] == arrivals, axis=1)
    rows = replace(
        rows,
        phase=jnp.where(aborted, Phase.FINISHED, rows.phase),
        finish_reason=jnp.where(aborted, FinishReason.ABORT, rows.finish_reason),
    )
    state = replace(state, rows=rows).on_tables(block_table.free_rows, aborted)
    if state.host is None:
        return state
    host_tables, freed = block_table.free_rows(state.host.tables, aborted)
    return replace(state, host=replace(state.host, tables=host_tables), status=state.status | freed.status)


def _blocks_short(state: EngineState, plan: Plan) -> Int[Array, ""]:
    """Blocks that the plan needs beyond those that are free."""
    tables = state.tables
    needed = cdiv(tables.seq_lens + plan.num_new_tokens, tables.block_size) - tables.num_blocks
    return jnp.sum(needed) - tables.pool.num_free


def _preempt(
    state: EngineState, config: StepConfig
) -> tuple[EngineState, Bool[Array, " rows"], Bool[Array, " rows"]]:
    """Take running rows out, the last in order first, until the others' plan fits; who, and who swapped."""
    nobody = jnp.zeros(state.tables.max_seqs, bool)
    type Carry = tuple[EngineState, Bool[Array, " rows"], Bool[Array, " rows"]]

    def short(carry: Carry) -> Bool[Array, ""]:
        state = carry[0]
        return jnp.any(state.rows.running) & (_blocks_short(state, plan(state, config)) > 0)

    def preempt_last(carry: Carry) -> Carry:
        state, preempted, swapped = carry
        order = state.rows.order
        place = jnp.max(jnp.where(state.rows.running[order], jnp.arange(order.shape[0]), 0))
        last = jnp.arange(order.shape[0]) == order[place]
        if state.host is not None:
            state, moved = _swap_out(state, state.host, last)
            swapped |= moved
        phase = jnp.where(last, jnp.where(swapped, Phase.SWAPPED, Phase.WAITING), state.rows.phase)
        state = replace(state, rows=replace(state.rows, phase=phase))
        state = state.on_tables(block_table.free_rows, last)
        return state.count({Counter.NUM_PREEMPTIONS: 1}), preempted | last, swapped

    return lax.while_loop(short, preempt_last, (state, nobody, nobody))


def _admit(
    state: EngineState, config: StepConfig, may: Bool[Array, ""]
) -> tuple[EngineState, Bool[Array, " rows"], Int[Array, " rows"]]:
    """Let waiting requests run in their order while there is room; who, and how many blocks each hit."""
    type Carry = tuple[EngineState, Bool[Array, " rows"], Int[Array, " rows"], Bool[Array, ""]]

    def try_next(carry: Carry) -> Carry:
        state, admitted, num_hits, _ = carry
        rows, tables = state.rows, state.tables
        row = rows.order[jnp.argmax(rows.waiting[rows.order])]
        hit, defers = _look_up(state, row, config)
        length = hit.chain.num_blocks
        unseen = block_table.num_unseen(length * tables.block_size, config.sliding_window)
        place = jnp.arange(hit.block_ids.shape[0])
        kept = (place >= unseen // tables.block_size) & (place < length)
        held_by_others = jnp.sum(kept & (tables.pool.ref_count[hit.block_ids] > 0), dtype=jnp.int32)
        need = config.blocks_of(rows.num_tokens[row], tables.block_size) - held_by_others
        fits = need + _reserved(state, config) <= tables.pool.num_free
        ok = fits & ~defers
        state = lax.cond(ok, lambda: _start(state, row, hit, config), lambda: state)
        goes_on = ok & _may_admit(state, plan(state, config), config)
        return state, admitted.at[row].max(ok), num_hits.at[row].add(jnp.where(ok, length, 0)), goes_on

    nobody = jnp.zeros(state.tables.max_seqs, bool)
    goes_on = may & _may_admit(state, plan(state, config), config)
    start = (state, nobody, jnp.zeros_like(state.rows.phase), goes_on)
    state, admitted, num_hits, _ = lax.while_loop(lambda carry: carry[3], try_next, start)
    return state, admitted, num_hits


def _may_admit(state: EngineState, plan: Plan, config: StepConfig) -> Bool[Array, ""]:
    """Whether the next waiting request might be admitted: there is a slot, a tile, and some block."""
    rows = state.rows
    has_slot = jnp.sum(rows.running) < config.max_num_seqs
    has_tile = jnp.sum(plan.num_tiles) < config.num_tiles
    has_block = _reserved(state, config) <= state.tables.pool.num_free
    return jnp.any(rows.waiting) & has_slot & has_tile & has_block


def _reserved(state: EngineState, config: StepConfig) -> Int[Array, ""]:
    """Free blocks that are not for the next request: for tokens the running ones know, and to grow into."""
    rows, tables = state.rows, state.tables
    to_come = jnp.maximum(config.blocks_of(rows.num_tokens, tables.block_size) - tables.num_held, 0)
    num_running = jnp.sum(rows.running, dtype=jnp.int32)
    spare = jnp.where(num_running > 0, config.watermark_blocks + num_running, 0)
    return jnp.sum(jnp.where(rows.running, to_come, 0)) + spare


def _look_up(state: EngineState, row: Int[Array, ""], config: StepConfig) -> tuple[Hit, Bool[Array, ""]]:
    """What the prefix cache has for a request; and if it should rather wait for what is being computed."""
    rows, tables = state.rows, state.tables
    cache = tables.pool.prefix_cache
    salt, num_tokens = rows.salt[row], rows.num_tokens[row]
    if cache is None:
        nothing = Hit(jnp.zeros(0, jnp.int32), prefix_cache.root(None, salt))
        return nothing, jnp.bool_(False)
    is_new = (rows.phase[row] == Phase.WAITING) & ~rows.tells_prompt[row]
    positions = jnp.arange(rows.token_ids.shape[1], dtype=jnp.int32)
    keys = cache_keys(rows, jnp.broadcast_to(row, positions.shape), positions, config)
    hit = prefix_cache.lookup(cache, keys, jnp.where(is_new, num_tokens, 0), salt)

    computing = rows.running & (tables.seq_lens < rows.prompt_lens) & (rows.salt == salt)

    def gains() -> Bool[Array, ""]:
        """Whether some running row will soon have made findable at least a tile more than is."""
        differs = rows.token_ids != rows.token_ids[row]
        common = jnp.where(jnp.any(differs, axis=1), jnp.argmax(differs, axis=1), differs.shape[1])
        common = jnp.minimum(jnp.minimum(common, rows.prompt_lens), rows.prompt_lens[row])
        shared = jnp.minimum(common, num_tokens - 1) // tables.block_size - hit.chain.num_blocks
        return jnp.any(computing & (shared * tables.block_size >= PREFILL_TILE))

    defers = lax.cond(is_new & jnp.any(computing), gains, lambda: jnp.bool_(False))
    return hit, defers


def _start(state: EngineState, row: Int[Array, ""], hit: Hit, config: StepConfig) -> EngineState:
    """Let a waiting row run: with the blocks it hit, or with its own back from the host."""
    rows = state.rows
    this = jnp.arange(state.tables.max_seqs) == row
    is_new = rows.phase[row] == Phase.WAITING
    first_time = rows.num_tokens[row] == rows.prompt_lens[row]
    if state.host is not None:
        state = _swap_in(state, state.host, this & ~is_new)
    if state.tables.pool.prefix_cache is not None:
        chain = jax.tree.map(lambda leaf: leaf[None], hit.chain)
        state = state.on_tables(block_table.adopt, row[None], hit.block_ids[None], chain, is_new[None])
        window, max_blocks = config.sliding_window, hit.block_ids.shape[0]
        state = state.on_tables(block_table.slide_windows, this & is_new, window, max_blocks=max_blocks)
    num_hit_tokens = hit.chain.num_blocks * state.tables.block_size
    rows = replace(
        rows,
        phase=jnp.where(this, Phase.RUNNING, rows.phase),
        num_hit_tokens=jnp.where(this & is_new & first_time, num_hit_tokens, rows.num_hit_tokens),
    )
    state = replace(state, rows=rows)
    num_lookup_tokens = jnp.where(is_new & ~rows.tells_prompt[row], rows.num_tokens[row], 0)
    return state.count({Counter.NUM_LOOKUP_TOKENS: num_lookup_tokens, Counter.NUM_HIT_TOKENS: num_hit_tokens})


def _swap_out(
    state: EngineState, host: HostPool, rows: Bool[Array, " rows"]
) -> tuple[EngineState, Bool[Array, " rows"]]:
    """Move the masked row to the host if there is room; who was moved."""
    fits = jnp.sum(jnp.where(rows, state.tables.num_held, 0)) <= host.tables.pool.num_free
    tables, host_tables, info = swap.swap_out(
        state.tables, host.tables, rows & fits, max_blocks=state.tables.max_blocks_per_seq
    )
    host_cache = kv_cache.copy_blocks(state.kv_cache, host.kv_cache, info.sources, info.destinations)
    state = replace(
        state, tables=tables, host=HostPool(host_tables, host_cache), status=state.status | info.status
    )
    return state, rows & fits & (host_tables.seq_lens > 0)


def _swap_in(state: EngineState, host: HostPool, rows: Bool[Array, " rows"]) -> EngineState:
    tables, host_tables, info = swap.swap_in(
        state.tables, host.tables, rows, max_blocks=state.tables.max_blocks_per_seq
    )
    return replace(
        state,
        tables=tables,
        kv_cache=kv_cache.copy_blocks(host.kv_cache, state.kv_cache, info.sources, info.destinations),
        host=replace(host, tables=host_tables),
        status=state.status | info.status,
    )
