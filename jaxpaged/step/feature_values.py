"""Values that features keep: records of rows, and arrays that all rows share. See `step.features`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Names of features whose values other modules of the step read.
ADAPTERS, ARGUMENTS, BEAMS, DRAFTS, GRAMMARS = "adapters", "arguments", "beams", "drafts", "grammars"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Beams:
    """Membership of each row in a beam search, if it is in one; see `step.beams`."""

    width: Int[Array, " rows"]  # beams of the group; 0: the row is in none
    head: Int[Array, " rows"]  # the group's first row
    length_penalty: Float[Array, " rows"]
    temperature: Float[Array, " rows"]  # temperature of the probabilities that count; 1: the model's own
    cum_logprob: Float[Array, " rows"]  # the sum over the answer's tokens; -inf: the row holds no answer
    rank: Int[Array, " rows"]  # 0 is the best; beams are ranked by `cum_logprob`, ended sequences by score


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
    """Ring of the tokens of answers that have ended; see `step.past_answers`."""

    token_ids: Int[Array, " places"]
    owner: Int[Array, " places"]  # arrival of the request whose answer it is
    salt: Int[Array, " places"]  # of that request: no request with another one sees the token
    next: Int[Array, ""]  # place of the next token
    num_tokens: Int[Array, ""]  # tokens that are there: those at the places before `next`


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftAccount:
    """Account of all rows' drafts together."""

    credit: Int[Array, ""]  # what drafts have saved, in parts of a step; negative: what they have lost
    past: Past | None  # answers that drafts are looked up in; None: in none


class DraftSizes(NamedTuple):
    """Sizes of the state that drafts keep."""

    max_drafts: int  # drafts of a row in one step
    past_tokens: int = 0  # tokens of past answers that drafts are looked up in


def no_beams(num_rows: int) -> Beams:
    """Return rows that are in no beam search, NumPy arrays."""

    def filled(value: float, dtype: type) -> Any:
        return np.full(num_rows, value, dtype)

    return Beams(
        width=filled(0, np.int32),
        head=filled(0, np.int32),
        length_penalty=filled(0, np.float32),
        temperature=filled(1, np.float32),
        cum_logprob=filled(0, np.float32),
        rank=filled(0, np.int32),
    )


def no_drafts(num_rows: int, max_drafts: int) -> DraftRows:
    """Return rows that have drafted nothing yet, NumPy arrays."""

    def zeros(*shape: int) -> Any:
        return np.zeros((num_rows, *shape), np.int32)

    return DraftRows(
        most=zeros() + max_drafts,
        misses=zeros(),
        wait=zeros(),
        counts=zeros(3),
        followed=zeros(),
        idle=zeros(),
    )


def no_past(num_tokens: int) -> Past:
    """Return a ring for so many tokens, with none in it."""
    nothing = jnp.zeros(num_tokens, jnp.int32)
    return Past(nothing, nothing, nothing, jnp.int32(0), jnp.int32(0))


def no_account(sizes: DraftSizes) -> DraftAccount:
    """Return the account of an engine that has drafted nothing yet."""
    return DraftAccount(jnp.int32(0), no_past(sizes.past_tokens) if sizes.past_tokens else None)
