"""Past answers: a ring of their tokens, in which drafts of later requests are looked up."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpaged.step.feature_values import DRAFTS, Past
from jaxpaged.step.features import with_values
from jaxpaged.step.state import EngineState, Rows


def note_ended(state: EngineState, ended: Bool[Array, " rows"]) -> EngineState:
    """Keep the answers of rows that have ended in this step, in the order of rows."""
    rows, account = state.rows, state.drafts
    if account.past is None:
        return state
    type Carry = tuple[Past, Bool[Array, " rows"]]

    def keep_one(carry: Carry) -> Carry:
        past, left = carry
        row = jnp.argmax(left)
        return with_answer(past, rows, row), left.at[row].set(False)

    past, _ = lax.while_loop(lambda carry: jnp.any(carry[1]), keep_one, (account.past, ended))
    return with_values(state, {DRAFTS: replace(account, past=past)})


def with_answer(past: Past, rows: Rows, row: Int[Array, ""]) -> Past:
    """Write a row's answer in place of the oldest tokens; of one that is longer than the ring its end."""
    size, max_len = past.token_ids.shape[0], rows.token_ids.shape[1]
    num = rows.num_tokens[row] - rows.prompt_lens[row]
    k = jnp.arange(max_len, dtype=jnp.int32)
    tokens = rows.token_ids.at[row, rows.prompt_lens[row] + k].get(mode="clip")
    place = jnp.where((k < num) & (k >= num - size), (past.next + k) % size, size)

    def write(ring: Int[Array, " places"], values: Int[Array, "*n"]) -> Int[Array, " places"]:
        return ring.at[place].set(values, mode="drop")

    return Past(
        token_ids=write(past.token_ids, tokens),
        owner=write(past.owner, rows.arrival[row]),
        salt=write(past.salt, rows.salt[row]),
        next=(past.next + num) % size,
        num_tokens=jnp.minimum(past.num_tokens + num, size),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stretch:
    """Neighbouring places of a ring, the oldest first, counted from its oldest token."""

    token_ids: Int[Array, " n"]  # -1 where there is none
    owner: Int[Array, " n"]
    salt: Int[Array, " n"]


def stretch(past: Past, first: Int[Array, ""], num: int) -> Stretch:
    """Return `num` entries of the ring from index `first` on, counted from the oldest; an entry outside has
    the token -1.
    """
    index = first + jnp.arange(num, dtype=jnp.int32)
    at = (past.next - past.num_tokens + index) % past.token_ids.shape[0]
    is_there = (index >= 0) & (index < past.num_tokens)
    return Stretch(jnp.where(is_there, past.token_ids[at], -1), past.owner[at], past.salt[at])


def token_behind(past: Past, place: Int[Array, "*n"], k: Int[Array, ""]) -> Int[Array, "*n"]:
    """Return the token `k` entries after each index of the ring, -1 beyond the end of the answer."""
    first = past.next - past.num_tokens
    size = past.token_ids.shape[0]
    at = (first + place + k) % size
    is_its = (place + k < past.num_tokens) & (past.owner[at] == past.owner[(first + place) % size])
    return jnp.where(is_its, past.token_ids[at], -1)
