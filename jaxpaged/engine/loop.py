"""The compiled program: steps without a word from the host. The only jit, and the only donation, are here."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.engine import scheduler
from jaxpaged.engine.state import EngineState, Phase, Rows
from jaxpaged.engine.state import submit as submit_rows
from jaxpaged.engine.step import StepConfig, step


@functools.partial(jax.jit, static_argnames=("graphdef", "config"), donate_argnames="state")
def run(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    state: EngineState,
    max_steps: Int[Array, ""],
    return_when_row_free: Bool[Array, ""],
    *,
    config: StepConfig,
) -> EngineState:
    """Step until all rows are done, `max_steps` are, or a row finishes and `return_when_row_free` is set.

    The model comes as `nnx.split(model)`. The state is donated: use the one returned.
    """
    model = nnx.merge(graphdef, params)
    last_step = state.counters.num_steps + max_steps

    def goes_on(state: EngineState) -> Bool[Array, ""]:
        row_free = jnp.any(state.rows.phase == Phase.FINISHED)
        return (
            scheduler.any_work(state)
            & (state.counters.num_steps < last_step)
            & ~(return_when_row_free & row_free)
        )

    return lax.while_loop(goes_on, lambda state: step(model, state, config), state)


@functools.partial(jax.jit, donate_argnames="state")
def submit(state: EngineState, requests: Rows, mask: Bool[Array, " max_num_seqs"]) -> EngineState:
    """Put new requests into free rows; the state is donated."""
    return submit_rows(state, requests, mask)
