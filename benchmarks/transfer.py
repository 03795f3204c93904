"""Cost of moving a prompt's K and V from one engine to another: `python -m benchmarks.transfer`.

Three ways to have a prompt of 1,000 tokens in a cache: to compute it; to export it from another engine of the
same process, as bytes, and to adopt it; and to hand it over from device to device. Standard output is a JSON
line: milliseconds of each, the median over rounds, GB/s of K and V, and the same for the bytes' form alone.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks import record
from jaxpaged import LLM, SamplingParams
from jaxpaged.handover.blocks import Blocks

_MODEL = flags.DEFINE_string("model", "smollm2", "As for LLM.")
_DTYPE = flags.DEFINE_string("dtype", "auto", "As for LLM.")
_LAYOUT = flags.DEFINE_string("kv_layout", "token_major", "As for LLM.")
_TOKENS = flags.DEFINE_integer("tokens", 1000, "Of the prompt.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Turns of each way.", lower_bound=1)


def measure() -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": _DTYPE.value, "kv_layout": _LAYOUT.value, "max_num_seqs": 4}
    here, there = (LLM(_MODEL.value, max_model_len=_TOKENS.value + 32, **options) for _ in range(2))
    prompt = np.random.default_rng(0).integers(1000, 2000, _TOKENS.value).tolist()
    one_token = SamplingParams(max_tokens=1, temperature=0)

    def compute(llm: LLM) -> None:
        assert llm.reset_prefix_cache()
        llm.generate([prompt], one_token, use_tqdm=False)

    kept: dict[str, Any] = {}

    def export() -> None:
        kept["blocks"] = here.export_blocks(prompt)

    def to_bytes() -> None:
        kept["data"] = kept["blocks"].to_bytes()

    def from_bytes() -> None:
        kept["blocks"] = Blocks.from_bytes(kept["data"])

    def adopt() -> None:
        assert there.reset_prefix_cache()
        assert there.adopt_blocks(kept["blocks"]) == _TOKENS.value // there.config.block_size

    def hand_over() -> None:
        assert there.reset_prefix_cache()
        here.engine.hand_over(there.engine, prompt)

    ways: dict[str, Callable[[], None]] = {
        "compute": lambda: compute(here),
        "export": export,
        "to_bytes": to_bytes,
        "from_bytes": from_bytes,
        "adopt": adopt,
        "hand_over": hand_over,
    }

    def wait() -> None:
        for llm in (here, there):
            jax.block_until_ready(llm.engine._driver.state.kv_cache)

    seconds = record.in_turns(ways, _ROUNDS.value, wait)
    answer = there.generate([prompt], one_token, use_tqdm=False)[0]
    num_bytes = kept["blocks"].num_bytes
    for llm in (here, there):
        llm.engine.close()
    median = {name: statistics.median(its) for name, its in seconds.items()}
    return {
        "model": _MODEL.value,
        "dtype": kept["blocks"].block_format.dtype,
        "kv_layout": _LAYOUT.value,
        "tokens": _TOKENS.value,
        "hit_tokens": answer.num_cached_tokens,
        "mb": round(num_bytes / 1e6, 2),
        "ms": {name: round(1e3 * its, 2) for name, its in median.items()},
        "gb_per_s": {
            name: round(num_bytes / its / 1e9, 2) for name, its in median.items() if name != "compute"
        },
        "rounds": _ROUNDS.value,
    }


def main(argv: list[str]) -> None:
    record.start(argv)
    record.Results("transfer").put(measure())


if __name__ == "__main__":
    app.run(main, sys.argv)
