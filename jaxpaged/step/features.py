"""Features: what an engine's rows and state have beyond what each engine has, all of it in one table.

`FEATURES` says of each its values for rows and for all rows together, how a request is encoded, and what it
does in a step. Everything else is made from the table: the fields of `Rows.features`, of
`EngineState.features` and of submitted lines. A feature that is off adds no array, and nothing to the
compiled loop. What it gives out is a channel (`Choice.of_rows`).

Two features do more than their hooks say. Drafts change the plan of a step and what its rows keep
(`step.speculation`), and beam searches change which row has what (`step.beams`).
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.contracts.processors import WORDS
from jaxpaged.step import automata
from jaxpaged.step.channels import CHANNELS, Choice, Per
from jaxpaged.step.feature_values import (
    ADAPTERS,
    ARGUMENTS,
    BEAMS,
    DRAFTS,
    GRAMMARS,
    DraftSizes,
    no_account,
    no_beams,
    no_drafts,
)

type Values = dict[str, Any]  # by the names of features
type Logits = Float[Array, "slots vocab"]
type OfRows = Bool[Array, " rows"]
type Drafted = tuple[Int[Array, " rows"], Int[Array, "rows most"]]


@dataclass(frozen=True)
class Feature:
    """Values of each row, and of all rows together, and what a step does with them.

    A hook that is None does nothing. `values` are those of the rows, `shared` those of all rows together;
    `rows` are `state.Rows`. Values stay in their row: a beam that moves to another row does not take them
    along, unless `of_parents` says so.
    """

    name: str
    option: str  # engine option that switches it on; "": none does
    # Returns the values of so many rows without requests: a NumPy array [num_rows, ...], or a tree of such.
    empty: Callable[[int, Any], Any]
    # Returns the values of a request's row, likewise without the axis of rows, by the request and by how many
    # of its tokens are known: more than the prompt's where it goes on. None: a service of the driver does.
    encode: Callable[[Any, int], Any] | None = None
    # Returns the size that the functions before get, by an engine's config.
    size: Callable[[Any], Hashable] = lambda config: None
    # Returns the values of all rows together, by the size. None: there are none.
    shared: Callable[[Any], Any] | None = None
    # Returns the shared values of an engine that forgets what it knows of former requests.
    forget: Callable[[Any], Any] | None = None
    # Returns which rows sample nothing until the host has written what may come next, by the values.
    rests: Callable[[Any], OfRows] | None = None
    # Returns the values before a pass, by those, the rows, and which rows compute tokens in it.
    before_pass: Callable[[Any, Any, OfRows], Any] | None = None
    # Returns fields of the `PassBatch` of a pass, by the values and the pass's `plan.Tiles`.
    of_pass: Callable[[Any, Any], dict[str, Any]] | None = None
    # Returns for which rows tokens may be barred for the next token alone: nothing can be drafted behind it.
    one_ahead: Callable[[Any, Any], OfRows] | None = None
    # Returns text that is sure to come next in rows with room for drafts, at most so many tokens, by the
    # values, the shared ones and the room: how many tokens, and which. One feature on alone may have it.
    forced: Callable[[Any, Any, Int[Array, " rows"], int], Drafted] | None = None
    # Returns logits without the tokens that are barred, and for which slots some are, by the values, the
    # shared ones, the logits, each slot's line of the values, and which slots are due.
    bars: Callable[..., tuple[Logits, Bool[Array, " slots"]]] | None = None
    # Returns the tokens of decode slots in place of those chosen, by the values, the rows, the slots' rows
    # and the choice.
    of_choice: Callable[[Any, Any, Int[Array, " slots"], Choice], Int[Array, " slots"]] | None = None
    # Returns the values behind one more token, by those, the shared ones, the tokens, and which rows get one.
    after_token: Callable[[Any, Any, Int[Array, " rows"], OfRows], Any] | None = None
    # Returns which rows cannot go on behind their newest token, by the values.
    has_lost: Callable[[Any], OfRows] | None = None
    # Returns the values of beams before their next token, by those, each row's parent, and which rows change.
    of_parents: Callable[[Any, Int[Array, " rows"], OfRows], Any] | None = None
    # Returns the values after tokens were appended, by those, the rows, and each row's number of new tokens.
    after_choice: Callable[[Any, Any, Int[Array, " rows"]], Any] | None = None


def _adapters_of_pass(slots: Int[Array, " rows"], tiles: Any) -> dict[str, Any]:
    return {"adapters": jnp.where(tiles.end > 0, slots[tiles.row], 0)}


def _beam(request: Any, num_tokens: int) -> dict[str, Any]:
    """Return all but the search's first row, which is known when it is filled."""
    search = request.beams
    width = search.beam_width if search else 0
    return {
        "width": width,
        "length_penalty": search.length_penalty if search else 0,
        "temperature": (search.temperature if search else 0) or 1,
        "cum_logprob": 0 if request.index == 0 else -np.inf,
        "rank": request.index % width if width else 0,
    }


