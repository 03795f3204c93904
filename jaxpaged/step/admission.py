"""Admission: decide whether the first waiting request fits, and which cached blocks it starts with.

A waiting request is admitted when there are blocks for all its known tokens beside those of the running rows,
and some to grow into. No request overtakes another. A follower is one of several answers to a prompt: it
waits while its leader's prompt is computed, and then takes over the leader's blocks. A follower that finds no
room then is a request like any other. The beams of a search are admitted all at once.

Looking a prompt up in the prefix cache is the expensive part, and a request that does not fit would be looked
up in every step. So the state remembers, in `last_rejected`, the row that was looked up last without fitting
and an upper bound of how many of the blocks it found other rows hold: [row, bound]. Such blocks are shared,
not taken, so the row fits only if the blocks it needs minus the bound are free. Until then it is not looked
up again. `raise_held_bound` raises the bound after each step by what the step did; admitting a request or
submitting new ones forgets it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.memory import block_table, copy_on_write, group_content, kv_cache, prefix_cache, swap
from jaxpaged.memory.block_pool import in_every
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.cache_specs import CacheSpec
from jaxpaged.memory.entries import CHUNK, in_chunks
from jaxpaged.memory.prefix_cache import Hit
from jaxpaged.step.config import StepConfig
from jaxpaged.step.plan import Plan, plan
from jaxpaged.step.state import Counter, EngineState, HostPool, Phase, Rows, no_rejection

NO_BOUND = 2**30  # more blocks than a pool has


class _Admission(NamedTuple):
    """Requests admitted so far, and whether the next one is tried."""

    state: EngineState
    admitted: Bool[Array, " rows"]
    num_hits: Int[Array, " rows"]
    leader_row: Int[Array, " rows"]
    goes_on: Bool[Array, ""]


def admit(
    state: EngineState, last_ids: Int[Array, " lines"], config: StepConfig, may_start: Bool[Array, ""]
) -> tuple[EngineState, Bool[Array, " rows"], Int[Array, " rows"], Int[Array, " rows"]]:
    """Let waiting requests run in their order while there is room; none where `may_start` is false.

    Returns the state, which rows were admitted, how many blocks each found in the prefix cache, and for each
    row the row whose blocks it takes over: for a follower its leader, for others the row itself.
    """
    own_row = jnp.arange(state.tables.max_seqs, dtype=jnp.int32)

    def try_next(so_far: _Admission) -> _Admission:
        state = so_far.state
        row = _first_waiting(state.rows)
        free = state.tables.pool.num_free - _reserved(state, last_ids, config)
        leader, follows = _leader_in_prompt(state, row)
        forks = follows & in_every(_need_of_fork(state, config)[row] <= free)
        hit = _look_for_room(state, row, free, ~follows, config)
        # The rest does not take the state: a `cond` that the cache passes through may copy it on a GPU.
        started = lax.cond(hit.fits, lambda: _start(state, row, hit.hit, config), lambda: state)
        phase = started.rows.phase.at[row].set(jnp.where(forks, Phase.FORKING, started.rows.phase[row]))
        its_beams = started.rows.waiting & started.rows.in_group_of(row)
        phase = jnp.where(its_beams & hit.fits, Phase.FOLLOWING, phase)
        waits = hit.is_looked_up & ~hit.fits
        last_rejected = jnp.where(waits, jnp.stack([row, hit.num_held]), started.last_rejected)
        state = replace(started, rows=replace(started.rows, phase=phase), last_rejected=last_rejected)
        ok = forks | hit.fits
        return _Admission(
            state,
            so_far.admitted.at[row].max(ok),
            so_far.num_hits.at[row].add(jnp.where(hit.fits, hit.hit.chain.num_blocks, 0)),
            so_far.leader_row.at[row].set(jnp.where(forks, leader, row)),
            goes_on=ok & may_admit(state, last_ids, plan(state, config), config),
        )

    no_rows = jnp.zeros(state.tables.max_seqs, bool)
    goes_on = may_start & may_admit(state, last_ids, plan(state, config), config)
    start = _Admission(state, no_rows, jnp.zeros_like(state.rows.phase), own_row, goes_on)
    return lax.while_loop(lambda so_far: so_far.goes_on, try_next, start)[:-1]


def may_admit(
    state: EngineState, last_ids: Int[Array, " lines"], plan: Plan, config: StepConfig
) -> Bool[Array, ""]:
    """Return whether the next waiting request might be admitted.

    Needed are a decode slot, a free block, and a tile of the step's budget; for a follower, the end of its
    leader's prompt in place of the tile.
    """
    rows, tables = state.rows, state.tables
    num_left = config.max_num_seqs - jnp.sum(rows.admitted)

    def has_room() -> Bool[Array, ""]:
        first = _first_waiting(rows)
        has_block = in_every(_reserved(state, last_ids, config) <= tables.pool.num_free)
        leader, follows = _leader_in_prompt(state, first)
        is_done = tables.seq_lens[leader] + plan.num_new_tokens[leader] == rows.prompt_lens[leader]
        can_start = jnp.where(follows, is_done, jnp.sum(plan.num_tiles) < config.num_tiles)
        return has_block & can_start & (rows.beams.width[first] <= num_left)

    return lax.cond(jnp.any(rows.waiting) & (num_left > 0), has_room, lambda: jnp.bool_(False))


def _first_waiting(rows: Rows) -> Int[Array, ""]:
    """Return the waiting row that is served first; row 0 of the order where none waits."""
    return rows.order[jnp.argmax(rows.waiting[rows.order])]


def _leader_in_prompt(state: EngineState, row: Int[Array, ""]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Return the running row with an unfinished prompt that a new request follows, and whether there is
    one.
    """
    rows = state.rows
    in_prompt = rows.running & (state.tables.seq_lens < rows.prompt_lens)
    leads = in_prompt & (rows.arrival == rows.leader[row])
    is_new = (rows.phase[row] == Phase.WAITING) & (rows.num_tokens[row] == rows.prompt_lens[row])
    return jnp.argmax(leads).astype(jnp.int32), is_new & (rows.leader[row] != 0) & jnp.any(leads)


