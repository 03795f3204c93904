"""Length of runs: how much of them the loop does before the host looks again, by how long the last took."""

import dataclasses

from jaxpaged.checks import INT32_MAX
from jaxpaged.step.config import MAX_STEPS

# A run should take about so long: short enough to stream, long enough for its dispatch to cost nothing.
SECONDS_PER_RUN = 0.1
# And so long while others wait for its end: rows for the host behind each token, requests for their blocks.
SECONDS_WHILE_OTHERS_WAIT = 0.02
# And so long while nobody reads tokens as they come. On a CPU each run takes its temporary memory anew where
# it is over 64 MiB: see `machine.keep_freed`.
SECONDS_WHILE_NOBODY_READS = 0.5


@dataclasses.dataclass
class RunLengthController:
    """Controller of the next run's length, by the seconds that steps and passes over prompts take.

    The host cannot stop a run that it has dispatched. So a run has a number of steps that is right while rows
    decode, and ends at a number of passes over prompts, whose time is known apart. What was never measured is
    taken to be long: then a run makes one step, or ends at the first step with a prompt in it.
    """

    seconds_per_step: float | None = None  # in which rows decode and no prompt is computed
    seconds_per_pass: float | None = None  # over tiles of prompts, of which a step may make several

    @property
    def max_steps(self) -> int:
        """Steps of the next run, from 1 to MAX_STEPS."""
        return _times(self.seconds_per_step, MAX_STEPS)

    @property
    def max_steps_while_others_wait(self) -> int:
        """Steps of the next run, from 1 to MAX_STEPS, while rows or requests wait for its end."""
        return _times(self.seconds_per_step, MAX_STEPS, SECONDS_WHILE_OTHERS_WAIT)

    @property
    def max_steps_while_nobody_reads(self) -> int:
        """Steps of the next run, from 1 to MAX_STEPS, while all answers are read when they have ended."""
        return _times(self.seconds_per_step, MAX_STEPS, SECONDS_WHILE_NOBODY_READS)

    @property
    def max_passes(self) -> int:
        """Passes over prompts after which the next run ends, at least 1."""
        return _times(self.seconds_per_pass, INT32_MAX)

    def note(self, num_steps: int, num_passes: int, seconds: float) -> None:
        """Learn from a run of so many steps, with so many passes over prompts in them.

        Of a run with both kinds of work, the steps count as long as others have been; what is left is that of
        the passes, if it is the larger part: a smaller one would be mostly the error of the other.
        """
        if num_steps == 0:
            return
        per_unit = seconds / num_steps
        self.seconds_per_step = (
            per_unit if not num_passes else min(self.seconds_per_step or per_unit, per_unit)
        )
        if num_passes == 0:
            return
        per_unit = seconds / num_passes
        rest = per_unit - self.seconds_per_step * num_steps / num_passes
        if rest > per_unit / 2:
            self.seconds_per_pass = rest
        else:
            self.seconds_per_pass = min(self.seconds_per_pass or per_unit / 2, per_unit)


def _times(seconds: float | None, limit: int, per_run: float = SECONDS_PER_RUN) -> int:
    """Return how often something that takes so long is done in a run."""
    if seconds is None:
        return 1
    return int(min(max(per_run / seconds, 1), limit)) if seconds > 0 else limit