def _given_tokens(
    replay_lens: Int[Array, " rows"], rows: Any, row: Int[Array, " slots"], choice: Choice
) -> Int[Array, " slots"]:
    given = rows.token_ids.at[row, choice.position].get(mode="clip")
    return jnp.where(choice.position < replay_lens[row], given, choice.token_ids)


def _replay_len(request: Any, num_tokens: int) -> int:
    trace = request.params.trace_decode_token_ids
    return 0 if trace is None else len(request.prompt_token_ids) + len(trace)


ENTRIES = (
    # Slot of each request's adapter, from 1 on; 0: it has none. Its service is `services.adapter_slots`.
    Feature(
        ADAPTERS,
        "enable_lora",
        empty=lambda num_rows, size: np.zeros(num_rows, np.int32),
        of_pass=_adapters_of_pass,
    ),
    # Beam searches, which any request may be one of.
    Feature(BEAMS, "", empty=lambda num_rows, size: no_beams(num_rows), encode=_beam),
    # Drafts of coming tokens, which each row makes as they prove right.
    Feature(
        DRAFTS,
        "speculative_config",
        size=lambda config: DraftSizes(config.most_drafts, config.speculative_config.past_tokens),
        empty=lambda num_rows, sizes: no_drafts(num_rows, sizes.max_drafts),
        encode=lambda request, num_tokens: {},  # as a row begins
        shared=no_account,
        forget=lambda account: replace(
            account, past=account.past and replace(account.past, num_tokens=jnp.int32(0))
        ),
    ),
    # Automata of structured outputs; what all rows share is the arena. Its service is `services.grammars`.
    Feature(
        GRAMMARS,
        "structured_outputs_mib",
        size=lambda config: config.arena_words,
        empty=lambda num_rows, words: automata.no_grammars(num_rows),
        shared=lambda words: jnp.zeros(words, jnp.uint32),
        rests=lambda grammars: grammars.state == automata.RESTS,
        one_ahead=automata.by_host,
        forced=automata.forced_in,
        bars=automata.masked,
        after_token=automata.moved,
        has_lost=lambda grammars: grammars.state == automata.LOST,
        of_parents=lambda grammars, parent, changes: replace(
            grammars, state=jnp.where(changes, grammars.state[parent], grammars.state)
        ),
    ),
    # Length up to which `Rows.token_ids` has the answer already, to be replayed; 0: nowhere.
    Feature(
        "replay",
        "enable_trace_replay",
        empty=lambda num_rows, size: np.zeros(num_rows, np.int32),
        encode=_replay_len,
        of_choice=_given_tokens,
    ),
    # Words of the request's arguments for logits processors; all zero: none applies.
    Feature(
        ARGUMENTS,
        "logits_processors",
        empty=lambda num_rows, size: np.zeros((num_rows, WORDS), np.int32),
        encode=lambda request, num_tokens: request.arguments,
    ),
)
FEATURES = {feature.name: feature for feature in ENTRIES}


@dataclass(frozen=True)
class Features:
    """Features and channels of an engine's rows and state that are on."""

    # Name of each feature, with its size.
    sizes: tuple[tuple[str, Any], ...] = ((BEAMS, None),)
    # Name of each channel (`step.channels`), with shape and dtype of a token's value.
    channels: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = ()

    @classmethod
    def on(cls, *, channels: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = (), **sizes: Any) -> "Features":
        """Return the features that need no option, and the features with these names and sizes."""
        always = {feature.name: None for feature in FEATURES.values() if not feature.option}
        return cls(tuple((always | sizes).items()), channels)

    @property
    def max_drafts(self) -> int:
        """Number of drafts of a row in one step at most."""
        return sum(size.max_drafts for name, size in self.sizes if name == DRAFTS)

    def row_fields(self, num_rows: int, max_model_len: int) -> dict[str, Any]:
        """Return the fields of `Rows` without requests that follow from what is on: trees of NumPy arrays."""
        return {
            "features": {name: FEATURES[name].empty(num_rows, size) for name, size in self.sizes},
            "given": {
                name: np.zeros((num_rows, max_model_len, *like.shape), np.int32)
                for name, like in self.channels
                if CHANNELS[name].per is Per.PLACE
            },
        }

    def state_fields(self, num_rows: int, max_model_len: int) -> dict[str, Any]:
        """Return the fields of `EngineState` that follow from what is on: trees of arrays."""
        return {
            "channels": {
                name: CHANNELS[name].empty(like, num_rows, max_model_len)
                for name, like in self.channels
                if CHANNELS[name].per is not Per.PLACE
            },
            "features": {
                name: make(size) for name, size in self.sizes if (make := FEATURES[name].shared) is not None
            },
        }


