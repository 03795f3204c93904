"""Turns of engines that are compared: each run in a process of its own, on the same two cores."""

import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record

RUNNERS = Path(__file__).parent / "peers"
MAX_FOREIGN_CPU = 0.05
NUM_CORES = 2


@dataclasses.dataclass(frozen=True)
class Engine:
    """Command of one engine: its runner's flags, the Python it lives in, and its model by dtype."""

    name: str
    python: str
    models: dict[str, str]  # dtype -> model; one for all under ""

    @property
    def command(self) -> list[str]:
        kind, *flags = self.name.split("--")
        return [self.python, str(RUNNERS / f"{kind}_runner.py"), *(f"--{flag}" for flag in flags)]

    def model(self, dtype: str) -> str:
        return self.models.get(dtype) or self.models[""]


def turn(engine: Engine, workload: Path, dtype: str, repeats: int) -> list[dict[str, Any]]:
    """Run one process of one engine; return its JSON lines, with the share of the cores that others used."""
    command = [*engine.command, "--model", engine.model(dtype), "--dtype", dtype]
    command += ["--workload", str(workload), "--repeats", str(repeats)]
    begin, busy, own = time.perf_counter(), _busy_seconds(), _children_seconds()
    with tempfile.TemporaryFile("w+") as errors:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=record.ROOT, check=False
        )
        if result.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{errors.read()[-3000:]}")
    seconds = time.perf_counter() - begin
    foreign = (_busy_seconds() - busy) - (_children_seconds() - own)
    share = max(foreign, 0) / (seconds * NUM_CORES)
    print(f"{engine.name} {dtype} {workload.stem}: others used {share:.1%}", file=sys.stderr)
    return [json.loads(line) | {"foreign_cpu": share} for line in result.stdout.splitlines()]


def _busy_seconds() -> float:
    """Return the processor seconds that all processes have used since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def engine_of(text: str) -> Engine:
    """Return the engine that a --peer names. Ends the process if it names none."""
    try:
        name, python, model = text.split("=")
    except ValueError:
        sys.exit(f"--peer {text!r} must be NAME=PYTHON=MODEL")
    return Engine(name, python, models_of(model))


def models_of(text: str) -> dict[str, str]:
    """Return the models by dtype; one for all under ""."""
    return dict(part.split(":", 1) for part in text.split(",")) if ":" in text else {"": text}
