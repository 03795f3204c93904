"""Statistics of an engine: what it has done since it was made, and how it stands."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxpaged.step.report import Report
from jaxpaged.step.state import Counter, Phase
from jaxpaged.tiers.tiers import TierCounts


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of an engine since it was made, and how it stands."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed in prompt tiles
    num_decode_tokens: int = 0  # computed in decode slots, drafts included
    num_new_tokens: int = 0  # of answers
    num_preemptions: int = 0
    num_lookup_tokens: int = 0  # looked up in the prefix cache
    num_hit_tokens: int = 0  # found there
    num_prompt_passes: int = 0  # of the model over prompt tiles
    num_drafts: int = 0  # steps of a sequence with drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # drafts that were right
    num_accepted_at: tuple[int, ...] = ()  # the same by the draft's place in a step, the first one's first
    num_running: int = 0
    num_waiting: int = 0  # on the device or on the host, preempted ones included
    num_blocks: int = 0  # of the pool, the null block left out
    num_free_blocks: int = 0
    num_cached_blocks: int = 0  # free ones whose content can still be found
    # Counts of the tiers below the device, by their names; they go on.
    tiers: Mapping[str, TierCounts] = dataclasses.field(default_factory=dict)

    def after(self, report: Report, done: Sequence[int], num_waiting: int) -> "Stats":
        """Return the statistics after a run: its report, what it added to `EngineState.counters`, and the
        requests that wait.
        """
        counts = {counter.name.lower(): more for counter, more in zip(Counter, done, strict=False)}
        at = done[len(Counter) :]
        before = self.num_accepted_at or (0,) * len(at)
        return dataclasses.replace(
            self,
            num_accepted_at=tuple(a + b for a, b in zip(before, at, strict=True)),
            **{name: getattr(self, name) + more for name, more in counts.items()},
            num_running=int(np.count_nonzero(report.phase == Phase.RUNNING)),
            num_waiting=num_waiting,
            num_free_blocks=int(report.num_free_blocks),
            num_cached_blocks=int(report.num_cached_blocks),
        )

    def gauges(self) -> list[tuple[str, str, float]]:
        """Return what goes up and down: vLLM's name without its prefix, a sentence, and the value."""
        return [
            ("num_requests_running", "Answers that run.", self.num_running),
            ("num_requests_waiting", "Answers that wait.", self.num_waiting),
            (
                "kv_cache_usage_perc",
                "The share of blocks in use, from 0 to 1.",
                1 - self.num_free_blocks / self.num_blocks,
            ),
        ]

    def totals(self, *, with_drafts: bool) -> list[tuple[str, str, int]]:
        """Return what only grows: vLLM's name without its prefix, a sentence, and the count."""
        prefix_cache = [
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", self.num_lookup_tokens),
            ("prefix_cache_hits", "Tokens found there.", self.num_hit_tokens),
            ("num_preemptions", "Times that a request gave way.", self.num_preemptions),
        ]
        drafts = [
            ("spec_decode_num_drafts", "Steps of a sequence with drafts.", self.num_drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", self.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts that were right.", self.num_accepted_tokens),
        ]
        return prefix_cache + drafts if with_drafts else prefix_cache


@dataclasses.dataclass(frozen=True)
class DraftTotals:
    """Counts of the drafts for tokens of answers, since the engine was made; by the names of `Stats`."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_at: tuple[int, ...]

    @classmethod
    def none(cls, most_drafts: int) -> "DraftTotals":
        """Return the counts of nothing, where a step has at most so many drafts of an answer."""
        return cls(0, 0, 0, (0,) * most_drafts)

    def after(self, values: np.ndarray) -> "DraftTotals":
        """Return the counts after more tokens of an answer, by what each adds: the channel `DRAFTS`, uint8
        [tokens, 3]. They begin with a step's first token.
        """
        steps, drafts, right = values.sum(axis=0).tolist()
        if not drafts:
            return self
        token = np.arange(len(values))
        place = token - np.maximum.accumulate(np.where(values[:, 0] > 0, token, 0))
        at = np.bincount(place[values[:, 2] > 0], minlength=len(self.num_accepted_at)).tolist()
        return DraftTotals(
            num_drafts=self.num_drafts + steps,
            num_draft_tokens=self.num_draft_tokens + drafts,
            num_accepted_tokens=self.num_accepted_tokens + right,
            num_accepted_at=tuple(a + b for a, b in zip(self.num_accepted_at, at, strict=True)),
        )
