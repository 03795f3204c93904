"""The compiled program: steps without a word from the host. The only jit, and the only donation, are here."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import INT32_MAX
from jaxpaged.memory import block_pool
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.memory.policies import Policy
from jaxpaged.models.layers import AdapterParam
from jaxpaged.models.lora import put
from jaxpaged.parallel.mesh import BY_SHARD, ON_EACH
from jaxpaged.sampling import Scores
from jaxpaged.status import Status
from jaxpaged.step import scheduler
from jaxpaged.step.config import StepConfig
from jaxpaged.step.program import PerReplica, PerShard, Static, program
from jaxpaged.step.report import Report
from jaxpaged.step.scheduler import Decision
from jaxpaged.step.state import (
    MAX_STEPS,
    Counter,
    EngineState,
    Rows,
    create_state,
    create_tables,
    place_requests,
)
from jaxpaged.step.step import Model, PromptScores, advance, no_prompt_scores, step


@program()
def create(
    kv_cache: Static[KVCache],
    *,
    num_rows: Static[int],
    max_model_len: Static[int],
    vocab_size: Static[int],
    prefix_caching: Static[bool],
    policy: Static[Policy],
    lora: Static[bool] = False,
) -> PerReplica[EngineState]:
    """A state without requests, with zeros for K and V of these shapes; in one program, for outside of one
    each shape is compiled by itself.
    """
    num_blocks, block_size = kv_cache.num_blocks, kv_cache.block_size
    tables = create_tables(
        num_blocks,
        num_rows,
        cdiv(max_model_len, block_size),
        block_size,
        prefix_caching=prefix_caching,
        policy=policy,
    )
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), kv_cache)
    return create_state(tables, zeros, max_model_len, vocab_size, lora=lora)


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
    after a step that has something to tell of prompts. `limits` are what `limits()` makes. The model comes as
    `nnx.split(model)`. The state is donated: use the one returned.
    """
    model = nnx.merge(graphdef, params)

    def one_more(carry: Carry) -> Carry:
        return _one_step(model, carry, config)

    def goes_on(carry: Carry) -> Bool[Array, ""]:
        return _goes_on(carry, limits, host_has_more)

    state, _, told, origin = lax.while_loop(goes_on, one_more, _before(state, config))
    state = _compared(state, model)
    return state, report(state, told, origin)


def limits(max_steps: int, max_passes: int = INT32_MAX) -> np.ndarray:
    """Return the limits of a run, int32 [2]: at most `max_steps` steps, and MAX_STEPS; and no more after the
    one in which it has made `max_passes` over tiles of prompts.
    """
    return np.array([min(max_steps, MAX_STEPS), min(max_passes, INT32_MAX)], np.int32)


# How far a run is: steps made, and the counter of passes over prompts when it began.
type Made = tuple[Int[Array, ""], Int[Array, ""]]
# A run between two steps: the state, how far it is, what the last step told of prompts, and `Report.origin`.
type Carry = tuple[EngineState, Made, PromptScores, Int[Array, " rows"]]


def _before(state: EngineState, config: StepConfig) -> Carry:
    nothing = no_prompt_scores(config, state.tables.max_seqs)
    own_row = jnp.arange(state.tables.max_seqs, dtype=jnp.int32)
    return state, (jnp.int32(0), state.counters[Counter.NUM_PROMPT_PASSES]), nothing, own_row


def _goes_on(carry: Carry, limits: Int[Array, "2"], host_has_more: Bool[Array, ""]) -> Bool[Array, ""]:
    state, (num_steps, passes_before), told, _ = carry
    rows = state.rows
    num_passes = state.counters[Counter.NUM_PROMPT_PASSES] - passes_before
    starves = host_has_more & jnp.any(rows.free) & ~jnp.any(rows.waiting)
    tells = jnp.any(told.row < rows.phase.shape[0])
    may = (num_steps < limits[0]) & (num_passes < limits[1]) & ~starves & ~tells
    return scheduler.any_work(rows) & may


def _one_step(model: Model, carry: Carry, config: StepConfig) -> Carry:
    state, (num_steps, passes_before), told, origin = carry
    state, _, told, came_from = advance(model, state, config, told)
    return state, (num_steps + 1, passes_before), told, origin[came_from]


def _compared(state: EngineState, model: Model) -> EngineState:
    """The state, with a status that says so if not all shards of the model have the same."""
    shards = getattr(model, "shards", None)
    if shards is None:
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
    """`run` with its `while` on the host, which asks after each step whether there is another.

    For devices that cannot run the loop as one program; the answers are the same. `one_step` is `run_step`
    without its graphdef and config. The state is donated: use the one returned.
    """
    more, goes_on = before_run(state, limits, host_has_more, config=config, mesh=mesh)
    carry = state, *more
    while np.any(goes_on):
        carry, goes_on = one_step(params, carry, limits, host_has_more)
    state, _, told, origin = carry
    return state, report(state, told, origin, mesh=mesh)


