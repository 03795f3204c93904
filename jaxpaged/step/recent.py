"""Programs that read what a state keeps of each row's last tokens: parts of a report that most runs need not
have.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int, Shaped

from jaxpaged.parallel.mesh import ON_EACH
from jaxpaged.sampling import Scores
from jaxpaged.step.channels import CHANNELS
from jaxpaged.step.config import MAX_STEPS
from jaxpaged.step.program import PerReplica, Static, program
from jaxpaged.step.report import Report
from jaxpaged.step.state import EngineState


def with_optional_outputs(
    report: Report, state: EngineState, wants_scores: bool, *, mesh: Mesh | None
) -> Report:
    """Return a report with its optional outputs, scores and channels, from the state after the run."""
    return dataclasses.replace(
        report,
        new_scores=scores(state, mesh=mesh) if wants_scores else None,
        channels={name: newest(state, name, mesh=mesh) for name in state.channels},
    )


@program(results=lambda specs: ON_EACH)
def scores(state: PerReplica[EngineState]) -> PerReplica[Scores]:
    """Return the scores of the tokens that a report has. They are no part of it, for most runs need none."""
    first = jnp.maximum(state.rows.num_tokens - MAX_STEPS, 0)
    place = (first[:, None] + jnp.arange(MAX_STEPS)) % MAX_STEPS
    return jax.tree.map(lambda ring: ring[jnp.arange(place.shape[0])[:, None], place], state.scores)


@program(results=lambda specs: ON_EACH)
def newest(
    state: PerReplica[EngineState], channel: Static[str]
) -> PerReplica[Shaped[Array, "rows max_steps ..."]]:
    """Return a channel's values of each row's last tokens that have one, the newest at the end."""
    return CHANNELS[channel].newest(state.channels[channel], state.rows.num_tokens)


@program(results=lambda specs: ON_EACH)
def of_rows(
    state: PerReplica[EngineState], row: PerReplica[Int[Array, " n"]], channel: Static[str]
) -> PerReplica[Shaped[Array, "n max_model_len ..."]]:
    """Return a channel's values of all positions of some rows; of a row beyond all any."""
    return state.channels[channel].at[row].get(mode="clip")
