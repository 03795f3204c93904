"""The compiled programs: above all the loop, which makes steps without asking the host.

What serves requests is jitted here and in `step.program`; `pooling.loop` does it for models that pool. The
laboratory has loops of its own.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import INT32_MAX
from jaxpaged.memory import block_pool
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.memory.policies import Policy
from jaxpaged.models.adapter_slots import put
from jaxpaged.models.layers import AdapterParam
from jaxpaged.parallel.mesh import BY_SHARD, ON_EACH
from jaxpaged.status import Status
from jaxpaged.step import features, scheduler
from jaxpaged.step.config import MAX_STEPS, StepConfig
from jaxpaged.step.feature_values import GRAMMARS
from jaxpaged.step.features import NO_FEATURES, Features
from jaxpaged.step.model import Model
from jaxpaged.step.program import PerReplica, PerShard, Static, program
from jaxpaged.step.report import Report
from jaxpaged.step.scheduler import Decision
from jaxpaged.step.state import (
    Counter,
    EngineState,
    Rows,
    create_state,
    create_tables,
    place_requests,
)
from jaxpaged.step.step import PromptScores, advance, no_prompt_scores, step


@program()
def create(
    kv_cache: Static[KVCache],
    *,
    num_rows: Static[int],
    max_model_len: Static[int],
    vocab_size: Static[int],
    prefix_caching: Static[bool],
    policy: Static[Policy],
    num_groups: Static[int] = 1,
    first_blocks: Static[tuple[int, ...]] = (),
    classes: Static[tuple[int, ...]] = (),
    more_blocks: Static[tuple[int, ...]] = (),
    on: Static[Features] = NO_FEATURES,
) -> PerReplica[EngineState]:
    """Create a state without requests, with zeros for K and V of the shapes in `kv_cache`.

    more_blocks: of each further size class; see `create_tables`.

    One program makes all arrays; outside of one JAX would compile a program for each shape.
    """
    num_blocks, block_size = kv_cache.num_blocks, kv_cache.block_size
    tables = create_tables(
        num_blocks,
        num_rows,
        cdiv(max_model_len, block_size),
        block_size,
        prefix_caching=prefix_caching,
        policy=policy,
        num_groups=num_groups,
        first_blocks=first_blocks,
        classes=classes,
        more_blocks=more_blocks,
    )
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), kv_cache)
    return create_state(tables, zeros, max_model_len, vocab_size, on=on)


@program(donate="state", results=lambda specs: (specs["state"], ON_EACH))
def run(
    graphdef: Static[nnx.GraphDef],
    params: PerShard[nnx.State],
    state: PerReplica[EngineState],
    limits: Int[Array, "2"],
    host_has_more: Bool[Array, ""],
    *,
    config: Static[StepConfig],
) -> PerReplica[tuple[EngineState, Report]]:
    """Step until all rows are done, or as much is done as `limits` allow.

    If the host has more requests than rows, stop also when a row is free and no request waits in another; and
    after a step that has scored tokens of prompts. `limits` are what `limits()` makes. The model comes as
    `nnx.split(model)`. The state is donated: use the one returned.
    """
    model = nnx.merge(graphdef, params)

    def one_more(carry: Carry) -> Carry:
        return _one_step(model, carry, config)

    def goes_on(carry: Carry) -> Bool[Array, ""]:
        return _goes_on(carry, limits, host_has_more, config)

    state, _, prompt_scores, origin = lax.while_loop(goes_on, one_more, _before(state, config))
    state = _check_shards(state, model)
    return state, report(state, prompt_scores, origin)


def limits(max_steps: int, max_passes: int = INT32_MAX) -> np.ndarray:
    """Return the limits of a run, int32 [2]: at most `max_steps` steps, and MAX_STEPS; and no more after the
    one in which it has made `max_passes` passes over tiles of prompts.
    """
    return np.array([min(max_steps, MAX_STEPS), min(max_passes, INT32_MAX)], np.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    num_steps: Int[Array, ""]
    passes_before: Int[Array, ""]  # the counter of prompt passes at its start
    num_tokens: Int[Array, ""] | None  # most new tokens of any row; None without drafts: those of the steps


# Carry of a run: the state, the progress, the last step's prompt scores, and `Report.origin`.
type Carry = tuple[EngineState, Progress, PromptScores, Int[Array, " rows"]]


def _before(state: EngineState, config: StepConfig) -> Carry:
    """Return the loop's carry before its first step."""
    nothing = no_prompt_scores(config, state.rows)
    own_row = jnp.arange(state.tables.max_seqs, dtype=jnp.int32)
    num_tokens = None if config.lookup is None else jnp.int32(0)
    progress = Progress(jnp.int32(0), state.counters[Counter.NUM_PROMPT_PASSES], num_tokens)
    return state, progress, nothing, own_row


