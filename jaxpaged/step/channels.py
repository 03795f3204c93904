"""Channels: values of each token that a user may get beside it, all of them in one table.

`CHANNELS` says of each what it is, how the step makes it, and how the host reads and joins it. Everything
else is made from the table: the state's arrays, the report, the merge over replicas, `Delta.channels`, and
the fields of `CompletionOutput`. A channel that is off adds no array.
"""

import base64
import enum
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError, check, checked_int
from jaxpaged.models.config import ModelConfig
from jaxpaged.sampling import in_bits, score_candidates, support
from jaxpaged.sampling_state import SamplingState
from jaxpaged.step.config import MAX_STEPS

type Edit = Callable[[Float[Array, "rows vocab"]], Float[Array, "rows vocab"]]
type Values = dict[str, Array]  # by the names of channels


class Per(enum.Enum):
    """Kinds of channels: which entries have a value, and how long the device keeps it."""

    TOKEN = enum.auto()  # each token of an answer, from its choice; kept for the last MAX_STEPS tokens
    POSITION = enum.auto()  # each token of prompt and answer but the newest, from its pass; all are kept
    PLACE = enum.auto()  # each place of a prompt that its request gives something for; kept by the host


class Choice(NamedTuple):
    """Tokens that were chosen together, and what they were chosen from."""

    logits: Float[Array, "slots vocab"]
    options: SamplingState
    edit: Edit  # applies the rows' rules to logits
    token_ids: Int[Array, " slots"]
    position: Int[Array, " slots"]  # of the tokens
    of_rows: Callable[[str], Any]  # returns the values of a row feature, by its name, in each slot's row


class Verified(NamedTuple):
    """Tokens of a step's decode slots, and the drafts that they were compared with."""

    token_ids: Int[Array, " slots"]
    drafts: Int[Array, " slots"]  # draft for the place of each token, if there is one
    place: Int[Array, " slots"]  # of the token among those that the step gives its row
    num_drafts: Int[Array, " slots"]  # of its row in this step


class Given(NamedTuple):
    """Values that a request gives for consecutive places of its prompt."""

    first: int  # place of the first
    values: np.ndarray  # int32 [places, *shape]; each length at most that of the channel's shape


def _first(params: Any) -> int:
    return 0


def _anything_goes(params: Any, prompt_len: int, vocab_size: int, config: Any) -> None:
    pass


def _none_given(params: Any) -> Given | None:
    return None


