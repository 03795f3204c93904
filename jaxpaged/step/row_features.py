"""Row features: what requests may have in their rows beyond what each has, all of it in one table.

`ROW_FEATURES` says of each its values, how a request is encoded, and what it does in a step. Everything else
is made from the table: the fields of `Rows.features` and of submitted lines. A feature that is off adds no
array, and nothing to the compiled loop. What it gives out is a channel (`Choice.of_rows`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpaged.contracts.processors import WORDS
from jaxpaged.step.channels import Choice


@dataclass(frozen=True)
class RowFeature:
    """Values of each row, and what is done with them.

    They stay in their row: a beam that moves to another row does not take them along.
    """

    name: str
    option: str  # engine option that switches it on; "": none does
    # Values of so many rows without requests: a NumPy array [num_rows, ...], or a dict of such.
    empty: Callable[[int], Any]
    # Values of a request's row, likewise without the axis of rows. By the request, and by how many of its
    # tokens are known: more than the prompt's where it goes on.
    encode: Callable[[Any, int], Any]
    # Returns the values before a pass, by those, the rows, and which rows compute tokens in it.
    before_pass: Callable[[Any, Any, Bool[Array, " rows"]], Any] | None = None
    # Returns the tokens of decode slots in place of those chosen, by the values, the rows, the slots' rows
    # and the choice.
    of_choice: Callable[[Any, Any, Int[Array, " slots"], Choice], Int[Array, " slots"]] | None = None
    # Returns the values after tokens were appended, by those, the rows, and each row's number of new tokens.
    after_choice: Callable[[Any, Any, Int[Array, " rows"]], Any] | None = None


def _given_tokens(
    replay_lens: Int[Array, " rows"], rows: Any, row: Int[Array, " slots"], choice: Choice
) -> Int[Array, " slots"]:
    given = rows.token_ids.at[row, choice.position].get(mode="clip")
    return jnp.where(choice.position < replay_lens[row], given, choice.token_ids)


def _replay_len(request: Any, num_tokens: int) -> int:
    trace = request.params.trace_decode_token_ids
    return 0 if trace is None else len(request.prompt_token_ids) + len(trace)


# Length up to which `Rows.token_ids` has the answer already, to be replayed; 0: nowhere.
REPLAY = RowFeature(
    "replay",
    "enable_trace_replay",
    empty=lambda num_rows: np.zeros(num_rows, np.int32),
    encode=_replay_len,
    of_choice=_given_tokens,
)
# Words of the request's arguments for logits processors; all zero: none applies.
ARGUMENTS = RowFeature(
    "arguments",
    "logits_processors",
    empty=lambda num_rows: np.zeros((num_rows, WORDS), np.int32),
    encode=lambda request, num_tokens: request.arguments,
)
ROW_FEATURES = {feature.name: feature for feature in (REPLAY, ARGUMENTS)}


def switched_on(config: Any) -> tuple[str, ...]:
    """Return the names of the features that an engine's options switch on."""
    features = ROW_FEATURES.values()
    return tuple(each.name for each in features if not each.option or getattr(config, each.option))


def encoded(names: tuple[str, ...], request: Any, num_tokens: int) -> dict[str, Any]:
    """Return what these features have of a request, by name."""
    return {name: ROW_FEATURES[name].encode(request, num_tokens) for name in names}


def before_pass(rows: Any, computes: Bool[Array, " rows"]) -> Any:
    """Return the rows before a pass in which some compute tokens."""
    hooks = {name: ROW_FEATURES[name].before_pass for name in rows.features}
    return _with(
        rows, {name: hook(rows.features[name], rows, computes) for name, hook in hooks.items() if hook}
    )


def of_choice(rows: Any, row: Int[Array, " slots"], choice: Choice) -> Choice:
    """Return a choice with the tokens that features put in the place of those chosen."""
    for name, values in rows.features.items():
        if (hook := ROW_FEATURES[name].of_choice) is not None:
            choice = choice._replace(token_ids=hook(values, rows, row, choice))
    return choice


def after_choice(rows: Any, num_new: Int[Array, " rows"]) -> Any:
    """Return the rows after so many tokens were appended to each."""
    hooks = {name: ROW_FEATURES[name].after_choice for name in rows.features}
    return _with(
        rows, {name: hook(rows.features[name], rows, num_new) for name, hook in hooks.items() if hook}
    )


def _with(rows: Any, values: dict[str, Any]) -> Any:
    return replace(rows, features=rows.features | values) if values else rows