def _goes_on(
    carry: Carry, limits: Int[Array, "2"], host_has_more: Bool[Array, ""], config: StepConfig
) -> Bool[Array, ""]:
    """Return whether the loop makes another step: the report must have room for all its tokens."""
    state, progress, prompt_scores, _ = carry
    rows = state.rows
    num_passes = state.counters[Counter.NUM_PROMPT_PASSES] - progress.passes_before
    starves = host_has_more & jnp.any(rows.free) & ~jnp.any(rows.waiting)
    has_scores = jnp.any(prompt_scores.row < rows.phase.shape[0])
    within_limits = (progress.num_steps < limits[0]) & (num_passes < limits[1]) & ~starves & ~has_scores
    if progress.num_tokens is not None and config.lookup is not None:
        within_limits &= progress.num_tokens + config.lookup.most < MAX_STEPS
    return scheduler.any_work(rows) & within_limits


def _one_step(model: Model, carry: Carry, config: StepConfig) -> Carry:
    """Make one step of the loop."""
    before, progress, prompt_scores, origin = carry
    state, _, prompt_scores, came_from = advance(model, before, config, prompt_scores)
    num_tokens = progress.num_tokens
    if num_tokens is not None:
        num_new = jnp.where(state.rows.beams.width > 0, 1, state.rows.num_tokens - before.rows.num_tokens)
        num_tokens += jnp.maximum(jnp.max(num_new), 1)
    progress = replace(progress, num_steps=progress.num_steps + 1, num_tokens=num_tokens)
    return state, progress, prompt_scores, origin[came_from]


def _check_shards(state: EngineState, model: Model) -> EngineState:
    """Return the state, with an error in its status if the model's shards have come to different numbers."""
    shards = getattr(model, "shards", None)
    if shards is None or shards.size == 1:
        return state
    vectors = [x for x in jax.tree.leaves(state.rows) if x.ndim == 1]
    pool = state.tables.pool.num_free, block_pool.num_cached(state.tables.pool)
    newest = _newest_tokens(state.rows)
    same = shards.agree(
        (vectors, newest, state.tables.block_tables, state.tables.seq_lens, pool, state.counters)
    )
    return replace(state, status=state.status | jnp.where(same, 0, Status.SHARDS_DIFFER))


def run_by_host(
    one_step: Callable[..., tuple[Any, Bool[Array, ""]]],
    params: nnx.State,
    state: EngineState,
    limits: Any,
    host_has_more: Any,
    *,
    config: StepConfig,
    mesh: Mesh | None = None,
) -> tuple[EngineState, Report]:
    """Run the loop with its `while` on the host, which launches each step and asks whether there is
    another.

    For devices that cannot run the loop as one program. The answers are the same. `one_step` is `run_step`
    without its graphdef and config. The state is donated: use the one returned.
    """
    more, goes_on = before_run(state, limits, host_has_more, config=config, mesh=mesh)
    carry = state, *more
    while np.any(goes_on):
        carry, goes_on = one_step(params, carry, limits, host_has_more)
    state, _, prompt_scores, origin = carry
    return state, report(state, prompt_scores, origin, mesh=mesh)


@program(results=lambda specs: ON_EACH)
def before_run(
    state: PerReplica[EngineState],
    limits: Int[Array, "2"],
    host_has_more: Bool[Array, ""],
    *,
    config: Static[StepConfig],
) -> PerReplica[tuple[tuple[Progress, PromptScores, Int[Array, " rows"]], Bool[Array, ""]]]:
    """Return the carry of a run that the host steps, without the state, before its first step, and whether
    that step is made.
    """
    carry = _before(state, config)
    return carry[1:], _goes_on(carry, limits, host_has_more, config)


