"""Scheduling: which rows run next, and with how many tokens. Pure functions of the state's small
integers.

Requests are served in order of priority, then arrival. Running rows come first; when blocks run out, the last
of them in order is preempted. A waiting request is admitted when there are blocks for all its known tokens
beside those of the running rows, and some to grow into; no request overtakes another. So the first running
row in order always goes on, and every request has its turn. First come, first served: a request has finished
after as many steps as it and the unfinished requests before it have work, where a request's work is a step
for each tile of its prompt and for each token of its answer but the first. `reference/engine.py` has the
proof. A row that rests for the host keeps its place meanwhile.

A follower is one of several answers to a prompt. It waits while the leader's prompt is computed, and runs
from the step that completes it: it takes over the blocks. A follower that finds no room then is a request
like any other.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.memory import block_table, copy_on_write, kv_cache, swap
from jaxpaged.memory.block_pool import in_any, in_every
from jaxpaged.step.admission import admit, may_admit
from jaxpaged.step.config import StepConfig
from jaxpaged.step.plan import Plan, plan
from jaxpaged.step.state import Counter, EngineState, FinishReason, HostPool, Phase, Rows
from jaxpaged.step.waiting import note_waiting


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Decision:
    """Decisions of `schedule`, for tests, traces and replay."""

    plan: Plan
    admitted: Bool[Array, " rows"]
    num_hit_blocks: Int[Array, " rows"]  # blocks found for the admitted rows
    preempted: Bool[Array, " rows"]
    swapped: Bool[Array, " rows"]  # preempted, and swapped out
    leader_row: Int[Array, " rows"]  # source of an admitted follower's blocks; other rows: their own


def schedule(state: EngineState, config: StepConfig) -> tuple[EngineState, Decision]:
    """Preempt rows that have no room, else admit requests that have; then plan what each running row
    computes.

    The blocks that the plan needs are free afterwards, but not taken yet.
    """
    state = note_waiting(state, config)
    no_rows, no_hits = jnp.zeros(state.tables.max_seqs, bool), jnp.zeros_like(state.rows.phase)
    own_row = jnp.arange(state.tables.max_seqs, dtype=jnp.int32)
    quiet = Decision(plan(state, config), no_rows, no_hits, no_rows, no_rows, own_row)

    # Nothing is written yet here, and no row that continues to run changes.
    last_ids = copy_on_write.last_blocks(state.tables)

    def replan() -> tuple[EngineState, Decision]:
        after, preempted, swapped = _preempt(state, last_ids, config)
        after, admitted, num_hits, leader_row = admit(after, last_ids, config, may_start=~jnp.any(preempted))
        planned = plan(after, config)
        forks = _beams_fork(after, planned)
        leader_row = jnp.where(forks, after.rows.beams.head, leader_row)
        phase = jnp.where(forks, Phase.FORKING, after.rows.phase)
        after = replace(after, rows=replace(after.rows, phase=phase))
        return after, Decision(planned, admitted, num_hits, preempted, swapped, leader_row)

    changes = in_any(_blocks_short(state, last_ids, quiet.plan) > 0)
    changes |= may_admit(state, last_ids, quiet.plan, config) | jnp.any(_beams_fork(state, quiet.plan))
    return lax.cond(changes, replan, lambda: (state, quiet))


def _beams_fork(state: EngineState, plan: Plan) -> Bool[Array, " rows"]:
    """Return the beams that fork in this step: the step completes the prompt of their search."""
    rows, computed = state.rows, state.tables.seq_lens
    is_done = (computed < rows.prompt_lens) & (computed + plan.num_new_tokens == rows.prompt_lens)
    return rows.following & is_done[rows.beams.head]


def any_work(rows: Rows) -> Bool[Array, ""]:
    """Return whether any row runs or waits; beside rows that rest, whether another runs."""
    if not rows.may_rest:
        return jnp.any(rows.running | rows.waiting)
    rests = rows.resting
    return jnp.any(rows.running & ~rests) | (jnp.any(rows.waiting) & ~jnp.any(rests))


def abort(state: EngineState, arrivals: Int[Array, " n"]) -> EngineState:
    """End the unfinished requests with these arrivals; an arrival that is in no row does nothing."""
    rows = state.rows
    aborted = (rows.admitted | rows.waiting | rows.held) & jnp.any(rows.arrival[:, None] == arrivals, axis=1)
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


def _blocks_short(
    state: EngineState, last_ids: Int[Array, " lines"], plan: Plan
) -> Int[Array, "*num_classes"]:
    """Return how many blocks the plan needs beyond those that are free; with several size classes of each."""
    needed, _ = copy_on_write.new_blocks(state.tables, last_ids, plan.num_new_tokens)
    return state.tables.total(needed) - state.tables.pool.num_free


def _preempt(
    state: EngineState, last_ids: Int[Array, " lines"], config: StepConfig
) -> tuple[EngineState, Bool[Array, " rows"], Bool[Array, " rows"]]:
    """Preempt running rows, the last in order first, until the others' plan fits. Returns the state, the
    preempted rows, and those of them that were swapped out.
    """
    no_rows = jnp.zeros(state.tables.max_seqs, bool)
    type Carry = tuple[EngineState, Bool[Array, " rows"], Bool[Array, " rows"]]

    def short(carry: Carry) -> Bool[Array, ""]:
        state = carry[0]
        runs = jnp.any(state.rows.running)
        return runs & in_any(_blocks_short(state, last_ids, plan(state, config)) > 0)

    def preempt_last(carry: Carry) -> Carry:
        state, preempted, swapped = carry
        order = state.rows.order
        place = jnp.max(jnp.where(state.rows.running[order], jnp.arange(order.shape[0]), 0))
        last = state.rows.admitted & state.rows.in_group_of(order[place])
        if state.host is not None:  # beams are recomputed instead, because swapped blocks are not shared
            state, moved = _swap_out(state, state.host, last & (state.rows.beams.width == 0))
            swapped |= moved
        phase = jnp.where(last, jnp.where(swapped, Phase.SWAPPED, Phase.WAITING), state.rows.phase)
        state = replace(state, rows=replace(state.rows, phase=phase))
        state = state.on_tables(block_table.free_rows, last)
        return state.count({Counter.NUM_PREEMPTIONS: 1}), preempted | last, swapped

    return lax.while_loop(short, preempt_last, (state, no_rows, no_rows))


def _swap_out(
    state: EngineState, host: HostPool, rows: Bool[Array, " rows"]
) -> tuple[EngineState, Bool[Array, " rows"]]:
    """Move the masked row's blocks to the host if there is room, and return which row was moved."""
    # This is not in a `cond`, which would copy the cache on a GPU.
    tables = state.tables
    if tables.num_classes == 1:
        fits = jnp.sum(jnp.where(rows, tables.num_held, 0)) <= host.tables.pool.num_free
    else:
        held = jnp.sum(jnp.where(rows[:, None], tables.num_held, 0), axis=0)
        fits = in_every(held <= host.tables.pool.num_free)
    max_blocks = tables.max_blocks_per_row
    tables, host_tables, info = swap.swap_out(tables, host.tables, rows & fits, max_blocks=max_blocks)
    host_cache = kv_cache.copy_blocks(state.kv_cache, host.kv_cache, info.sources, info.destinations)
    state = replace(
        state, tables=tables, host=HostPool(host_tables, host_cache), status=state.status | info.status
    )
    return state, rows & fits & (host_tables.seq_lens > 0)


def fork_tables(state: EngineState, leader_row: Int[Array, " rows"], config: StepConfig) -> EngineState:
    """Share the blocks of a leader with each row that follows it, except blocks outside the row's window.

    One row after the other.
    """
    index = jnp.arange(leader_row.shape[0], dtype=jnp.int32)
    type Carry = tuple[EngineState, Bool[Array, " rows"]]

    def fork(carry: Carry) -> Carry:
        state, follows = carry
        follower = jnp.argmax(follows).astype(jnp.int32)[None]
        state = state.on_tables(block_table.fork, leader_row[follower], follower, jnp.ones(1, bool))
        state = state.on_tables(block_table.slide_windows, index == follower, config.grouping.specs)
        return state, follows & (index != follower)

    return lax.while_loop(lambda carry: jnp.any(carry[1]), fork, (state, leader_row != index))[0]
