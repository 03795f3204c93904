"""Snapshot of an engine, which a replay starts from."""

import dataclasses

from jaxpaged.engine.request_queue import Queued
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """An engine between two runs, as values of the host; `jaxpaged.replay` writes it to a file."""

    state: EngineState  # NumPy arrays; of K and V only shapes and types
    step_config: StepConfig
    vocab_size: int
    queue: tuple[Queued, ...]  # requests without a row, in the order of service