@dataclass(frozen=True)
class Channel:
    """A value of each token, [*shape], which a user may get beside the token."""

    # Key of the values everywhere, and the field of `CompletionOutput` if it has one of that name; PLACE: of
    # `RequestOutput`.
    name: str
    option: str  # engine option that switches it on; "": none does
    per: Per
    # Shape and dtype of a token's value, by the model's config and the engine's. PLACE: always float32.
    like: Callable[[ModelConfig, Any], jax.ShapeDtypeStruct]
    # TOKEN: makes the values [slots, *shape] when tokens have been chosen.
    of_choice: Callable[[Choice], Array] | None = None
    # TOKEN: makes them, likewise, when the chosen tokens have been compared with the drafts.
    of_drafts: Callable[[Verified], Array] | None = None
    # Raises `InputError` for a request that asks for what the prompt, the model or the engine has not: by its
    # `SamplingParams`, the prompt's length, the size of the vocabulary and the engine's config.
    check: Callable[[Any, int, int, Any], None] = field(default=_anything_goes)
    # PLACE: what a request's `SamplingParams` give, None for nothing. They must have `tells_prompt` then.
    given: Callable[[Any], Given | None] = field(default=_none_given)
    # PLACE: makes the values, float32 [places, *shape], of the logits of the tokens behind some places, and
    # of what is given there, int32 [places, *shape]: -1 for nothing.
    of_prompt: Callable[[Float[Array, "places vocab"], Array], Array] | None = None
    # What users get for the values of some tokens, a NumPy array [n, *shape]: a tuple or an array of n.
    read: Callable[[np.ndarray], Any] = field(default=np.array)
    output: Callable[[Any], Any] = field(default=lambda value: value)  # what `CompletionOutput` has for it
    # What servers give for all values of an answer, by what users get for them; None: they give nothing.
    as_json: Callable[[Any], Any] | None = None
    # POSITION: the first position of the prompt that is reported, by a request's `SamplingParams`.
    first: Callable[[Any], int] = field(default=_first)

    def empty(self, like: jax.ShapeDtypeStruct, num_rows: int, max_model_len: int) -> Array:
        """Return the state's array without values: [rows, MAX_STEPS or max_model_len, *shape].

        TOKEN: position p is in column p % MAX_STEPS. POSITION: in column p.
        """
        width = MAX_STEPS if self.per is Per.TOKEN else max_model_len
        return jnp.zeros((num_rows, width, *like.shape), like.dtype)

    def newest(self, kept: Array, num_tokens: Int[Array, " rows"]) -> Array:
        """Return the values of each row's last MAX_STEPS tokens that have one, the newest at the end."""
        num = num_tokens if self.per is Per.TOKEN else num_tokens - 1
        first = jnp.maximum(num - MAX_STEPS, 0)
        position = first[:, None] + jnp.arange(MAX_STEPS)
        row = jnp.arange(position.shape[0])[:, None]
        if self.per is Per.TOKEN:
            return kept[row, position % MAX_STEPS]
        return kept.at[row, position].get(mode="clip")

    def reported(self, params: Any, tiles: Mapping[int, np.ndarray]) -> Any:
        """Return the channel's values for the positions of a prompt, as users get them; None if the request
        asks for none.

        tiles: values of the places of each tile, float32 [num_places, *shape], by its first place.
        """
        if (given := self.given(params)) is None:
            return None
        values = np.concatenate([each for _, each in sorted(tiles.items())])
        places = slice(given.first, given.first + len(given.values))
        return self.read(values[places, *map(slice, given.values.shape[1:])])

    def lines(
        self, rows: Sequence[tuple[int, Any]], shape: tuple[int, ...]
    ) -> Int[np.ndarray, "row_place_and_values n"]:
        """Return the columns to write into rows from their requests: for each value its row, its index and
        the value.

        rows: rows with the `SamplingParams` of their requests. shape: of the channel's values.
        """
        size = math.prod(shape)
        written = [np.zeros((2 + size, 0), np.int32)]
        for row, params in rows:
            if (given := self.given(params)) is not None:
                values = np.full((len(given.values), *shape), -1, np.int32)
                values[:, *map(slice, given.values.shape[1:])] = given.values
                place = given.first + np.arange(len(values), dtype=np.int32)
                written.append(np.stack([np.full_like(place, row), place, *values.reshape(-1, size).T]))
        return np.concatenate(written, axis=1)

    def new_values(
        self,
        newest: np.ndarray,
        num_tokens: int,
        num_new: int,
        all_values: Callable[[], np.ndarray] | None,
        params: Any,
    ) -> Any:
        """Return the channel's values of a row for a delta; None if there are none.

        newest: the row's values in the report, [MAX_STEPS, *shape].
        num_tokens: tokens of the row, of which the last `num_new` are new.
        all_values: reads the values of all positions, for the first delta of an answer; None for a later one.
        """
        if self.per is Per.TOKEN:
            end = min(num_tokens, MAX_STEPS)
            return self.read(newest[end - num_new : end])
        if not num_new:
            return None
        if all_values is not None:
            return self.read(all_values()[self.first(params) : num_tokens - 1])
        end = min(num_tokens - 1, MAX_STEPS)
        return self.read(newest[end - num_new : end])

    def join(self, parts: Sequence[Any]) -> Any:
        """Join the values of consecutive deltas of a request."""
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        return tuple(itertools.chain(*parts))

    def without_last(self, values: Any, num: int) -> Any:
        """Return the values of a delta without those of its last `num` tokens."""
        return values if self.per is Per.PLACE else values[: len(values) - num]


@dataclass(frozen=True)
class SamplingMask:
    """Tokens that each token of an answer was chosen from, after its rules and filters, rising."""

    token_ids: list[list[int]]


