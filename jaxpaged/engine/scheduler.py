"""Who runs next, and with how many tokens: pure functions of the state's small integers.

Requests are served in order of priority, then arrival. Running rows come first; of them, the last in order
gives way when blocks run out. A waiting request is admitted when the blocks for all its tokens known so far
are there beside those of the running ones, and some to grow into; nobody overtakes. So the first in order
among the running ones always goes on, and everyone has their turn: first come, first served, a request has
finished after as many steps as it and those unfinished before it have work, where a request's work is a step
for each tile of its prompt and each token of its answer but the first. `reference/engine.py` has the proof.

A follower, one of several answers of a prompt, waits while the leader's prompt is computed, and runs from the
step on in which that is done: it takes over the blocks. Who then finds no room is a request like any other.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.engine.state import Counter, EngineState, FinishReason, HostPool, Phase, Rows, none_turned_away
from jaxpaged.engine.step_config import StepConfig
from jaxpaged.memory import block_table, kv_cache, prefix_cache, swap
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.entries import PIECE, dealt, in_pieces, number_through
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
    leader_row: Int[Array, " rows"]  # whose blocks an admitted follower takes over; for others their own row


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
    own_row = jnp.arange(state.tables.max_seqs, dtype=jnp.int32)
    quiet = Decision(plan(state, config), nobody, no_hits, nobody, nobody, own_row)

    # Here, where nothing is written yet, and of no row that goes on to run does it change.
    last_ids = block_table.last_blocks(state.tables)

    def replan() -> tuple[EngineState, Decision]:
        after, preempted, swapped = _preempt(state, last_ids, config)
        after, admitted, num_hits, leader_row = _admit(after, last_ids, config, may=~jnp.any(preempted))
        planned = plan(after, config)
        forks = _beams_fork(after, planned)
        leader_row = jnp.where(forks, after.rows.beams.head, leader_row)
        phase = jnp.where(forks, Phase.FORKING, after.rows.phase)
        after = replace(after, rows=replace(after.rows, phase=phase))
        return after, Decision(planned, admitted, num_hits, preempted, swapped, leader_row)

    changes = _blocks_short(state, last_ids, quiet.plan) > 0
    changes |= _may_admit(state, last_ids, quiet.plan, config) | jnp.any(_beams_fork(state, quiet.plan))
    return lax.cond(changes, replan, lambda: (state, quiet))


def _beams_fork(state: EngineState, plan: Plan) -> Bool[Array, " rows"]:
    """The beams whose group's prompt will be done."""
    rows, computed = state.rows, state.tables.seq_lens
    is_done = (computed < rows.prompt_lens) & (computed + plan.num_new_tokens == rows.prompt_lens)
    return rows.following & is_done[rows.beams.head]


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


def _blocks_short(state: EngineState, last_ids: Int[Array, " rows"], plan: Plan) -> Int[Array, ""]:
    """Blocks that the plan needs beyond those that are free."""
    needed, _ = block_table.new_blocks(state.tables, last_ids, plan.num_new_tokens)
    return jnp.sum(needed) - state.tables.pool.num_free


def _preempt(
    state: EngineState, last_ids: Int[Array, " rows"], config: StepConfig
) -> tuple[EngineState, Bool[Array, " rows"], Bool[Array, " rows"]]:
    """Take running rows out, the last in order first, until the others' plan fits; who, and who swapped."""
    nobody = jnp.zeros(state.tables.max_seqs, bool)
    type Carry = tuple[EngineState, Bool[Array, " rows"], Bool[Array, " rows"]]

    def short(carry: Carry) -> Bool[Array, ""]:
        state = carry[0]
        return jnp.any(state.rows.running) & (_blocks_short(state, last_ids, plan(state, config)) > 0)

    def preempt_last(carry: Carry) -> Carry:
        state, preempted, swapped = carry
        order = state.rows.order
        place = jnp.max(jnp.where(state.rows.running[order], jnp.arange(order.shape[0]), 0))
        last = state.rows.admitted & _in_group_of(state.rows, order[place])
        if state.host is not None:  # beams are computed again: swapped out they would not share what they do
            state, moved = _swap_out(state, state.host, last & (state.rows.beams.width == 0))
            swapped |= moved
        phase = jnp.where(last, jnp.where(swapped, Phase.SWAPPED, Phase.WAITING), state.rows.phase)
        state = replace(state, rows=replace(state.rows, phase=phase))
        state = state.on_tables(block_table.free_rows, last)
        return state.count({Counter.NUM_PREEMPTIONS: 1}), preempted | last, swapped

    return lax.while_loop(short, preempt_last, (state, nobody, nobody))


