"""Seconds and memory of new weights in a running engine, by names and as a state of the engine's own form.

    python -m benchmarks.updates --model smollm2-hf --out benchmarks/results/updates-cpu.jsonl

All weights are replaced, with those of the model's safetensors. Memory is the most that the process has while
an update runs, less what it had before.
"""

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from safetensors.numpy import load_file

from benchmarks.record import Results, resident_bytes, start
from jaxpaged import LLM

MODEL = flags.DEFINE_string("model", None, "directory of Hugging Face's form", required=True)
ROUNDS = flags.DEFINE_integer("rounds", 5, "updates of each way")
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "number formats of the engine's weights")
OUT = flags.DEFINE_string("out", None, "file to append result lines to")


def measured(update: Callable[[Any], object], weights: Any) -> tuple[float, int]:
    """Return the seconds of an update, and the bytes that it takes beside what was there."""
    before = most = resident_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    update(weights)
    took = time.perf_counter() - begin
    done.set()
    watcher.join()
    return took, most - before


def main(argv: list[str]) -> None:
    start(argv)
    arrays: dict[str, Any] = {}
    for path in sorted(Path(MODEL.value).glob("*.safetensors")):
        arrays |= load_file(path)
    for dtype in DTYPES.value:
        results = Results(
            "updates", OUT.value, dtype=dtype, weight_bytes=sum(x.nbytes for x in arrays.values())
        )
        llm = LLM(MODEL.value, dtype=dtype, max_model_len=512, max_num_seqs=4)
        llm.generate("a", use_tqdm=False)
        one_norm = {"model.norm.weight": arrays["model.norm.weight"]}
        for what, given in (("all, by names", arrays), ("a state", None), ("one norm", one_norm)):
            # The engine's own only now: who holds old arrays keeps their memory.
            weights = llm.weights if given is None else given
            each = [measured(llm.update_weights, weights) for _ in range(ROUNDS.value)]
            seconds, taken = zip(*each, strict=True)
            results.put(
                {
                    "what": what,
                    "s": round(statistics.median(seconds), 4),
                    "least s": round(min(seconds), 4),
                    "most bytes": max(taken),
                    "engine's weights, bytes": sum(x.nbytes for x in jax.tree.leaves(llm.weights)),
                }
            )


if __name__ == "__main__":
    app.run(main)