def _stacked(of_classes: Sequence[int | Array], like: Array) -> Int[Array, "*n"]:
    """Return numbers of size classes along a last axis, each of one shape; those of a single class as they
    are.
    """
    if len(of_classes) == 1:
        return jnp.asarray(of_classes[0])
    return jnp.stack([jnp.broadcast_to(jnp.asarray(each), like.shape) for each in of_classes], axis=-1)


def _most_held(num_tokens: Int[Array, "*rows"], block_size: int, config: StepConfig) -> Int[Array, "*n"]:
    """Return how many blocks rows of so many tokens hold at most; with several size classes of each."""
    return _stacked(config.blocks_by_class(num_tokens, block_size), num_tokens)


def _reserved(
    state: EngineState, last_ids: Int[Array, " lines"], config: StepConfig
) -> Int[Array, "*num_classes"]:
    """Return how many free blocks the next request may not take: the running rows have or will have them."""
    rows, tables = state.rows, state.tables

    def where(mask: Bool[Array, " rows"], value: Array, other: int | Array) -> Array:
        return jnp.where(mask if value.ndim == 1 else mask[:, None], value, other)

    max_held = _most_held(rows.num_tokens, tables.block_size, config)
    to_come = jnp.maximum(max_held - tables.num_held, 0)
    to_come += tables.by_class(copy_on_write.must_copy(tables, last_ids, rows.running.astype(jnp.int32)))
    to_come = where(rows.following, _need_of_beam(state, config), where(rows.running, to_come, 0))
    to_come = where(rows.forking, _need_of_fork(state, config), to_come)
    num_active = jnp.sum(rows.admitted, dtype=jnp.int32)
    if tables.num_classes == 1:
        assert not isinstance(config.watermark_blocks, tuple)
        return jnp.sum(to_come) + jnp.where(num_active > 0, config.watermark_blocks + num_active, 0)
    # A class in which a row holds all that it ever will keeps nothing for the row to grow into.
    grows = _most_held(rows.num_tokens + tables.block_size, tables.block_size, config) > max_held
    num_growing = jnp.sum(grows & rows.admitted[:, None], axis=0, dtype=jnp.int32)
    watermark = jnp.asarray(config.watermark_blocks, jnp.int32)
    return jnp.sum(to_come, axis=0) + jnp.where(num_active > 0, watermark + num_growing, 0)


