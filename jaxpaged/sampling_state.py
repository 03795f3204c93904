"""Options that choose tokens, as arrays with a line for each row: one table for the host and the device.

Each field of `SamplingState` and `LogitRules` says beside its name which dtype it has, which value is neutral
(for a row without a request), and how a request's value is encoded. A new option is a field here, one of
`SamplingParams`, and its use in `jaxpaged.sampling`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxpaged.arithmetic import cdiv
from jaxpaged.sampling_params import SamplingParams

# Tokens of `logit_bias` and of `bad_words` that a row has room for.
MAX_EDITS = 1024
# A smaller number would count as 0 in a compiled program, and 0 cannot divide: float32's least normal one.
LEAST_DIVISOR = float(np.finfo(np.float32).tiny)


class Edit(NamedTuple):
    """An addition to one token's logit, if the answer ends with the ids of the `prefix` edits before it."""

    token_id: int
    value: float
    prefix: int = 0


@dataclass(frozen=True)
class RowOptions:
    """A request's options, from which a row's values are encoded."""

    params: SamplingParams
    prompt_len: int
    vocab_size: int
    seed: int  # 32 bits
    stop_token_ids: Sequence[int]  # the model's and the request's own
    edits: Sequence[Edit]

    @property
    def has_rules(self) -> bool:
        """Whether anything changes the logits before a token is chosen."""
        p = self.params
        penalties = p.presence_penalty, p.frequency_penalty, p.repetition_penalty
        is_restricted = p.allowed_token_ids is not None
        return is_restricted or bool(self.edits) or p.min_tokens > 0 or penalties != (0, 0, 1)


def _one(vocab_size: int) -> tuple[int, ...]:
    return ()


def _bit_a_token(vocab_size: int) -> tuple[int, ...]:
    return (cdiv(vocab_size, 32),)


def _most_edits(vocab_size: int) -> tuple[int, ...]:
    return (MAX_EDITS,)


def option(
    dtype: type,
    encode: Callable[[RowOptions], Any],
    *,
    neutral: int = 0,
    shape: Callable[[int], tuple[int, ...]] = _one,
) -> Any:
    """Declare a field.

    encode: returns a row's value; of an array perhaps only its beginning, if the rest may be anything.
    neutral: the value, or each of the values, of a row without a request.
    shape: returns the shape of a row's value from the size of the vocabulary.
    """
    return dataclasses.field(
        metadata={"dtype": dtype, "encode": encode, "neutral": neutral, "shape": shape},
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """The options by which a row's token is drawn."""

    # 0 is greedy.
    temperature: Float[Array, " rows"] = option(np.float32, lambda row: _divisor(row.params.temperature))
    # 0 keeps all.
    top_k: Int[Array, " rows"] = option(np.int32, lambda row: min(row.params.top_k, row.vocab_size))
    top_p: Float[Array, " rows"] = option(np.float32, lambda row: row.params.top_p, neutral=1)
    min_p: Float[Array, " rows"] = option(np.float32, lambda row: row.params.min_p)
    seed: UInt32[Array, " rows"] = option(np.uint32, lambda row: row.seed)
    # How many of the likeliest tokens are scored beside the chosen one; -1: not even that one.
    num_logprobs: Int[Array, " rows"] = option(
        np.int32, lambda row: count_or_none(row.params.logprobs), neutral=-1
    )
    # Whether `LogitRules` has something for the row.
    has_rules: Bool[Array, " rows"] = option(np.bool_, lambda row: row.has_rules)

    def take(self, rows: Int[Array, " n"], mask: Bool[Array, " n"]) -> "SamplingState":
        """Return the options of some rows; those not masked are greedy, which costs nothing."""
        taken = jax.tree.map(lambda values: values[rows], self)
        return replace(
            taken,
            temperature=jnp.where(mask, taken.temperature, 0),
            num_logprobs=jnp.where(mask, taken.num_logprobs, -1),
            has_rules=taken.has_rules & mask,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitRules:
    """The options that change a row's logits before a token is chosen. A set of tokens has a bit for each."""

    presence_penalty: Float[Array, " rows"] = option(np.float32, lambda row: row.params.presence_penalty)
    frequency_penalty: Float[Array, " rows"] = option(np.float32, lambda row: row.params.frequency_penalty)
    repetition_penalty: Float[Array, " rows"] = option(
        np.float32, lambda row: _divisor(row.params.repetition_penalty), neutral=1
    )
    # While a row has fewer tokens, prompt included, its stop tokens are barred.
    least_num_tokens: Int[Array, " rows"] = option(
        np.int32, lambda row: row.prompt_len + row.params.min_tokens if row.params.min_tokens else 0
    )
    stop_tokens: UInt32[Array, "rows words"] = option(
        np.uint32, lambda row: token_bits(row.stop_token_ids, row.vocab_size), shape=_bit_a_token
    )
    # Whether all tokens but `allowed` are barred.
    is_restricted: Bool[Array, " rows"] = option(
        np.bool_, lambda row: row.params.allowed_token_ids is not None
    )
    allowed: UInt32[Array, "rows words"] = option(
        np.uint32,
        lambda row: token_bits(row.params.allowed_token_ids or (), row.vocab_size),
        shape=_bit_a_token,
    )
    # Edits: each adds to one token's logit, if the answer ends with the `edit_prefix` ids before it.
    num_edits: Int[Array, " rows"] = option(np.int32, lambda row: len(row.edits))
    edit_ids: Int[Array, "rows max_edits"] = option(
        np.int32, lambda row: [edit.token_id for edit in row.edits], shape=_most_edits
    )
    edit_values: Float[Array, "rows max_edits"] = option(
        np.float32, lambda row: [edit.value for edit in row.edits], shape=_most_edits
    )
    edit_prefix: Int[Array, "rows max_edits"] = option(
        np.int32, lambda row: [edit.prefix for edit in row.edits], shape=_most_edits
    )


def neutral_rows[Options: SamplingState | LogitRules](
    options: type[Options], num_rows: int, vocab_size: int
) -> Options:
    """Return NumPy arrays of neutral values, to fill in."""

    def values(field: "dataclasses.Field[Any]") -> Any:
        m = field.metadata
        return np.full((num_rows, *m["shape"](vocab_size)), m["neutral"], m["dtype"])

    return options(**{field.name: values(field) for field in dataclasses.fields(options)})


def row_values(options: type[SamplingState | LogitRules], row: RowOptions) -> dict[str, Any]:
    """Encode a request's options: return the values of its row by field."""
    return {field.name: field.metadata["encode"](row) for field in dataclasses.fields(options)}


def count_or_none(count: int | None) -> int:
    """Encode a number of likeliest tokens; -1 for None, where no token is scored."""
    return -1 if count is None else count


def _divisor(number: float) -> float:
    """Return a number by which float32 can be divided, or 0 for 0."""
    return max(number, LEAST_DIVISOR) if number else 0


def token_bits(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Encode a set of tokens as `sampling.has_token` reads it: uint32, [cdiv(vocab_size, 32)]."""
    is_member = np.zeros(cdiv(vocab_size, 32) * 32, bool)
    is_member[list(token_ids)] = True
    return np.packbits(is_member, bitorder="little").view("<u4")


def tokens_of(bits: np.ndarray) -> set[int]:
    """Decode a set of tokens that `token_bits` has encoded."""
    octets = np.ascontiguousarray(bits, "<u4").view(np.uint8)
    return set(np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist())