def _sets(words: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each set, rising, from uint32 [n, words] with a bit for each."""
    octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return tuple(tuple(np.flatnonzero(bits).tolist()) for bits in np.unpackbits(octets, 1, bitorder="little"))


def _experts(model: ModelConfig, config: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a token's experts: [layers, experts]."""
    experts, rule = model.experts, "False for a model without experts"
    check("enable_return_routed_experts", True, rule, experts is not None)
    assert experts is not None
    dtype = jnp.uint8 if experts.num_experts <= 256 else jnp.uint16
    return jax.ShapeDtypeStruct((model.num_layers, experts.num_chosen), dtype)


def _check_experts(params: Any, prompt_len: int, vocab_size: int, config: Any) -> None:
    """Check the first token whose experts are reported."""
    name, start = "routed_experts_prompt_start", params.routed_experts_prompt_start
    rule = "0 without enable_return_routed_experts, the engine's option"
    check(name, start, rule, start == 0 or config.enable_return_routed_experts)
    check(name, start, f"at most {prompt_len}, the prompt's length", start <= prompt_len)


def _in_base64(array: np.ndarray) -> str:
    """Return the bytes of an array's `.npy` file as text, as vLLM writes arrays."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


def _check_candidates(params: Any, prompt_len: int, vocab_size: int, config: Any) -> None:
    """Check a request's candidate tokens for positions of its prompt."""
    name, ids = "prompt_logprob_token_ids", params.prompt_logprob_token_ids
    if ids is None:
        return
    max_ids = config.max_prompt_logprob_token_ids
    check(name, ids, "None without max_prompt_logprob_token_ids, the engine's option", max_ids > 0)
    start = params.prompt_logprob_start or 0
    want = max(prompt_len - 1 - start, 0)
    if len(ids) != want:
        raise InputError(
            f"{name} has {len(ids)} lines, must have {want}, one for each token of the prompt behind place "
            f"prompt_logprob_start={start}"
        )
    rule = f"at most max_prompt_logprob_token_ids={max_ids}"
    check(f"number of ids in a line of {name}", ids.shape[1], rule, ids.shape[1] <= max_ids)
    rule = f"-1 or a token id, an int in [0, {vocab_size})"
    checked_int(f"{name}: token", int(ids.max()), rule, -1, vocab_size - 1)


def _candidates(params: Any) -> Given | None:
    """Return the tokens to be scored behind places of a prompt."""
    ids = params.prompt_logprob_token_ids
    return None if ids is None else Given(params.prompt_logprob_start or 0, ids)


def _draft_counts(verified: Verified) -> UInt8[Array, "slots 3"]:
    """Return the numbers that each token adds to its answer's counts: steps with drafts, drafts, and accepted
    drafts.

    A step counts with its first token, and a right draft with its token. A wrong draft makes those behind it
    void; they count with the token in its place. So the first tokens of an answer have the counts of what
    made them, wherever it ends. All tokens of a step together have all its drafts, but for an answer that
    ends with a right one: those behind it were not compared with anything.
    """
    has_draft = verified.place < verified.num_drafts
    is_right = has_draft & (verified.token_ids == verified.drafts)
    left = jnp.maximum(verified.num_drafts - verified.place, 0)
    counts = has_draft & (verified.place == 0), jnp.where(is_right, 1, left), is_right
    return jnp.stack([count.astype(jnp.uint8) for count in counts], axis=1)


MASKS = Channel(
    "sampling_mask",
    "return_sampling_mask",
    Per.TOKEN,
    like=lambda model, config: jax.ShapeDtypeStruct((cdiv(model.vocab_size, 32),), jnp.uint32),
    of_choice=lambda choice: in_bits(support(choice.logits, choice.options, choice.edit)),
    read=_sets,
    output=lambda sets: SamplingMask([*map(list, sets)]),
)
EXPERTS = Channel(
    "routed_experts",
    "enable_return_routed_experts",
    Per.POSITION,
    like=_experts,
    check=_check_experts,
    first=lambda params: params.routed_experts_prompt_start,
    as_json=_in_base64,
)
DRAFTS = Channel(
    "drafts",
    "speculative_config",
    Per.TOKEN,
    like=lambda model, config: jax.ShapeDtypeStruct((3,), jnp.uint8),
    of_drafts=_draft_counts,
)
CANDIDATES = Channel(
    "prompt_token_id_logprobs",
    "max_prompt_logprob_token_ids",
    Per.PLACE,
    like=lambda model, config: jax.ShapeDtypeStruct((config.max_prompt_logprob_token_ids,), jnp.float32),
    check=_check_candidates,
    given=_candidates,
    of_prompt=score_candidates,
)
CHANNELS = {channel.name: channel for channel in (MASKS, EXPERTS, DRAFTS, CANDIDATES)}


def switched_on(config: Any, model_config: ModelConfig) -> tuple[tuple[str, jax.ShapeDtypeStruct], ...]:
    """Return the name, and a token's shape and dtype, of each channel that an engine's options switch on.

    Raises `InputError` for a model that has no such values.
    """
    return tuple(
        (channel.name, channel.like(model_config, config))
        for channel in CHANNELS.values()
        if not channel.option or getattr(config, channel.option)
    )


def check_request(params: Any, prompt_len: int, vocab_size: int, config: Any) -> None:
    """Raise `InputError` for a request that asks for values that its prompt or the engine has not."""
    for channel in CHANNELS.values():
        channel.check(params, prompt_len, vocab_size, config)


def of_choice(kept: Values, choice: Choice) -> Values:
    """Return the values of tokens that have been chosen, of all channels that have some."""
    makes = {name: CHANNELS[name].of_choice for name in kept}
    return {name: make(choice) for name, make in makes.items() if make is not None}


def of_drafts(kept: Values, verified: Verified) -> Values:
    """Return the values of tokens that have been compared with drafts, of all channels that have some."""
    makes = {name: CHANNELS[name].of_drafts for name in kept}
    return {name: make(verified) for name, make in makes.items() if make is not None}


def noted(kept: Values, new: Values, at: tuple[Int[Array, " slots"], Int[Array, " slots"]]) -> Values:
    """Return the values after a choice. `at`: row, beyond all rows to drop it, and position of each token."""
    row, position = at
    return kept | {
        name: kept[name].at[row, position % MAX_STEPS].set(values, mode="drop")
        for name, values in new.items()
    }


def of_places(
    given: Values, logits: Float[Array, "places vocab"], row: Int[Array, ""], place: Int[Array, " places"]
) -> Values:
    """Return the values of places of a row's prompt, by the logits of the tokens behind them.

    given: what the rows' requests give, [rows, max_model_len, *shape] of each channel.
    """
    makes = {name: CHANNELS[name].of_prompt for name in given}
    return {
        name: make(logits, given[name].at[row, place].get(mode="clip"))
        for name, make in makes.items()
        if make is not None
    }


def by_position(kept: Values) -> Values:
    """Return the values of the channels that have one at each position."""
    return {name: values for name, values in kept.items() if CHANNELS[name].per is Per.POSITION}


def before_pass(kept: Values, num_tokens: int) -> Values:
    """Return the values that a model is to leave in its `KVCache` of a pass over so many tokens, empty."""
    return {name: jnp.zeros((num_tokens, *values.shape[2:]), values.dtype) for name, values in kept.items()}


def after_pass(
    kept: Values,
    new: Values,
    row: Int[Array, "num_tiles tile_len"],
    position: Int[Array, "num_tiles tile_len"],
    valid: Bool[Array, "num_tiles tile_len"],
) -> Values:
    """Return the values after a pass, by those that the model has left of its tokens."""
    after = {}
    for name, values in kept.items():
        at = jnp.where(valid, row, values.shape[0]), position
        of_tokens = new[name].reshape(*position.shape, *values.shape[2:])
        after[name] = values.at[at].set(of_tokens, mode="drop")
    return after


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the values of consecutive deltas of a request."""
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: CHANNELS[name].join([each[name] for each in parts if name in each]) for name in names}


def without_last(values: Mapping[str, Any], num: int) -> dict[str, Any]:
    """Return the values of a delta without those of its last `num` tokens."""
    return {name: CHANNELS[name].without_last(each, num) for name, each in values.items()}


def for_servers(output: Any) -> dict[str, Any]:
    """Return the values of a `CompletionOutput` that servers give, by name."""
    names = [name for name, channel in CHANNELS.items() if channel.as_json is not None]
    values = {name: output.channels.get(name, getattr(output, name, None)) for name in names}
    return {name: each for name, each in values.items() if each is not None}


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON form of an answer's channel values, by the channels' names."""
    makes = {name: CHANNELS[name].as_json for name in values}
    return {name: make(values[name]) for name, make in makes.items() if make is not None}