def _need_of_fork(state: EngineState, config: StepConfig) -> Int[Array, "rows *num_classes"]:
    """Return how many blocks a fork copies: one a group where the prompt's last block is partly filled."""
    is_partly = (state.rows.prompt_lens % state.tables.block_size != 0).astype(jnp.int32)
    if state.tables.num_classes > 1:
        return is_partly[:, None] * jnp.asarray(config.groups_by_class, jnp.int32)
    return is_partly if state.tables.num_groups == 1 else is_partly * state.tables.num_groups


def _need_of_beam(state: EngineState, config: StepConfig) -> Int[Array, "rows *num_classes"]:
    """Return the blocks of a beam's known tokens that it does not share with its head: all but those that
    the prompt fills.

    In groups with a window none counts as shared, for those may be gone when the beam forks.
    """
    rows, block_size = state.rows, state.tables.block_size
    if state.tables.num_classes == 1:
        shared = config.blocks_shared(rows.prompt_lens, block_size)
    else:
        shared = _stacked(config.shared_by_class(rows.prompt_lens, block_size), rows.prompt_lens)
    return _most_held(rows.num_tokens, block_size, config) - shared


class _Lookup(NamedTuple):
    is_looked_up: Bool[Array, ""]
    fits: Bool[Array, ""]  # whether the request fits, and need not wait for another's prefix
    hit: Hit
    num_held: Int[Array, ""]  # blocks of the hit that other rows hold


def _look_for_room(
    state: EngineState,
    row: Int[Array, ""],
    free: Int[Array, "*num_classes"],
    may_start: Bool[Array, ""],
    config: StepConfig,
) -> _Lookup:
    """Return whether `free` blocks have room for a waiting request, which is looked up if they might.

    Where `may_start` is false, or the last lookup still tells that the row cannot fit, nothing is looked up.
    """
    rows, tables = state.rows, state.tables
    # Blocks that must be free, or held by others and shared.
    need = _most_held(rows.num_tokens[row], tables.block_size, config)
    need += jnp.maximum(rows.beams.width[row] - 1, 0) * _need_of_beam(state, config)[row]
    rejected_row, most_held = state.last_rejected
    may_fit = may_start & ((row != rejected_row) | in_every(need - most_held <= free))

    def look_up() -> _Lookup:
        hit, defers = _look_up(state, row, config)
        num_held, num_shared = _held_by_others(tables, hit, config)
        fits = in_every(need - num_shared <= free) & ~defers
        return _Lookup(jnp.bool_(True), fits, hit, num_held)

    shapes = jax.eval_shape(look_up)
    nothing = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    return lax.cond(may_fit, look_up, lambda: nothing)


def _look_up(state: EngineState, row: Int[Array, ""], config: StepConfig) -> tuple[Hit, Bool[Array, ""]]:
    """Look a request's tokens up in the prefix cache; also return whether it should wait, because a
    running row computes a prompt that begins alike.
    """
    rows, tables = state.rows, state.tables
    cache = tables.pool.prefix_cache
    salt, num_tokens = rows.salt[row], rows.num_findable[row]
    if cache is None:
        no_blocks = jnp.zeros((tables.num_groups, 0) if tables.num_groups > 1 else 0, jnp.int32)
        return Hit(no_blocks, prefix_cache.root(None, salt)), jnp.bool_(False)
    is_new, hit = _is_new(rows, row), find_prompt(state, row, config)
    # A running row with this prefix will soon make at least one more tile of it findable.
    wanted = (hit.chain.num_blocks + cdiv(PREFILL_TILE, tables.block_size)) * tables.block_size
    computing = rows.running & (tables.seq_lens < rows.prompt_lens) & (rows.salt == salt)
    computing &= is_new & (wanted <= jnp.minimum(rows.prompt_lens, rows.prompt_lens[row]))
    return hit, _any_begins_alike(rows, row, computing & (wanted < num_tokens), wanted)


