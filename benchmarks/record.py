"""Circumstances of every result line: command, commit, date, machine and versions.

python -m benchmarks.record FILE...       the lines of these files as tables, without all that
"""

import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from absl import app, flags, logging

ROOT = Path(__file__).resolve().parents[1]


def context(module: str) -> dict[str, Any]:
    """Return the circumstances of this run of `python -m module`."""
    installed = {found.name for found in metadata.distributions()}
    names = [name for name in ("jax", "jaxlib", "flax", "numpy") if name in installed]
    return {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in names},
    }


def start(argv: Sequence[str]) -> None:
    """Start a `main` that takes flags alone; without --verbosity, log warnings and errors alone."""
    if len(argv) > 1:
        raise app.UsageError(f"{shlex.join(argv[1:])!r} must be flags alone")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)


class Results:
    """Result lines of one run, printed and appended to a file as soon as they are there.

    Args:
        name: the benchmark's, of this folder.
        out: a file; None for none.
        short: print lines without their circumstances.
        more: what all lines have beside `context`.
    """

    def __init__(self, name: str, out: str | None = None, *, short: bool = False, **more: Any) -> None:
        self.context = context(f"benchmarks.{name}") | more
        self.out, self.short = out, short

    def put(self, line: dict[str, Any]) -> None:
        print(json.dumps(line if self.short else self.context | line), flush=True)
        append(self.context | line, self.out)


class Budget:
    """Seconds that a run may take, counted from here on."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    def is_spent(self) -> bool:
        """Return whether the time is over, and print a line if it is."""
        over = time.monotonic() > self._end
        if over:
            print(json.dumps({"what": "stopped", "because": f"the budget of {self.seconds:.0f} s is spent"}))
        return over


def in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, wait: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds of each way, run in turns; a first turn, which compiles, is not counted.

    wait: called after each run, and counted with it: it waits for what was dispatched.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 + rounds):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            wait()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def times_of(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, float]:
    """Return the time of each way as a multiple of the base's in the same turn, the median over turns."""
    return {
        name: round(statistics.median(a / b for a, b in zip(its, seconds[base], strict=True)), 3)
        for name, its in seconds.items()
    }


CIRCUMSTANCES = ("command", "commit", "date", "machine", "versions", "device", "gpu", "ptxas")


def tables(lines: Iterable[dict[str, Any]]) -> str:
    """Return result lines as tables for people: one per kind of line, in the order of their first ones."""
    kinds: dict[tuple[str, ...], list[list[str]]] = {}
    for line in lines:
        shown = {name: value for name, value in line.items() if name not in CIRCUMSTANCES}
        kinds.setdefault(tuple(shown), []).append(list(map(_cell, shown.values())))
    parts = []
    for names, rows in kinds.items():
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        parts.append(
            "\n".join(
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                for row in (names, *rows)
            )
        )
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    return str(value["median"] if isinstance(value, dict) and "median" in value else value)


def append(line: dict[str, Any], out: str | None) -> None:
    """Append a result line to the file `out`, if there is one."""
    if out:
        with open(out, "a") as file:
            file.write(json.dumps(line) + "\n")


def commit() -> str:
    """Return the commit that is checked out, with a plus if the packages differ from it; "" outside a
    checkout.
    """
    rev = _output("git", "rev-parse", "--short", "HEAD")
    changed = _output("git", "status", "--porcelain", "--", "jaxpaged", "pallas_kernels", "benchmarks/*.py")
    return f"{rev}+" if changed else rev


def gpu(what: str = "driver_version,clocks.sm,clocks.mem,power.limit") -> str:
    """Return driver, clocks and power limit of the GPUs, as nvidia-smi has them; "" where there is none."""
    return _output("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader")


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Return median, least and greatest of repeated measurements."""
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


def resident_bytes(process: int | str = "self") -> int:
    """Return the memory that a process has now: of Linux only. `process`: its id, or "self"."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def drop_cache(folder: Path) -> None:
    """Write the *.safetensors of a folder to the disk, and have the system forget its cache of them."""
    os.sync()
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _output(*command: str) -> str:
    """Return what a command prints; "" if it cannot be run or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()


if __name__ == "__main__":
    texts = [Path(name).read_text() for name in sys.argv[1:] if Path(name).exists()]
    print(tables(json.loads(line) for text in texts for line in text.splitlines()))
