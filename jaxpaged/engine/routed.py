"""Reader of the experts that a row's tokens have chosen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.checks import check
from jaxpaged.engine.driver_calls import CALLS
from jaxpaged.models.config import ModelConfig
from jaxpaged.step import recent
from jaxpaged.step.state import EngineState


def routed_shape(c: ModelConfig, *, is_asked: bool) -> jax.ShapeDtypeStruct | None:
    """Return the shape and type of a token's experts: layers, and experts in each; None if nobody asks.

    Raises `InputError` for a model without experts.
    """
    if not is_asked:
        return None
    rule = "False for a model without experts"
    check("enable_return_routed_experts", is_asked, rule, c.experts is not None)
    assert c.experts is not None
    dtype = jnp.uint8 if c.experts.num_experts <= 256 else jnp.uint16
    return jax.ShapeDtypeStruct((c.num_layers, c.experts.num_chosen), dtype)


class RoutedReader:
    """The part of a driver that reads experts. For the engine's thread only."""

    _replicas: Any
    _mesh: Any
    _state: EngineState

    @CALLS.shared
    def _routed_of(self, rows: np.ndarray) -> jax.Array:
        return recent.routed_of(self._state, rows, mesh=self._mesh)

    def routed_of(self, row: int) -> np.ndarray:
        """Return the experts of all tokens of a row, after all runs that were dispatched. Waits for them."""
        its = self._replicas
        found = jax.device_get(self._routed_of(its.local(np.array([row], np.int32))))
        return np.asarray(found[row // its.num_rows, 0] if its.size > 1 else found[0])
