"""Caches of several sizes in `jaxpaged lab`: one by one, in threads as it does, and by `vmap` in one program.

    python -m benchmarks.lab_sweep --trace trace.jsonl [--requests 1024] [--cache_tokens 65536,262144,...]

A JSON line. Each form is compiled first; then the requests go through all caches once with each form. All
forms must hit the same.
"""

import functools
import inspect
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import record
from jaxpaged.research.lab import loop, sweep, traces
from jaxpaged.research.lab.combination import Combination

_TRACE = flags.DEFINE_string("trace", None, "As `jaxpaged lab` takes it.", required=True)
_REQUESTS = flags.DEFINE_integer("requests", 1024, "The trace's first so many.", lower_bound=1)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 512, "Tokens.", lower_bound=1)
_CACHE_TOKENS = flags.DEFINE_list(
    "cache_tokens", [str(2**i) for i in range(16, 24)], "Sizes of the caches, side by side."
)
_POLICY = flags.DEFINE_string("policy", "lru", "Of all caches.")


@functools.partial(jax.jit, donate_argnames="caches")
def _together(
    caches: loop.Cache, symbols: jax.Array, requests: loop.Requests
) -> tuple[loop.Cache, jax.Array]:
    replay = inspect.unwrap(loop.replay)
    return jax.vmap(replay, in_axes=(0, None, None, 0))(caches, symbols, None, requests)


def main(argv: list[str]) -> None:
    """Measure, and print the line."""
    record.start(argv)
    trace = traces.read(_TRACE.value).first(_REQUESTS.value)
    size = _BLOCK_SIZE.value
    asked = [Combination(_POLICY.value, size, int(tokens)) for tokens in _CACHE_TOKENS.value]
    cut = sweep.BlockTrace(trace, traces.blocks(trace, size), asked, 1)

    def one(each: Combination) -> np.ndarray:
        return cut.send(each, trace.num_requests, lambda count: None).hit_tokens

    def in_threads() -> list[np.ndarray]:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            return list(threads.map(one, asked))

    def by_vmap() -> list[np.ndarray]:
        usable = [cut.usable(each) for each in asked]
        caches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(cut.create, asked))
        hits = []
        for calls in zip(*map(cut.calls, usable), strict=True):
            requests = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(call for call, _ in calls))
            caches, hit = _together(caches, cut.symbols, requests)
            hits.append(np.asarray(hit)[:, : calls[0][1]])
        found = np.concatenate(hits, axis=1)
        return [cut.blocks.hit_tokens(each, trace.input_lens) for each in found]

    forms: dict[str, Callable[[], list[np.ndarray]]] = {
        "one_by_one": lambda: [one(each) for each in asked],
        "threads": in_threads,
        "vmap": by_vmap,
    }
    seconds, processor_seconds = {}, {}
    answers = []
    for name, form in forms.items():
        form()  # compiles
        start, processor_start = time.perf_counter(), time.process_time()
        answers.append(form())
        seconds[name] = round(time.perf_counter() - start, 3)
        processor_seconds[name] = round(time.process_time() - processor_start, 3)
    if any(not np.array_equal(a, b) for answer in answers for a, b in zip(answer, answers[0], strict=True)):
        raise RuntimeError("each form must hit the same")
    line = {
        "policy": _POLICY.value,
        "block_size": size,
        "num_caches": len(asked),
        "num_requests": trace.num_requests,
        "num_blocks": int(cut.blocks.num_held.sum()),
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "times_faster_than_one_by_one": {
            name: round(seconds["one_by_one"] / each, 3) for name, each in seconds.items()
        },
    }
    record.Results("lab_sweep").put(line)


if __name__ == "__main__":
    app.run(main)
