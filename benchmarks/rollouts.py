"""Rollouts per second with new weights in each round, ours beside a peer's: `python -m benchmarks.rollouts`.

A round is an update of all weights, from arrays that the trainer has, and eight sampled answers of 64 tokens
to each of 64 prompts, with their log-probabilities. Each engine runs in a process of its own on the same two
cores, engines taking turns. Standard output is one JSON line for each engine and dtype. For example:

    python -m benchmarks.rollouts --model smollm2-hf --peer vllm_rollouts=.venv-vllm/bin/python=smollm2-hf

See `peers/README.md` for how to install a peer and make the model's directory.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks import record, workloads
from benchmarks.turns import MAX_FOREIGN_CPU, Engine, engine_of, turn

_MODEL = flags.DEFINE_string("model", None, "Directory in Hugging Face's form.", required=True)
_WORKLOAD = flags.DEFINE_string("workload", "rollouts", "Function of `workloads`.")
_DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "With commas between them.")
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Turns of each engine.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 2, "Counted rounds of rollouts in a turn.", lower_bound=1)
_PEER = flags.DEFINE_multi_string("peer", [], "NAME=PYTHON=MODEL; may be given several times.")
_OUT = flags.DEFINE_string("out", None, "File to append result lines to.")


def main(argv: list[str]) -> None:
    """Measure, and print a line for each engine and dtype."""
    record.start(argv)
    ours = Engine("jaxpaged_rollouts", sys.executable, {"": _MODEL.value})
    engines = [ours, *map(engine_of, _PEER.value)]
    results = record.Results("rollouts", _OUT.value)
    for dtype in _DTYPES.value:
        for line in compare(engines, getattr(workloads, _WORKLOAD.value)(), dtype):
            results.put(line)


def compare(engines: list[Engine], workload: workloads.Workload, dtype: str) -> list[dict[str, Any]]:
    """Run all turns of one dtype; the first engine is ours, to which ratios are taken."""
    runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(workload, file)
        file.flush()
        for _ in range(_ROUNDS.value):
            for engine in engines:
                runs[engine.name] += turn(engine, Path(file.name), dtype, _REPEATS.value)
    lines = []
    for name, its in runs.items():
        quiet = [run for run in its if run["foreign_cpu"] <= MAX_FOREIGN_CPU]
        counted = quiet or its
        measured = ("rollouts_per_s", "seconds", "update_seconds", "update_bytes")
        spreads = {key: record.spread([run[key] for run in counted]) for key in measured}
        about = {key: counted[0][key] for key in ("peer", "version", "dtype", "workload", "answers")}
        lines.append({"engine": name, **about, **spreads, "noisy": not quiet})
    first = lines[0]["rollouts_per_s"]["median"]
    lines[0]["ratio_to"] = {
        line["engine"]: round(first / line["rollouts_per_s"]["median"], 2) for line in lines[1:]
    }
    return lines


if __name__ == "__main__":
    app.run(main)
