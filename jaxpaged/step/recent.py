"""Programs that read what a state keeps of each row's last tokens: parts of a report that most runs need not
have.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int, UInt, UInt32

from jaxpaged.parallel.mesh import ON_EACH
from jaxpaged.sampling import Scores
from jaxpaged.step.features import MAX_STEPS
from jaxpaged.step.program import PerReplica, program
from jaxpaged.step.report import Report
from jaxpaged.step.state import EngineState


def told_beside(
    report: Report, state: EngineState, wants_scores: bool, wants_support: bool, *, mesh: Mesh | None
) -> Report:
    """Return a report with what is wanted beside its tokens, of the state after the run."""
    return dataclasses.replace(
        report,
        new_scores=scores(state, mesh=mesh) if wants_scores else None,
        new_support=support(state, mesh=mesh) if wants_support else None,
        new_routed=None if state.routed is None else routed(state, mesh=mesh),
    )


@program(results=lambda specs: ON_EACH)
def scores(state: PerReplica[EngineState]) -> PerReplica[Scores]:
    """Return the scores of the tokens that a report has. They are no part of it, for most runs need none."""
    return _recent(state.scores, state)


def _recent(rings: Any, state: EngineState) -> Any:
    """Return what is kept of each row's last MAX_STEPS tokens, the newest at the end."""
    first = jnp.maximum(state.rows.num_tokens - MAX_STEPS, 0)
    place = (first[:, None] + jnp.arange(MAX_STEPS)) % MAX_STEPS
    return jax.tree.map(lambda ring: ring[jnp.arange(place.shape[0])[:, None], place], rings)


@program(results=lambda specs: ON_EACH)
def support(
    state: PerReplica[EngineState],
) -> PerReplica[UInt32[Array, "rows max_steps words"]]:
    """Return the sets of tokens that those of a report were chosen from, where the state has them."""
    return _recent(state.support, state)


@program(results=lambda specs: ON_EACH)
def routed(
    state: PerReplica[EngineState],
) -> PerReplica[UInt[Array, "rows max_steps num_layers num_chosen"]]:
    """Return the experts of each row's last MAX_STEPS tokens that are computed, the newest at the end."""
    assert state.routed is not None
    first = jnp.maximum(state.rows.num_tokens - 1 - MAX_STEPS, 0)
    place = first[:, None] + jnp.arange(MAX_STEPS)
    return state.routed.at[jnp.arange(place.shape[0])[:, None], place].get(mode="clip")


@program(results=lambda specs: ON_EACH)
def routed_of(
    state: PerReplica[EngineState], row: PerReplica[Int[Array, " n"]]
) -> PerReplica[UInt[Array, "n max_model_len num_layers num_chosen"]]:
    """Return the experts of all tokens of some rows; of a row beyond all any."""
    assert state.routed is not None
    return state.routed.at[row].get(mode="clip")