def _is_new(rows: Rows, row: Int[Array, ""]) -> Bool[Array, ""]:
    """Return whether a row waits to be computed and may use what is cached."""
    return (rows.phase[row] == Phase.WAITING) & ~rows.tells_prompt[row]


def find_prompt(state: EngineState, row: Int[Array, ""], config: StepConfig) -> Hit:
    """Return the longest cached beginning of a waiting request's tokens; the state has a prefix cache."""
    rows, cache = state.rows, state.tables.pool.prefix_cache
    assert cache is not None
    hit = prefix_cache.lookup(
        cache,
        lambda positions: cache_keys(rows, jnp.full_like(positions, row), positions, config),
        jnp.where(_is_new(rows, row), rows.num_findable[row], 0),
        rows.salt[row],
        max_tokens=rows.token_ids.shape[1],
    )
    return hit if state.tables.num_groups == 1 else group_content.lookup(cache, hit, config.grouping.specs)


def _any_begins_alike(
    rows: Rows, row: Int[Array, ""], others: Bool[Array, " rows"], num_tokens: Int[Array, ""]
) -> Bool[Array, ""]:
    """Return whether the first `num_tokens` tokens of some masked row are those of `row`.

    Rows are compared one after the other, a chunk of tokens at a time, up to the first difference.
    """
    size = min(8 * CHUNK, rows.token_ids.shape[1])
    type Search = tuple[Bool[Array, " rows"], Int[Array, ""]]

    def chunk(row: Int[Array, ""], start: Int[Array, ""]) -> Int[Array, " size"]:
        return lax.dynamic_slice(rows.token_ids, (row, start), (1, size))[0]

    def compare(search: Search) -> Search:
        left, start = search
        other = jnp.argmax(left)
        first = jnp.minimum(start, rows.token_ids.shape[1] - size)
        beyond = first + jnp.arange(size) >= num_tokens
        alike = jnp.all(beyond | (chunk(row, first) == chunk(other, first)))
        return left.at[other].set(alike), jnp.where(alike, start + size, 0)

    def goes_on(search: Search) -> Bool[Array, ""]:
        return jnp.any(search[0]) & (search[1] < num_tokens)

    return jnp.any(lax.while_loop(goes_on, compare, (others, jnp.int32(0)))[0])


def cache_keys(
    rows: Rows, row: Int[Array, "*n"], positions: Int[Array, "*n"], config: StepConfig
) -> Int[Array, "*n"]:
    """Return, for each position of a row, the number under which the prefix cache keeps its token.

    An answer's token has another number than the same token of a prompt, unless `reuse_answers` is on: its K
    and V were computed in another shape, and may differ in their last bits. So a cached block has exactly the
    bits that computing it would give.
    """
    token = rows.token_ids.at[row, positions].get(mode="clip")
    if config.reuse_answers:
        return token
    return jnp.where(positions < rows.prompt_lens[row], token, -1 - token)


def _held_by_others(
    tables: BlockTables, hit: Hit, config: StepConfig
) -> tuple[Int[Array, ""], Int[Array, "*num_classes"]]:
    """Return how many blocks of a hit are not free, and how many of these a row that begins with the hit
    can read; with several size classes of each.
    """
    if hit.block_ids.shape[-1] == 0:
        nothing = jnp.zeros(2, jnp.int32)
        return nothing[0], nothing[1] if tables.num_classes == 1 else jnp.zeros(tables.num_classes, jnp.int32)
    lines = [hit.block_ids] if hit.block_ids.ndim == 1 else hit.block_ids
    held = [
        _held_in_group(tables, block_ids, hit.chain.num_blocks, spec)
        for block_ids, spec in zip(lines, config.grouping.specs, strict=True)
    ]
    num_held, num_shared = sum(held[1:], start=held[0])
    if tables.num_classes > 1:
        groups = map(config.grouping.groups_of_class, range(tables.num_classes))
        num_shared = jnp.stack([sum(held[group][1] for group in members) for members in groups])
    return num_held, num_shared


