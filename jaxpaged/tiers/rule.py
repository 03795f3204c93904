"""The rule by which blocks are fetched: if that takes no longer than to compute them."""

import dataclasses

# How long a request waits for blocks where the time to compute them was never measured.
UNMEASURED_SECONDS = 5.0
# Weight of the newest measurement in an estimate.
NEWEST = 0.5
# Part of an estimate that is left when it has refused a fetch: so a tier that was slow once is tried again.
AFTER_REFUSAL = 0.9


@dataclasses.dataclass
class Rate:
    """Estimate of the seconds that a byte takes; None before the first measurement."""

    seconds: float | None = None

    def note(self, count: int, seconds: float) -> None:
        """Learn from a measurement of `count` bytes."""
        if count > 0:
            new = seconds / count
            self.seconds = new if self.seconds is None else NEWEST * new + (1 - NEWEST) * self.seconds

    def of(self, count: int) -> float | None:
        """Return the seconds that so many bytes take; None if that is unknown."""
        return 0.0 if count == 0 else None if self.seconds is None else count * self.seconds


@dataclasses.dataclass
class Rule:
    """Estimates of one engine: of copies to the device, and of reads from the store below.

    What was never measured is tried. `reference.tiers.pays` is the oracle.
    """

    upload: Rate = dataclasses.field(default_factory=Rate)  # of a byte from host memory to the device
    below: Rate = dataclasses.field(default_factory=Rate)  # of a byte from the store below to host memory

    def seconds(self, num_bytes: int, bytes_below: int) -> float | None:
        """Return how long it takes to fetch so many bytes, some of them from below; None: unknown."""
        parts = self.upload.of(num_bytes), self.below.of(bytes_below)
        return None if parts[0] is None or parts[1] is None else parts[0] + parts[1]

    def wait(self, compute_seconds: float | None) -> float:
        """Return how long a request waits for blocks that would take so long to compute, in seconds."""
        return UNMEASURED_SECONDS if compute_seconds is None else compute_seconds

    def pays(self, compute_seconds: float | None, num_bytes: int, bytes_below: int) -> bool:
        """Return whether to fetch blocks that would take `compute_seconds` to compute."""
        fetch = self.seconds(num_bytes, bytes_below)
        if fetch is None or compute_seconds is None or fetch <= compute_seconds:
            return True
        for rate, count in ((self.upload, num_bytes), (self.below, bytes_below)):
            if count and rate.seconds is not None:
                rate.seconds *= AFTER_REFUSAL
        return False
