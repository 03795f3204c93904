"""Conversations that do not fit on the device, with a restart: `python -m benchmarks.conversations`.

Several conversations take turns. Each prompt is the one before, and some new tokens; it is answered with one
token, so that the time is the time to the first token. The device holds a quarter of all, host memory half,
and the directory all. Before the last turn the engine is closed and another one made. The same is done
without any cache, with the device's alone, with host memory, and with a directory below it, of whose files
the system's own cache is told to drop all.

Standard output is a JSON line for each of these ways: milliseconds to the first token of the turns after the
first, before and after the restart, and the tokens that each tier gave. `--write FILE` writes the prompts for
`benchmarks/peers/vllm_conversations.py`, which measures the same way.
"""

import json
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
_FOLDER = flags.DEFINE_string("folder", None, "Where the files are; default: a temporary folder.")
_CONVERSATIONS = flags.DEFINE_integer("conversations", 6, "How many.", lower_bound=2)
_TURNS = flags.DEFINE_integer("turns", 4, "Of each.", lower_bound=2)
_TOKENS = flags.DEFINE_integer("turn_tokens", 256, "New ones of each turn.", lower_bound=32)
_WAYS = flags.DEFINE_list("ways", ["computing", "device", "host", "disk"], "Of these four.")
_WRITE = flags.DEFINE_string("write", None, "A file for the prompts, instead of measuring.")
BLOCK_SIZE = 16
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)


def turns() -> list[list[list[int]]]:
    """Return the prompts of each turn, in the order in which they come."""
    rng, count = np.random.default_rng(0), _CONVERSATIONS.value
    talks: list[list[int]] = [[] for _ in range(count)]
    made = []
    for _ in range(_TURNS.value):
        for talk in talks:
            talk += rng.integers(1000, 2000, _TOKENS.value).tolist()
        made.append([[*talks[i]] for i in rng.permutation(count).tolist()])
    return made


def sizes() -> dict[str, int]:
    """Return the tokens of all conversations, of the longest prompt, and those that the device holds."""
    longest = _TURNS.value * _TOKENS.value
    total = _CONVERSATIONS.value * longest
    return {"total": total, "longest": longest, "device": max(total // 4, longest + 4 * BLOCK_SIZE)}


def measure(way: str, folder: Path) -> dict[str, Any]:
    """Return what one way of answering took."""
    its, gib = sizes(), 0.0
    options: dict[str, Any] = {
        "dtype": _DTYPE.value,
        "max_num_seqs": 4,
        "max_model_len": its["longest"] + 32,
        "block_size": BLOCK_SIZE,
        "num_blocks": its["device"] // BLOCK_SIZE + 1,
        "enable_prefix_caching": way != "computing",
    }

    def make() -> LLM:
        more: dict[str, Any] = {"kv_offloading_size": gib / 2} if way in ("host", "disk") else {}
        if way == "disk":
            more |= {"kv_offloading_backend": f"disk:{folder}", "kv_offloading_disk_size": 2 * gib}
        return LLM(_MODEL.value, **options, **more)

    if way in ("host", "disk"):
        plain = LLM(_MODEL.value, **options)
        gib = plain.engine._driver.state.kv_cache.block_bytes() / BLOCK_SIZE * its["total"] / 2**30
        plain.engine.close()
    llm, seconds = make(), {"before": list[float](), "after": list[float]()}
    fetched: dict[str, dict[str, int]] = {"before": {}, "after": {}}
    made = turns()
    warm = np.random.default_rng(1).integers(2000, 3000, its["longest"]).tolist()
    llm.generate([warm], ONE_TOKEN, use_tqdm=False)
    for turn, prompts in enumerate(made):
        when = "after" if turn == len(made) - 1 else "before"
        if when == "after":
            llm.engine.close()
            record.drop_cache(folder)
            llm = make()
            llm.generate([warm], ONE_TOKEN, use_tqdm=False)
        for prompt in prompts:
            began = time.perf_counter()
            [answer] = llm.generate([prompt], ONE_TOKEN, use_tqdm=False)
            if turn:
                seconds[when].append(time.perf_counter() - began)
                assert answer.metrics is not None
                from_below = dict(answer.metrics.num_fetched_tokens)
                here = (answer.num_cached_tokens or 0) - sum(from_below.values())
                for name, count in {"device": here, **from_below}.items():
                    fetched[when][name] = fetched[when].get(name, 0) + count
    llm.engine.close()
    return {
        "way": way,
        "model": _MODEL.value,
        "tokens": its,
        "first_token_ms": {when: spread(each) for when, each in seconds.items()},
        "prompt_tokens": {
            "before": sum(len(prompt) for prompts in made[1:-1] for prompt in prompts),
            "after": sum(map(len, made[-1])),
        },
        "hit_tokens": fetched,
    }


def spread(seconds: list[float]) -> dict[str, float]:
    return {
        "mean": round(1e3 * statistics.mean(seconds), 1),
        "median": round(1e3 * statistics.median(seconds), 1),
        "least": round(1e3 * min(seconds), 1),
    }


def main(argv: list[str]) -> None:
    record.start(argv)
    if _WRITE.value:
        Path(_WRITE.value).write_text(json.dumps({"sizes": sizes(), "turns": turns()}))
        return
    results = record.Results("conversations")
    for way in _WAYS.value:
        with tempfile.TemporaryDirectory(dir=_FOLDER.value) as folder:
            results.put(measure(way, Path(folder) / "kept"))


if __name__ == "__main__":
    app.run(main, sys.argv)