def _held_in_group(
    tables: BlockTables, block_ids: Int[Array, " max_blocks"], length: Int[Array, ""], spec: CacheSpec
) -> Int[Array, "2"]:
    """Return the same two numbers for the blocks of one group."""
    unread = spec.first_read(length * tables.block_size) // tables.block_size
    first = spec.first_blocks(tables.block_size)

    def count(_: Array, k: Array, used: Array, held: Array) -> Array:
        is_held = used & tables.pool.is_held(block_ids[k])
        is_read = k >= unread if first == 0 else (k >= unread) | (k < first)
        return held + jnp.stack([jnp.sum(is_held), jnp.sum(is_held & is_read)])

    return in_chunks(length[None], count, jnp.zeros(2, jnp.int32))


def raise_held_bound(state: EngineState, before: BlockTables, num_returned: Int[Array, ""]) -> EngineState:
    """Raise the bound of how many blocks other rows hold of the request that was rejected last (see the
    module).

    A block that the step made findable may continue the hit. A block that it took may have been in the hit,
    while another block with its content is held. The bound rises by both counts. With several groups either
    may make the hit longer or shorter by many blocks, and another length reads other blocks of a group: then
    there is no bound. No request was admitted since, so there is no third way.

    num_returned: blocks that the step took and gave back; they have lost their content all the same.
    """
    tables, (row, held) = state.tables, state.last_rejected
    taken = before.pool.num_free_in_all - tables.pool.num_free_in_all + num_returned
    published = jnp.sum(tables.chains.num_blocks - before.chains.num_blocks)
    bound = held + taken + published
    if tables.num_groups > 1:
        bound = jnp.where(taken + published > 0, NO_BOUND, held)
    return replace(state, last_rejected=jnp.stack([row, bound]))


def _start(state: EngineState, row: Int[Array, ""], hit: Hit, config: StepConfig) -> EngineState:
    """Let a waiting row run, with the blocks that it hit, or with its own swapped back in from the host."""
    rows = state.rows
    this = jnp.arange(state.tables.max_seqs) == row
    is_new = rows.phase[row] == Phase.WAITING
    first_time = rows.num_tokens[row] == rows.prompt_lens[row]
    if state.host is not None:
        state = _swap_in(state, state.host, this & ~is_new)
    if state.tables.pool.prefix_cache is not None:
        chain = jax.tree.map(lambda leaf: leaf[None], hit.chain)
        to_row = row[None]
        block_ids = hit.block_ids[None] if state.tables.num_groups == 1 else hit.block_ids
        state = state.on_tables(block_table.adopt, to_row, block_ids, chain, is_new[None])
        state = state.on_tables(block_table.slide_windows, this & is_new, config.grouping.specs)
    num_hit_tokens = hit.chain.num_blocks * state.tables.block_size
    rows = replace(
        rows,
        phase=jnp.where(this, Phase.RUNNING, rows.phase),
        num_hit_tokens=jnp.where(this & is_new & first_time, num_hit_tokens, rows.num_hit_tokens),
    )
    state = replace(state, rows=rows, last_rejected=no_rejection())
    num_lookup_tokens = jnp.where(is_new & ~rows.tells_prompt[row], rows.num_findable[row], 0)
    return state.count({Counter.NUM_LOOKUP_TOKENS: num_lookup_tokens, Counter.NUM_HIT_TOKENS: num_hit_tokens})


def _swap_in(state: EngineState, host: HostPool, rows: Bool[Array, " rows"]) -> EngineState:
    """Bring the masked row's blocks back from the host."""
    max_blocks = state.tables.max_blocks_per_row
    tables, host_tables, info = swap.swap_in(state.tables, host.tables, rows, max_blocks=max_blocks)
    return replace(
        state,
        tables=tables,
        kv_cache=kv_cache.copy_blocks(host.kv_cache, state.kv_cache, info.sources, info.destinations),
        host=replace(host, tables=host_tables),
        status=state.status | info.status,
    )
