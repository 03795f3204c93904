"""Features: what the rows and the state of an engine have beyond what each engine has.

One `Features` value says which optional fields `state.Rows` and `state.EngineState` have, with their shapes.
A feature that is off has None for its fields: it adds no array to the pytree, and nothing to the compiled
loop.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxpaged.step.automata import no_grammars
from jaxpaged.step.channels import CHANNELS, Per
from jaxpaged.step.row_features import ROW_FEATURES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftRows:
    """Record of how each row's drafts have done; see `step.speculation`."""

    most: Int[Array, " rows"]  # drafts that it may make at once
    misses: Int[Array, " rows"]  # times in turn that no draft was right
    wait: Int[Array, " rows"]  # steps until it drafts again
    counts: Int[Array, "rows 3"]  # its steps with drafts, its drafts, and those that were right
    followed: Int[Array, " rows"]  # its first so many tokens are computed by a model that drafts
    idle: Int[Array, " rows"]  # steps since it drafted


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Past:
    """Ring of the tokens of answers that have ended; see `step.past`."""

    token_ids: Int[Array, " places"]
    owner: Int[Array, " places"]  # arrival of the request whose answer it is
    salt: Int[Array, " places"]  # of that request: no request with another one sees the token
    next: Int[Array, ""]  # place of the next token
    num_tokens: Int[Array, ""]  # tokens that are there: those at the places before `next`


def no_past(num_tokens: int) -> Past:
    """Return a ring for so many tokens, with none in it."""
    nothing = jnp.zeros(num_tokens, jnp.int32)
    return Past(nothing, nothing, nothing, jnp.int32(0), jnp.int32(0))


@dataclass(frozen=True)
class Features:
    """Optional features of an engine's rows and state. The defaults are off."""

    lora: bool = False  # requests may have adapters
    arena_words: int = 0  # 32-bit words for automata of structured outputs; 0: requests have none
    max_drafts: int = 0  # drafts of a row in one step; 0: nothing is drafted
    past_tokens: int = 0  # tokens of past answers that drafts are looked up in
    row_features: tuple[str, ...] = ()  # names of those that are on; see `step.row_features`
    # Name of each channel (`step.channels`) that is on, with shape and dtype of a token's value.
    channels: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = ()

    def row_fields(self, num_rows: int, max_model_len: int) -> dict[str, Any]:
        """Return the optional fields of `Rows` without requests, by name: NumPy arrays, None where off."""

        def zeros(*shape: int) -> Any:
            return np.zeros((num_rows, *shape), np.int32)

        drafting = DraftRows(zeros() + self.max_drafts, zeros(), zeros(), zeros(3), zeros(), zeros())
        return {
            "lora": zeros() if self.lora else None,
            "grammars": no_grammars(num_rows) if self.arena_words else None,
            "drafting": drafting if self.max_drafts else None,
            "features": {name: ROW_FEATURES[name].empty(num_rows) for name in self.row_features},
            "given": {
                name: zeros(max_model_len, *like.shape)
                for name, like in self.channels
                if CHANNELS[name].per is Per.PLACE
            },
        }

    def state_fields(self, num_rows: int, max_model_len: int) -> dict[str, Any]:
        """Return the optional fields of `EngineState`, by name: arrays, None where off."""
        return {
            "arena": jnp.zeros(self.arena_words, jnp.uint32) if self.arena_words else None,
            "channels": {
                name: CHANNELS[name].empty(like, num_rows, max_model_len)
                for name, like in self.channels
                if CHANNELS[name].per is not Per.PLACE
            },
            "past": no_past(self.past_tokens) if self.past_tokens else None,
            "credit": jnp.int32(0) if self.max_drafts else None,
        }


NO_FEATURES = Features()
