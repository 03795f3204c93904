"""Report: what the host reads of a run of the loop."""

import enum
from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, Int

from jaxpaged.sampling import Scores
from jaxpaged.step.step import PromptScores


class Merge(enum.Enum):
    """Ways to merge the values of several replicas, [replicas, ...], into those of one engine."""

    ROWS = enum.auto()  # [replicas, rows, ...] to [replicas * rows, ...]
    ROW_NUMBERS = enum.auto()  # as ROWS; the values are row numbers, counted through all replicas
    SUM = enum.auto()
    BITS = enum.auto()  # bitwise or of all replicas
    KEEP = enum.auto()  # unchanged, with the axis of replicas


ROWS, ROW_NUMBERS, SUM, BITS, KEEP = ({"merge": how} for how in Merge)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Report:
    """Report of a run, for the host. All arrays are copies: it can be read while the next run has the
    state.

    Each field names the way in which the reports of several replicas are merged.
    """

    phase: Int[Array, " rows"] = field(metadata=ROWS)
    arrival: Int[Array, " rows"] = field(metadata=ROWS)  # which request is in each row
    num_tokens: Int[Array, " rows"] = field(metadata=ROWS)
    finish_reason: Int[Array, " rows"] = field(metadata=ROWS)
    num_hit_tokens: Int[Array, " rows"] = field(metadata=ROWS)
    # Row that held this row's sequence when the run began; only beams move.
    origin: Int[Array, " rows"] = field(metadata=ROW_NUMBERS)
    cum_logprob: Float[Array, " rows"] = field(metadata=ROWS)  # of running and ended beams
    beam_rank: Int[Array, " rows"] = field(metadata=ROWS)
    new_token_ids: Int[Array, "rows max_steps"] = field(metadata=ROWS)  # the row's last tokens, newest last
    new_scores: Scores | None = field(metadata=ROWS)  # their scores (`recent.scores`), if wanted
    # Values of the row's last tokens that have them, by channel: [rows, MAX_STEPS, ...], see `step.channels`.
    channels: dict[str, Array] = field(metadata=ROWS)
    num_free_blocks: Int[Array, ""] = field(metadata=SUM)
    num_cached_blocks: Int[Array, ""] = field(metadata=SUM)  # free blocks whose content can still be found
    # Scores of the last step's prompt tiles; None where they were not fetched. Merged separately.
    prompt_scores: PromptScores | None = field(metadata=KEEP)
    counters: Int[Array, " counters"] = field(metadata=KEEP)  # see `EngineState.counters`
    status: Int[Array, ""] = field(metadata=BITS)