@program(donate="carry", results=lambda specs: (specs["carry"], ON_EACH))
def run_step(
    graphdef: Static[nnx.GraphDef],
    params: PerShard[nnx.State],
    carry: PerReplica[Carry],
    limits: Int[Array, "2"],
    host_has_more: Bool[Array, ""],
    *,
    config: Static[StepConfig],
    one_of_several: Static[bool] = False,
) -> PerReplica[tuple[Carry, Bool[Array, ""]]]:
    """Make one step of a run by the host; also return whether there is another. The carry is donated.

    A replica that is one of several makes no step once its own run is over.
    """
    model = nnx.merge(graphdef, params)

    def one_more(carry: Carry) -> Carry:
        return _one_step(model, carry, config)

    if one_of_several:
        goes_on = _goes_on(carry, limits, host_has_more, config)
        state, progress, prompt_scores, origin = lax.cond(goes_on, one_more, lambda carry: carry, carry)
    else:
        state, progress, prompt_scores, origin = one_more(carry)
    carry = _check_shards(state, model), progress, prompt_scores, origin
    return carry, _goes_on(carry, limits, host_has_more, config)


@program(results=lambda specs: ON_EACH)
def report(
    state: PerReplica[EngineState],
    prompt_scores: PerReplica[PromptScores],
    origin: PerReplica[Int[Array, " rows"]],
) -> PerReplica[Report]:
    """Return the part of the state that the host reads after a run."""
    rows, pool = state.rows, state.tables.pool
    return Report(
        phase=rows.phase,
        arrival=rows.arrival,
        num_tokens=rows.num_tokens,
        finish_reason=rows.finish_reason,
        num_hit_tokens=rows.num_hit_tokens,
        origin=origin,
        cum_logprob=rows.beams.cum_logprob,
        beam_rank=rows.beams.rank,
        new_token_ids=_newest_tokens(rows),
        new_scores=None,
        channels={},
        prompt_scores=prompt_scores,
        num_free_blocks=pool.num_free_in_all,
        num_cached_blocks=block_pool.num_cached(pool),
        counters=state.counters,
        status=state.status,
    )


def _newest_tokens(rows: Rows) -> Int[Array, "rows max_steps"]:
    """Return each row's last MAX_STEPS tokens, the newest at the end."""
    first = jnp.maximum(rows.num_tokens - MAX_STEPS, 0)
    window = first[:, None] + jnp.arange(MAX_STEPS)
    row = jnp.arange(rows.phase.shape[0])[:, None]
    return rows.token_ids.at[row, window].get(mode="clip")


@program(donate="state", results=lambda specs: specs["state"])
def submit(
    state: PerReplica[EngineState], requests: Rows, rows: PerReplica[Int[Array, " n"]]
) -> PerReplica[EngineState]:
    """Put new requests into free rows (see `state.place_requests`); the state is donated."""
    return place_requests(state, requests, rows)


@program(donate="rows")
def with_arena(
    rows: PerReplica[Rows], *, num_words: Static[int]
) -> PerReplica[tuple[Rows, UInt32[Array, " words"]]]:
    """Return rows that may have automata, and an arena of zeros for them. The rows are donated."""
    feature = features.FEATURES[GRAMMARS]
    assert feature.shared is not None
    grammars = jax.tree.map(jnp.asarray, feature.empty(rows.phase.shape[0], num_words))
    return features.with_values(rows, {GRAMMARS: grammars}), feature.shared(num_words)


@program(donate="token_ids", results=lambda specs: ON_EACH)
def write_tokens(
    token_ids: PerReplica[Int[Array, "rows max_model_len"]], tokens: PerReplica[Int[Array, "3 n"]]
) -> PerReplica[Int[Array, "rows max_model_len"]]:
    """Write tokens into rows, and return the rows' tokens.

    tokens: for each token its row (one beyond all rows: the token is dropped), its position, and its id.

    The rows' old tokens are donated.
    """
    row, position, token = tokens
    return token_ids.at[row, position].set(token, mode="drop")