def _in_group_of(rows: Rows, row: Int[Array, ""]) -> Bool[Array, " rows"]:
    """The row, and all rows that are or were in a beam search with it."""
    width, head = rows.beams.width, rows.beams.head
    return ((width * width[row] > 0) & (head == head[row])) | (jnp.arange(head.shape[0]) == row)


class _Admission(NamedTuple):
    state: EngineState
    admitted: Bool[Array, " rows"]
    num_hits: Int[Array, " rows"]
    leader_row: Int[Array, " rows"]
    goes_on: Bool[Array, ""]


def _admit(
    state: EngineState, last_ids: Int[Array, " rows"], config: StepConfig, may: Bool[Array, ""]
) -> tuple[EngineState, Bool[Array, " rows"], Int[Array, " rows"], Int[Array, " rows"]]:
    """Let waiting requests run in their order while there is room.

    Who, how many blocks each hit, and the rows whose blocks followers take over.
    """
    own_row = jnp.arange(state.tables.max_seqs, dtype=jnp.int32)

    def try_next(so_far: _Admission) -> _Admission:
        state = so_far.state
        row = _first_waiting(state.rows)
        free = state.tables.pool.num_free - _reserved(state, last_ids, config)
        leader, follows = _leader_in_prompt(state, row)
        forks = follows & (_need_of_fork(state)[row] <= free)
        found = _look_for_room(state, row, free, ~follows, config)
        # All else without the state: each `cond` that the cache goes through may copy it on a GPU.
        started = lax.cond(found.fits, lambda: _start(state, row, found.hit, config), lambda: state)
        phase = started.rows.phase.at[row].set(jnp.where(forks, Phase.FORKING, started.rows.phase[row]))
        its_beams = started.rows.waiting & _in_group_of(started.rows, row)
        phase = jnp.where(its_beams & found.fits, Phase.FOLLOWING, phase)
        waits = found.is_looked_up & ~found.fits
        turned_away = jnp.where(waits, jnp.stack([row, found.held]), started.turned_away)
        state = replace(started, rows=replace(started.rows, phase=phase), turned_away=turned_away)
        ok = forks | found.fits
        return _Admission(
            state,
            so_far.admitted.at[row].max(ok),
            so_far.num_hits.at[row].add(jnp.where(found.fits, found.hit.chain.num_blocks, 0)),
            so_far.leader_row.at[row].set(jnp.where(forks, leader, row)),
            goes_on=ok & _may_admit(state, last_ids, plan(state, config), config),
        )

    nobody = jnp.zeros(state.tables.max_seqs, bool)
    goes_on = may & _may_admit(state, last_ids, plan(state, config), config)
    start = _Admission(state, nobody, jnp.zeros_like(state.rows.phase), own_row, goes_on)
    return lax.while_loop(lambda so_far: so_far.goes_on, try_next, start)[:-1]


def _may_admit(
    state: EngineState, last_ids: Int[Array, " rows"], plan: Plan, config: StepConfig
) -> Bool[Array, ""]:
    """Whether the next waiting request might be admitted: there is a slot, some block, and a tile; or, for a
    follower, the end of its leader's prompt.
    """
    rows, tables = state.rows, state.tables
    num_left = config.max_num_seqs - jnp.sum(rows.admitted)

    def has_room() -> Bool[Array, ""]:
        first = _first_waiting(rows)
        has_block = _reserved(state, last_ids, config) <= tables.pool.num_free
        leader, follows = _leader_in_prompt(state, first)
        is_done = tables.seq_lens[leader] + plan.num_new_tokens[leader] == rows.prompt_lens[leader]
        may = jnp.where(follows, is_done, jnp.sum(plan.num_tiles) < config.num_tiles)
        return has_block & may & (rows.beams.width[first] <= num_left)

    return lax.cond(jnp.any(rows.waiting) & (num_left > 0), has_room, lambda: jnp.bool_(False))


def _first_waiting(rows: Rows) -> Int[Array, ""]:
    return rows.order[jnp.argmax(rows.waiting[rows.order])]


