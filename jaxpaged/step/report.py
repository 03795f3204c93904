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
    ROW_NUMBERS = enum.auto()  # likewise; the values themselves are rows, counted through all replicas
    SUM = enum.auto()
    BITS = enum.auto()  # a bit is set where some replica has set it
    KEEP = enum.auto()  # as they are, with the axis of replicas


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
    # The row that had, when the run began, what this row holds: another one for beams only.
    origin: Int[Array, " rows"] = field(metadata=ROW_NUMBERS)
    cum_logprob: Float[Array, " rows"] = field(metadata=ROWS)  # of running and of ended beams
    beam_rank: Int[Array, " rows"] = field(metadata=ROWS)
    new_token_ids: Int[Array, "rows max_steps"] = field(metadata=ROWS)  # the row's last tokens, newest last
    new_scores: Scores | None = field(metadata=ROWS)  # of these tokens (`loop.recent_scores`), where wanted
    num_free_blocks: Int[Array, ""] = field(metadata=SUM)
    num_cached_blocks: Int[Array, ""] = field(metadata=SUM)  # free ones whose content can still be found
    # Scores of the last step's prompt tiles; None where they were not fetched. Merged separately.
    prompt_scores: PromptScores | None = field(metadata=KEEP)
    counters: Int[Array, " counters"] = field(metadata=KEEP)  # by `Counter`
    status: Int[Array, ""] = field(metadata=BITS)