@program(results=lambda specs: ON_EACH)
def before_run(
    state: PerReplica[EngineState],
    limits: Int[Array, "2"],
    host_has_more: Bool[Array, ""],
    *,
    config: Static[StepConfig],
) -> PerReplica[tuple[tuple[Made, PromptScores, Int[Array, " rows"]], Bool[Array, ""]]]:
    """What a run by the host carries beside the state, before its first step, and whether it makes one."""
    carry = _before(state, config)
    return carry[1:], _goes_on(carry, limits, host_has_more)


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
    """One step of a run by the host, and whether it makes another. What was carried is donated.

    A group that is one of several makes none if its own run is over.
    """
    model = nnx.merge(graphdef, params)

    def one_more(carry: Carry) -> Carry:
        return _one_step(model, carry, config)

    if one_of_several:
        goes_on = _goes_on(carry, limits, host_has_more)
        state, made, told, origin = lax.cond(goes_on, one_more, lambda carry: carry, carry)
    else:
        state, made, told, origin = one_more(carry)
    carry = _compared(state, model), made, told, origin
    return carry, _goes_on(carry, limits, host_has_more)


@program(results=lambda specs: ON_EACH)
def report(
    state: PerReplica[EngineState], told: PerReplica[PromptScores], origin: PerReplica[Int[Array, " rows"]]
) -> PerReplica[Report]:
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
        prompt_scores=told,
        num_free_blocks=pool.num_free,
        num_cached_blocks=block_pool.num_cached(pool),
        counters=state.counters,
        status=state.status,
    )


def _newest_tokens(rows: Rows) -> Int[Array, "rows max_steps"]:
    first = jnp.maximum(rows.num_tokens - MAX_STEPS, 0)
    window = first[:, None] + jnp.arange(MAX_STEPS)
    row = jnp.arange(rows.phase.shape[0])[:, None]
    return rows.token_ids.at[row, window].get(mode="clip")


@program(results=lambda specs: ON_EACH)
def recent_scores(state: PerReplica[EngineState]) -> PerReplica[Scores]:
    """The scores of the tokens that a report has. Beside it, for most runs need none."""
    first = jnp.maximum(state.rows.num_tokens - MAX_STEPS, 0)
    place = (first[:, None] + jnp.arange(MAX_STEPS)) % MAX_STEPS
    return jax.tree.map(lambda ring: ring[jnp.arange(place.shape[0])[:, None], place], state.scores)


@program(donate="state", results=lambda specs: specs["state"])
def submit(
    state: PerReplica[EngineState], requests: Rows, rows: PerReplica[Int[Array, " n"]]
) -> PerReplica[EngineState]:
    """Put new requests into free rows (see `state.place_requests`); the state is donated."""
    return place_requests(state, requests, rows)


@program(donate="token_ids", results=lambda specs: ON_EACH)
def write_tokens(
    token_ids: PerReplica[Int[Array, "rows max_model_len"]], tokens: PerReplica[Int[Array, "3 n"]]
) -> PerReplica[Int[Array, "rows max_model_len"]]:
    """The rows' tokens with new ones: of each its row (beyond all: none), its position, and itself.

    What was given is donated.
    """
    row, position, token = tokens
    return token_ids.at[row, position].set(token, mode="drop")


@program(donate="adapters", results=lambda specs: BY_SHARD)
def put_adapter(
    graphdef: Static[nnx.GraphDef],
    adapters: PerShard[nnx.State],
    weights: PerShard[nnx.State],
    arrays: PerShard[Mapping[str, tuple[Float[Array, "..."], Float[Array, "..."]]]],
    place: Int[Array, ""],
) -> PerShard[nnx.State]:
    """The model's room for adapters with one more in it: see `lora.put`. What was given is donated."""
    model = nnx.merge(graphdef, adapters, weights)
    put(model, arrays, place)
    return nnx.state(model, AdapterParam)


@program(donate="state", results=lambda specs: specs["state"])
def reset_prefix_cache(state: PerReplica[EngineState]) -> PerReplica[EngineState]:
    """Forget what can be found of former requests; none may be running. The state is donated."""
    pool, info = block_pool.reset_prefix_cache(state.tables.pool)
    tables = replace(state.tables, pool=pool)
    return replace(state, tables=tables, status=state.status | info.status)


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
    """One step, with what it decided: for a replay, which looks at each. The state is donated."""
    return step(nnx.merge(graphdef, params), state, config)


@functools.partial(jax.jit, static_argnames="config")
def schedule(state: EngineState, *, config: StepConfig) -> Decision:
    """What the next step will decide."""
    return scheduler.schedule(state, config)[1]