def _leader_in_prompt(state: EngineState, row: Int[Array, ""]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """The running row with an unfinished prompt that a new request follows; and if there is one."""
    rows = state.rows
    in_prompt = rows.running & (state.tables.seq_lens < rows.prompt_lens)
    leads = in_prompt & (rows.arrival == rows.leader[row])
    is_new = (rows.phase[row] == Phase.WAITING) & (rows.num_tokens[row] == rows.prompt_lens[row])
    return jnp.argmax(leads).astype(jnp.int32), is_new & (rows.leader[row] != 0) & jnp.any(leads)


def _reserved(state: EngineState, last_ids: Int[Array, " rows"], config: StepConfig) -> Int[Array, ""]:
    """Free blocks that are not for the next request: for what the running ones have, and to grow into."""
    rows, tables = state.rows, state.tables
    to_come = jnp.maximum(config.blocks_of(rows.num_tokens, tables.block_size) - tables.num_held, 0)
    to_come += block_table.must_copy(tables, last_ids, rows.running.astype(jnp.int32))
    to_come = jnp.where(rows.following, _need_of_beam(state, config), jnp.where(rows.running, to_come, 0))
    to_come = jnp.where(rows.forking, _need_of_fork(state), to_come)
    num_active = jnp.sum(rows.admitted, dtype=jnp.int32)
    return jnp.sum(to_come) + jnp.where(num_active > 0, config.watermark_blocks + num_active, 0)


def _need_of_fork(state: EngineState) -> Int[Array, " rows"]:
    """Blocks for the copy of a block that is partly filled with the prompt."""
    return (state.rows.prompt_lens % state.tables.block_size != 0).astype(jnp.int32)


def _need_of_beam(state: EngineState, config: StepConfig) -> Int[Array, " rows"]:
    """Blocks for what is known of a beam beside its head's: all but those that its prompt fills.

    With a window those may be gone when it forks.
    """
    rows, block_size = state.rows, state.tables.block_size
    shared = rows.prompt_lens // block_size if config.sliding_window is None else 0
    return config.blocks_of(rows.num_tokens, block_size) - shared


class _Found(NamedTuple):
    is_looked_up: Bool[Array, ""]
    fits: Bool[Array, ""]  # and nothing is to be waited for
    hit: Hit
    held: Int[Array, ""]  # blocks of the hit that others hold


def _look_for_room(
    state: EngineState, row: Int[Array, ""], free: Int[Array, ""], may: Bool[Array, ""], config: StepConfig
) -> _Found:
    """Whether so many free blocks have room for a waiting request, which is looked up if they might."""
    rows, tables = state.rows, state.tables
    # Blocks that have to be free, or held by others and shared.
    need = config.blocks_of(rows.num_tokens[row], tables.block_size)
    need += jnp.maximum(rows.beams.width[row] - 1, 0) * _need_of_beam(state, config)[row]
    turned_away, most_held = state.turned_away
    may_fit = may & ((row != turned_away) | (need - most_held <= free))

    def look_up() -> _Found:
        hit, defers = _look_up(state, row, config)
        held, shared = _held_by_others(tables, hit, config)
        return _Found(jnp.bool_(True), (need - shared <= free) & ~defers, hit, held)

    shapes = jax.eval_shape(look_up)
    nothing = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    return lax.cond(may_fit, look_up, lambda: nothing)


def fork_tables(state: EngineState, leader_row: Int[Array, " rows"], config: StepConfig) -> EngineState:
    """Let each row whose leader is another row hold that one's blocks too, but for those that its own next
    token does not see; one after the other.
    """
    index = jnp.arange(leader_row.shape[0], dtype=jnp.int32)
    type Carry = tuple[EngineState, Bool[Array, " rows"]]

    def fork(carry: Carry) -> Carry:
        state, follows = carry
        follower = jnp.argmax(follows).astype(jnp.int32)[None]
        state = state.on_tables(block_table.fork, leader_row[follower], follower, jnp.ones(1, bool))
        state = state.on_tables(block_table.slide_windows, index == follower, config.sliding_window)
        return state, follows & (index != follower)

    return lax.while_loop(lambda carry: jnp.any(carry[1]), fork, (state, leader_row != index))[0]


def _look_up(state: EngineState, row: Int[Array, ""], config: StepConfig) -> tuple[Hit, Bool[Array, ""]]:
    """What the prefix cache has for a request; and if it should rather wait for what is being computed."""
    rows, tables = state.rows, state.tables
    cache = tables.pool.prefix_cache
    # Of a group only the prompt is looked up: the others fork when it is done.
    salt, is_alone = rows.salt[row], rows.beams.width[row] == 0
    num_tokens = jnp.where(is_alone, rows.num_tokens[row], rows.prompt_lens[row])
    if cache is None:
        nothing = Hit(jnp.zeros(0, jnp.int32), prefix_cache.root(None, salt))
        return nothing, jnp.bool_(False)
    is_new = (rows.phase[row] == Phase.WAITING) & ~rows.tells_prompt[row]
    hit = prefix_cache.lookup(
        cache,
        lambda positions: cache_keys(rows, jnp.full_like(positions, row), positions, config),
        jnp.where(is_new, num_tokens, 0),
        salt,
        max_tokens=rows.token_ids.shape[1],
    )
    # Some running row will soon have made findable at least a tile more than is, if its prompt begins so.
    wanted = (hit.chain.num_blocks + cdiv(PREFILL_TILE, tables.block_size)) * tables.block_size
    computing = rows.running & (tables.seq_lens < rows.prompt_lens) & (rows.salt == salt)
    computing &= is_new & (wanted <= jnp.minimum(rows.prompt_lens, rows.prompt_lens[row]))
    return hit, _any_begins_alike(rows, row, computing & (wanted < num_tokens), wanted)


def _any_begins_alike(
    rows: Rows, row: Int[Array, ""], others: Bool[Array, " rows"], num_tokens: Int[Array, ""]
) -> Bool[Array, ""]:
    """Whether the first tokens of a masked row are those of another row; one after the other, in pieces."""
    size = min(8 * PIECE, rows.token_ids.shape[1])
    type Search = tuple[Bool[Array, " rows"], Int[Array, ""]]

    def piece(row: Int[Array, ""], start: Int[Array, ""]) -> Int[Array, " size"]:
        return lax.dynamic_slice(rows.token_ids, (row, start), (1, size))[0]

    def compare(search: Search) -> Search:
        left, start = search
        other = jnp.argmax(left)
        first = jnp.minimum(start, rows.token_ids.shape[1] - size)
        beyond = first + jnp.arange(size) >= num_tokens
        alike = jnp.all(beyond | (piece(row, first) == piece(other, first)))
        return left.at[other].set(alike), jnp.where(alike, start + size, 0)

    def goes_on(search: Search) -> Bool[Array, ""]:
        return jnp.any(search[0]) & (search[1] < num_tokens)

    return jnp.any(lax.while_loop(goes_on, compare, (others, jnp.int32(0)))[0])


def _held_by_others(tables: BlockTables, hit: Hit, config: StepConfig) -> Int[Array, "2"]:
    """Blocks of a hit that are not free, and those among them that a row beginning with it can see."""
    if hit.block_ids.shape[0] == 0:
        return jnp.zeros(2, jnp.int32)
    length = hit.chain.num_blocks
    unseen = block_table.num_unseen(length * tables.block_size, config.sliding_window) // tables.block_size

    def count(_: Array, k: Array, used: Array, held: Array) -> Array:
        is_held = used & tables.pool.is_held(hit.block_ids[k])
        return held + jnp.stack([jnp.sum(is_held), jnp.sum(is_held & (k >= unseen))])

    return in_pieces(length[None], count, jnp.zeros(2, jnp.int32))


def loosen(state: EngineState, before: BlockTables) -> EngineState:
    """Raise the bound on what others hold of who was turned away, by what a step has done since `before`.

    A block made findable may go on where the hit ended. One that was taken may have been in the hit, while
    another of its content is held. Nobody was admitted: so there is no third way.
    """
    tables, (row, held) = state.tables, state.turned_away
    taken = before.pool.num_free - tables.pool.num_free
    published = jnp.sum(tables.chains.num_blocks - before.chains.num_blocks)
    return replace(state, turned_away=jnp.stack([row, held + taken + published]))


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
        state = state.on_tables(block_table.slide_windows, this & is_new, config.sliding_window)
    num_hit_tokens = hit.chain.num_blocks * state.tables.block_size
    rows = replace(
        rows,
        phase=jnp.where(this, Phase.RUNNING, rows.phase),
        num_hit_tokens=jnp.where(this & is_new & first_time, num_hit_tokens, rows.num_hit_tokens),
    )
    state = replace(state, rows=rows, turned_away=none_turned_away())
    num_lookup_tokens = jnp.where(is_new & ~rows.tells_prompt[row], rows.num_tokens[row], 0)
    return state.count({Counter.NUM_LOOKUP_TOKENS: num_lookup_tokens, Counter.NUM_HIT_TOKENS: num_hit_tokens})


def _swap_out(
    state: EngineState, host: HostPool, rows: Bool[Array, " rows"]
) -> tuple[EngineState, Bool[Array, " rows"]]:
    """Move the masked row to the host if there is room; who was moved."""
    # Not in a `cond`: on a GPU the cache would be copied on its way through one.
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
