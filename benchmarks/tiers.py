"""Time to the first token of a cached prompt, by the tier that has it: `python -m benchmarks.tiers`.

Four ways to answer a prompt of 2,000 tokens with one token: to compute it; from the device's own cache; from
host memory; from files of which the system's cache was told to drop all. Two prompts take turns in caches
that hold one, so that each comes from below the device. Standard output is a JSON line: the median
milliseconds of each way and the least, and the tokens that each tier gave.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import record
from jaxpaged import LLM, SamplingParams

_MODEL = flags.DEFINE_string("model", "smollm2", "As for LLM.")
_DTYPE = flags.DEFINE_string("dtype", "auto", "As for LLM.")
_TOKENS = flags.DEFINE_integer("tokens", 2000, "Of a prompt.", lower_bound=32)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each way.", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", None, "Where the files are; default: a temporary folder.")
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)


def measure(folder: Path) -> dict[str, Any]:
    block_size = 16
    options: dict[str, Any] = {
        "dtype": _DTYPE.value,
        "max_num_seqs": 4,
        "max_model_len": _TOKENS.value + 32,
        "block_size": block_size,
        "num_blocks": _TOKENS.value // block_size + 16,
    }
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 2000, _TOKENS.value).tolist() for _ in range(2)]
    seconds: dict[str, list[float]] = {}
    told: dict[str, Any] = {}

    def ask(way: str | None, llm: LLM, prompt: list[int]) -> None:
        began = time.perf_counter()
        [answer] = llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
        if way is not None:
            seconds.setdefault(way, []).append(time.perf_counter() - began)
            assert answer.metrics is not None
            told[way] = {"hit": answer.num_cached_tokens, "fetched": dict(answer.metrics.num_fetched_tokens)}

    plain = LLM(_MODEL.value, **options)
    bytes_per_token = plain.engine._driver.state.kv_cache.block_bytes() / block_size
    one_prompt_gib = 1.1 * bytes_per_token * _TOKENS.value / 2**30
    host = LLM(_MODEL.value, kv_offloading_size=3 * one_prompt_gib, **options)
    disk = LLM(
        _MODEL.value,
        kv_offloading_size=one_prompt_gib,
        kv_offloading_backend=f"disk:{folder}",
        **options,
    )
    ask(None, plain, prompts[1])
    for prompt in prompts:
        ask("compute_and_store_in_host", host, prompt)
        ask("compute_and_store_in_disk", disk, prompt)
    ask(None, host, prompts[0])  # the first fetch is a measurement of the rule
    for turn in range(_ROUNDS.value):
        prompt = prompts[(turn + 1) % 2]
        assert plain.reset_prefix_cache()
        ask("compute", plain, prompt)
        ask("device", plain, prompt)
        ask("host", host, prompt)
        time.sleep(1.5)  # until the writer has nothing left
        record.drop_cache(folder)
        ask("disk", disk, prompts[turn % 2])
    for llm in (plain, host, disk):
        llm.engine.close()
    median = {way: statistics.median(its) for way, its in seconds.items()}
    return {
        "model": _MODEL.value,
        "dtype": str(plain.engine._driver.state.kv_cache.dtype),
        "tokens": _TOKENS.value,
        "mb": round(bytes_per_token * _TOKENS.value / 1e6, 1),
        "first_token_ms": {way: round(1e3 * its, 1) for way, its in median.items()},
        "least_ms": {way: round(1e3 * min(its), 1) for way, its in seconds.items()},
        "times_faster_than_computing": {
            way: round(median["compute"] / median[way], 1) for way in ("device", "host", "disk")
        },
        "tokens_told": told,
        "rounds": _ROUNDS.value,
    }


def main(argv: list[str]) -> None:
    record.start(argv)
    with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
        record.Results("tiers").put(measure(Path(folder) / "kept"))


if __name__ == "__main__":
    app.run(main, sys.argv)
