"""Snapshot of an engine, which a replay starts from."""

import dataclasses

from jaxpaged.checks import check
from jaxpaged.config import EngineConfig
from jaxpaged.engine.request_queue import Queued
from jaxpaged.step.channels import CHANNELS
from jaxpaged.step.config import StepConfig
from jaxpaged.step.features import FEATURES
from jaxpaged.step.state import EngineState


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """An engine between two runs, as values of the host; `jaxpaged.research.replay` writes it to a file."""

    state: EngineState  # NumPy arrays; of K and V only shapes and types
    step_config: StepConfig
    vocab_size: int
    queue: tuple[Queued, ...]  # requests without a row, in the order of service


def check_snapshot(config: EngineConfig) -> None:
    """Raise `InputError` for an engine with what a snapshot lacks."""
    replicas = config.data_parallel_size
    check("data_parallel_size", replicas, "1 for a snapshot", replicas == 1)
    options = [channel.option for channel in CHANNELS.values()]
    options += [feature.option for feature in FEATURES.values()]
    for name in dict.fromkeys(filter(None, options)):
        asked = getattr(config, name)
        check(name, asked, f"{getattr(EngineConfig, name)} for a snapshot", not asked)