@program(donate="given", results=lambda specs: ON_EACH)
def write_given(
    given: PerReplica[Int[Array, "rows max_model_len ..."]],
    lines: PerReplica[Int[Array, "row_place_and_values n"]],
) -> PerReplica[Int[Array, "rows max_model_len ..."]]:
    """Write what requests give for places of their prompts into rows, and return that of all rows.

    lines: for each place its row (one beyond all rows: the place is dropped), its number, and its values.

    The old ones are donated.
    """
    return given.at[lines[0], lines[1]].set(lines[2:].T.reshape(-1, *given.shape[2:]), mode="drop")


@program(donate="arena", results=lambda specs: ON_EACH)
def write_automaton(
    arena: PerReplica[UInt32[Array, " words"]],
    blocks: UInt32[Array, "n block_words"],
    first: Int[Array, ""],
    num_blocks: Int[Array, ""],
) -> PerReplica[UInt32[Array, " words"]]:
    """Write the first `num_blocks` blocks of words into the arena, from word `first` on.

    The old arena is donated.
    """

    def write_block(i: Int[Array, ""], arena: UInt32[Array, " words"]) -> UInt32[Array, " words"]:
        return lax.dynamic_update_slice(arena, blocks[i], (first + i * blocks.shape[1],))

    return lax.fori_loop(0, num_blocks, write_block, arena)


@program(donate="places", results=lambda specs: ON_EACH)
def write_masks(
    places: PerReplica[tuple[UInt32[Array, " words"], Int[Array, " rows"]]],
    masks: UInt32[Array, "n mask_words"],
    firsts: Int[Array, " n"],
    rows: PerReplica[Int[Array, "2 n"]],
) -> PerReplica[tuple[UInt32[Array, " words"], Int[Array, " rows"]]]:
    """Write the next masks of rows whose grammars the host follows, and let the rows sample again.

    places: the arena, and `GrammarRows.state`; both are donated.
    firsts: word of the arena at which each mask begins; 0: there is none.
    rows: for each mask its row (one beyond all rows: none), and the state that the row gets.
    """

    def write(i: Int[Array, ""], arena: UInt32[Array, " words"]) -> UInt32[Array, " words"]:
        return lax.dynamic_update_slice(arena, masks[i], (firsts[i],))

    arena, state = places
    arena = lax.fori_loop(0, jnp.sum(firsts > 0), write, arena)
    return arena, state.at[rows[0]].set(rows[1], mode="drop")


@program(donate="adapters", results=lambda specs: BY_SHARD)
def put_adapter(
    graphdef: Static[nnx.GraphDef],
    adapters: PerShard[nnx.State],
    weights: PerShard[nnx.State],
    arrays: PerShard[Mapping[str, tuple[Float[Array, "..."], Float[Array, "..."]]]],
    place: Int[Array, ""],
) -> PerShard[nnx.State]:
    """Write an adapter into one adapter slot of the model (see `adapter_slots.put`). The model's adapters are
    donated.
    """
    model = nnx.merge(graphdef, adapters, weights)
    put(model, arrays, place)
    return nnx.state(model, AdapterParam)


@program(donate="state", results=lambda specs: specs["state"])
def reset_prefix_cache(state: PerReplica[EngineState]) -> PerReplica[EngineState]:
    """Remove all content from the prefix cache; no request may be running. The state is donated."""
    pool, info = block_pool.reset_prefix_cache(state.tables.pool)
    tables = replace(state.tables, pool=pool)
    return replace(
        state, tables=tables, features=features.forgotten(state.features), status=state.status | info.status
    )


@program(donate="state", results=lambda specs: specs["state"])
def abort(state: PerReplica[EngineState], arrivals: Int[Array, " n"]) -> PerReplica[EngineState]:
    """End the unfinished requests with these arrivals, where they still are, with reason ABORT.

    An arrival that is in no row, -1 for one, does nothing. The state is donated.
    """
    return scheduler.abort(state, arrivals)


@functools.partial(jax.jit, static_argnames=("graphdef", "config"), donate_argnames="state")
def step_once(
    graphdef: nnx.GraphDef, params: nnx.State, state: EngineState, *, config: StepConfig
) -> tuple[EngineState, Decision]:
    """Make one step, and return its decision, for replays. The state is donated."""
    return step(nnx.merge(graphdef, params), state, config)


@functools.partial(jax.jit, static_argnames="config")
def schedule(state: EngineState, *, config: StepConfig) -> Decision:
    """Return the decision of the next step, without making it."""
    return scheduler.schedule(state, config)[1]
