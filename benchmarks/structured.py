"""Cost of structured outputs: a decode step with grammars beside one without, and time to the first token.

    python -m benchmarks.structured --rows 32 --out benchmarks/results/structured-cpu.jsonl
    python -m benchmarks.structured --rows 4 --slots 32 --drafts '{"method": "grammar"}' --compact
    python -m benchmarks.structured --peer .venv-vllm/bin/python=smollm2-hf

One engine with room for grammars, and one without, in turns. The first generates with a different schema in
each row, with one schema in all, with any object (followed by the host, or to 4 levels by an automaton), and
with none. With `ignore_eos` all answers are of one length: behind its end an answer goes on with end tokens,
the only ones that its grammar allows there. With `--drafts` the first one drafts, the other does not, and
gets the schemas, too. A peer's first tokens are timed in the same run.
"""

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.record import ROOT, Results, start, times_of
from benchmarks.workloads import schema_of_object
from jaxpaged import LLM, SamplingParams, StructuredOutputsParams

ROWS = flags.DEFINE_integer("rows", 32, "requests at a time")
TOKENS = flags.DEFINE_integer("tokens", 96, "new tokens of each")
ROUNDS = flags.DEFINE_integer("rounds", 5, "measurements of each way")
SLOTS = flags.DEFINE_integer("slots", None, "max_num_seqs; as many as rows if none is given")
DRAFTS = flags.DEFINE_string("drafts", None, "speculative_config of the engine with grammars")
COMPACT = flags.DEFINE_bool("compact", False, "whether JSON has no white space to choose")
PEER = flags.DEFINE_string("peer", None, "Python of vLLM and a Hugging Face directory: PYTHON=DIRECTORY")
DTYPE = flags.DEFINE_string("dtype", "bfloat16", "number format of weights and activations")
OUT = flags.DEFINE_string("out", None, "file to append result lines to")


def schema(number: int) -> dict[str, Any]:
    """Return a schema that no other number has: an object of a text, a number and a choice."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 10**9},
        {"enum": [f"choice {number} {i}" for i in range(6)]},
    ]
    return schema_of_object(number, kinds)


def asked(constraint: dict[str, Any] | None, tokens: int, **more: Any) -> SamplingParams:
    made = None
    if constraint is not None:
        made = StructuredOutputsParams(json=constraint, disable_any_whitespace=COMPACT.value, **more)
    return SamplingParams(
        max_tokens=tokens, temperature=0.8, seed=1, ignore_eos=True, structured_outputs=made
    )


def seconds(llm: LLM, params: list[SamplingParams]) -> float:
    """Return the time of all answers, less that of their first tokens."""
    prompts = [f"Describe yourself as JSON, number {i}:" for i in range(len(params))]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == params[0].max_tokens for output in outputs)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    first = max(each.first_token_time or 0 for each in metrics)
    return max(each.finished_time or 0 for each in metrics) - first


def first_token(llm: LLM, constraint: dict[str, Any] | None) -> float:
    """Return the seconds from the call to the first token."""
    begin = time.perf_counter()
    llm.generate("Describe yourself as JSON:", asked(constraint, 1), use_tqdm=False)
    return time.perf_counter() - begin


def time_peer(results: Results, schemas: list[dict[str, Any]]) -> None:
    """Time a peer's first tokens of these schemas, in its own process."""
    python, model = (PEER.value or "").split("=")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schemas.json"
        file.write_text(json.dumps(schemas))
        script = ROOT / "benchmarks/peers/vllm_first_token.py"
        command = [python, str(script), "--model", model, "--schemas", str(file), "--dtype", DTYPE.value]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        results.put(json.loads(line))


def main(argv: list[str]) -> None:
    start(argv)
    rows, tokens = ROWS.value, TOKENS.value
    slots, drafts = SLOTS.value or rows, json.loads(DRAFTS.value or "null")
    settings = {"dtype": DTYPE.value, "slots": slots, "drafts": drafts, "compact": COMPACT.value}
    results = Results("structured", OUT.value, rows=rows, tokens=tokens, **settings)
    options: dict[str, Any] = {"max_num_seqs": slots, "dtype": DTYPE.value, "max_model_len": 512}
    room: dict[str, Any] = {"structured_outputs_mib": 64}
    without = LLM("smollm2", **options, **(room if drafts else {}))
    llm = LLM("smollm2", **options, **room, speculative_config=drafts)
    schemas = [schema(i) for i in range(rows)]
    plain = [asked(None, tokens)] * rows
    mixed = [asked(its, tokens) for its in schemas]
    ways: dict[str, tuple[LLM, list[SamplingParams]]] = {
        "engine without room" if drafts is None else "without drafts, no grammars": (without, plain),
        "no grammars": (llm, plain),
        "one schema": (llm, [asked(schemas[0], tokens)] * rows),
        "a schema each": (llm, mixed),
    }
    if drafts is None:
        ways["any object, by the host"] = llm, [asked({"type": "object"}, tokens)] * rows
        ways["any object, 4 levels"] = llm, [asked({"type": "object"}, tokens, max_depth=4)] * rows
    else:
        ways["without drafts, a schema each"] = without, mixed
    cold = [first_token(llm, schema(100 + i)) for i in range(ROUNDS.value)]
    warm = [first_token(llm, schema(100 + i)) for i in range(ROUNDS.value)]
    none = [first_token(llm, None) for _ in range(ROUNDS.value)]
    if PEER.value:
        time_peer(results, [schema(100 + i) for i in range(ROUNDS.value)])
    for name, values in (("cold schema", cold), ("warm schema", warm), ("none", none)):
        results.put({"what": f"time to the first token, {name}", "s": round(statistics.median(values), 4)})
    begin = time.perf_counter()
    for each in ways.values():
        seconds(*each)
    results.put(
        {"what": "first round, which compiles the schemas", "s": round(time.perf_counter() - begin, 2)}
    )
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS.value):
        for name, each in ways.items():
            took[name].append(seconds(*each))
    times = times_of(took, "no grammars")
    for name, its in took.items():
        results.put(
            {
                "what": f"decode step, {name}",
                "ms": round(1000 * statistics.median(its) / (tokens - 1), 2),
                "least ms": round(1000 * min(its) / (tokens - 1), 2),
                "beside no grammars": times[name],
            }
        )


if __name__ == "__main__":
    app.run(main)
