"""What every result line says beside its numbers: command, commit, date, machine and versions."""

import datetime
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def context(module: str) -> dict[str, Any]:
    """The circumstances of this run of `python -m module`."""
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"python": platform.python_version(), **versions},
    }


def commit() -> str:
    """The commit that is checked out, with a plus if the packages differ from it."""
    rev = _git("rev-parse", "--short", "HEAD")
    return (
        f"{rev}+"
        if _git("status", "--porcelain", "--", "jaxpaged", "pallas_kernels", "benchmarks/*.py")
        else rev
    )


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Median, least and greatest of repeated measurements."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "runs": len(values),
    }


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
