"""Choice of tokens from logits, for answers and for drafts: one function, so that a draft is what an answer
would have.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged.contracts.processors import Processor, processed
from jaxpaged.contracts.samplers import Sampler, SamplingOptions
from jaxpaged.sampling import Context, edited, likeliest, sample
from jaxpaged.sampling_state import SamplingState
from jaxpaged.step import automata, features
from jaxpaged.step.channels import Choice, Edit
from jaxpaged.step.config import StepConfig
from jaxpaged.step.features import ARGUMENTS, Values
from jaxpaged.step.state import Rows


class Slots(NamedTuple):
    """Decode slots whose tokens are chosen together."""

    logits: Float[Array, "slots vocab"]
    row: Int[Array, " slots"]
    is_due: Bool[Array, " slots"]
    position: Int[Array, " slots"]  # of the token that is chosen
    line: Int[Array, " slots"]  # of the values of features that tokens change


def allowed(
    slots: Slots,
    options: SamplingState,
    rows: Rows,
    tracked: Values,
    shared: Values,
    processors: tuple[Processor, ...] = (),
) -> tuple[Float[Array, "slots vocab"], Edit]:
    """Return the logits that features leave, and what applies the slots' rules to logits.

    options: of each slot. tracked: values of features that tokens change, in the lines that `slots.line`
        names. shared: those of all rows together.
    """
    logits, row, is_due, position, line = slots
    context = Context(row, rows.prompt_lens[row], position, rows.token_ids)
    logits, barred = features.masked(tracked, shared, logits, line, is_due)

    def edit(logits: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
        changed = edited(logits, rows.rules, options.has_rules, context)
        if processors:
            words, token_ids = rows.features[ARGUMENTS][row], rows.token_ids[row]
            of_rows = token_ids, context.prompt_lens, position, rows.arrival[row]
            changed = processed(processors, changed, words, options.has_rules, of_rows)
        for has_some in barred:
            changed = automata.not_empty(changed, logits, has_some)
        return changed

    return logits, edit


def choose(
    slots: Slots,
    options: SamplingState,
    rows: Rows,
    tracked: Values,
    shared: Values,
    config: StepConfig,
) -> Choice:
    """Choose a token in each slot, from what `allowed` leaves, by the config's sampler.

    A token is -1 if the sampler has chosen one that is not in the vocabulary.
    """
    logits, edit = allowed(slots, options, rows, tracked, shared, config.processors)
    sampler = config.sampler
    if sampler is None:
        token_ids = sample(logits, options, slots.position, edit)
    else:
        token_ids = sampled_by(sampler, logits, options, slots.position, edit)

    def of_rows(feature: str) -> Any:
        return jax.tree.map(lambda values: values[slots.row], rows.features[feature])

    return Choice(logits, options, edit, token_ids, slots.position, of_rows)


def sampled_by(
    sampler: Sampler,
    logits: Float[Array, "rows vocab"],
    options: SamplingState,
    positions: Int[Array, " rows"],
    edit: Edit,
) -> Int[Array, " rows"]:
    """Choose one token a row as `sampling.sample` does, with a sampler from outside for rows that sample.

    Returns: tokens; -1 for one that is not in the vocabulary.
    """
    changed = lax.cond(jnp.any(options.has_rules), edit, lambda logits: logits, logits)
    greedy = likeliest(changed)
    asked = SamplingOptions(*(getattr(options, name) for name in SamplingOptions._fields))
    samples = (options.temperature > 0) & jnp.isfinite(jnp.max(changed, axis=1))

    def draw() -> Int[Array, " rows"]:
        drawn = sampler(changed, asked, positions)
        is_known = (drawn >= 0) & (drawn < logits.shape[1])
        return jnp.where(samples, jnp.where(is_known, drawn, -1), greedy)

    return lax.cond(jnp.any(samples), draw, lambda: greedy)