NO_FEATURES = Features()


def switched_on(config: Any) -> dict[str, Any]:
    """Return the sizes of the features that an engine's options switch on, by name."""
    features = FEATURES.values()
    return {
        each.name: each.size(config) for each in features if not each.option or getattr(config, each.option)
    }


def encoded(config: Any, request: Any, num_tokens: int) -> Values:
    """Return the values of a request for each feature that is on and encodes requests by itself, by name."""
    encodes = {name: FEATURES[name].encode for name in switched_on(config)}
    return {name: encode(request, num_tokens) for name, encode in encodes.items() if encode is not None}


def forgotten(shared: Values) -> Values:
    """Return the shared values of an engine that has forgotten all former requests."""
    return shared | {name: forget(shared[name]) for name, forget in _hooks("forget", shared).items()}


def may_rest(values: Values) -> bool:
    """Check whether a feature is on for which rows may rest."""
    return bool(_hooks("rests", values))


def rests(values: Values) -> list[OfRows]:
    """Return which rows rest, for each feature that is on for which rows may."""
    return [hook(values[name]) for name, hook in _hooks("rests", values).items()]


def before_pass(rows: Any, computes: OfRows) -> Any:
    """Return the rows before a pass in which some compute tokens."""
    hooks = _hooks("before_pass", rows.features)
    return with_values(
        rows, {name: hook(rows.features[name], rows, computes) for name, hook in hooks.items()}
    )


def of_pass(values: Values, tiles: Any) -> dict[str, Any]:
    """Return the fields of the `PassBatch` of a pass that features fill in."""
    fields: dict[str, Any] = {}
    for name, hook in _hooks("of_pass", values).items():
        fields |= hook(values[name], tiles)
    return fields


def one_ahead(values: Values, shared: Values) -> list[OfRows]:
    """Return behind which rows' next token nothing can be drafted, for each feature that says so."""
    return [hook(values[name], shared[name]) for name, hook in _hooks("one_ahead", values).items()]


def forced(values: Values, shared: Values) -> Callable[[Int[Array, " rows"], int], Drafted] | None:
    """Return a function from rows' room and a count to the tokens that are sure to come next; None if no
    feature has one.
    """
    for name, hook in _hooks("forced", values).items():
        return functools.partial(hook, values[name], shared[name])
    return None


def tracked(values: Values) -> Values:
    """Return the values that each token changes."""
    return {name: values[name] for name in _hooks("after_token", values)}


def masked(
    values: Values, shared: Values, logits: Logits, line: Int[Array, " slots"], is_due: Bool[Array, " slots"]
) -> tuple[Logits, list[Bool[Array, " slots"]]]:
    """Return logits without the tokens that features bar, and for which slots each feature bars some."""
    barred = []
    for name, hook in _hooks("bars", values).items():
        logits, has_some = hook(values[name], shared[name], logits, line, is_due)
        barred.append(has_some)
    return logits, barred


def of_choice(rows: Any, row: Int[Array, " slots"], choice: Choice) -> Choice:
    """Return a choice with the tokens that features put in the place of those chosen."""
    for name, hook in _hooks("of_choice", rows.features).items():
        choice = choice._replace(token_ids=hook(rows.features[name], rows, row, choice))
    return choice


def after_token(values: Values, shared: Values, token_ids: Int[Array, " rows"], gets_one: OfRows) -> Values:
    """Return values behind one more token of the rows that get one."""
    hooks = _hooks("after_token", values)
    return values | {
        name: hook(values[name], shared[name], token_ids, gets_one) for name, hook in hooks.items()
    }


def has_lost(values: Values) -> list[OfRows]:
    """Return a mask of the rows that cannot go on, for each feature that has one."""
    return [hook(values[name]) for name, hook in _hooks("has_lost", values).items()]


def of_parents(values: Values, parent: Int[Array, " rows"], changes: OfRows) -> Values:
    """Return the values of beams before their next token, where they change to their parents'."""
    hooks = _hooks("of_parents", values)
    return values | {name: hook(values[name], parent, changes) for name, hook in hooks.items()}


def after_choice(rows: Any, num_new: Int[Array, " rows"]) -> Any:
    """Return the rows after so many tokens were appended to each."""
    hooks = _hooks("after_choice", rows.features)
    return with_values(rows, {name: hook(rows.features[name], rows, num_new) for name, hook in hooks.items()})


def with_values[Owner](owner: Owner, values: Mapping[str, Any]) -> Owner:
    """Return rows or a state with other values of some features."""
    if not values:
        return owner
    return replace(owner, features={**owner.features, **values})  # type: ignore[type-var, attr-defined]


def _hooks(hook: str, values: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return a hook of each feature of which there are values and that has the hook, by name."""
    hooks = {name: getattr(FEATURES[name], hook) for name in values}
    return {name: each for name, each in hooks.items() if each is not None}
