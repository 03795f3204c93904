"""Replicas behind a router: in turns, by load, and by longest cached prefix, then load (`jaxpaged.routing`).

    python -m benchmarks.routing --trace trace.jsonl [--requests 2000] [--replicas 4] [--speed 4] [--out FILE]

A JSON line for each way, all of the same requests. Who gets a request is decided when it comes; each replica
then serves what it got with the laboratory's simulator: the engine's own scheduler and prefix cache, in the
modelled time of a GPU at its peaks. So hit rates are those of the engine, times are a model. What a replica
has not answered yet, which a router counts as it goes, is estimated here from the same model.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from absl import app, flags

from benchmarks import record
from jaxpaged.config import EngineConfig
from jaxpaged.engine import machine
from jaxpaged.research.lab import decoders, traces
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.serving import replay, roofline
from jaxpaged.research.lab.traces import Trace
from jaxpaged.routing import Key, Router

_TRACE = flags.DEFINE_string("trace", None, "As `jaxpaged lab` takes it.", required=True)
_REQUESTS = flags.DEFINE_integer("requests", 2000, "The trace's first so many.", lower_bound=1)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Engines.", lower_bound=1)
_SPEED = flags.DEFINE_float("speed", 4, "So many times as fast as the trace requests come.", lower_bound=0.01)
_GPU = flags.DEFINE_string("gpu", "h100", "Of each replica.")
_CACHE_TOKENS = flags.DEFINE_integer(
    "cache_tokens", None, "Of each replica's cache; by default what the GPU has room for.", lower_bound=1
)
_MAX_LEAD = flags.DEFINE_float("max_lead", 8, "The router's limit.", lower_bound=0)
_OUT = flags.DEFINE_string("out", None, "Append the lines to this file.")

MAX_NUM_SEQS, PROMPT_TOKENS = 64, 2048
DECODER = "Llama 3.1 8B"


class Estimate:
    """Unanswered requests of the replicas: prompts run one after the other, then all decode together."""

    def __init__(self, num_replicas: int, peak: roofline.Roofline, decoder: decoders.Decoder) -> None:
        self._prompt_token_s = 2 * decoder.num_params / peak.flops
        self._token_s = 2 * 2 * decoder.num_params / peak.bytes  # weights, and as much again of K and V
        self._busy_until = [0.0] * num_replicas  # with prompts
        self._ends: list[list[float]] = [[] for _ in range(num_replicas)]

    def loads(self, now: float) -> dict[int, float]:
        self._ends = [[end for end in ends if end > now] for ends in self._ends]
        return {i: len(ends) for i, ends in enumerate(self._ends)}

    def send(self, replica: int, now: float, num_new: int, num_output: int) -> None:
        begin = max(now, self._busy_until[replica])
        self._busy_until[replica] = begin + num_new * self._prompt_token_s
        self._ends[replica].append(self._busy_until[replica] + num_output * self._token_s)


def assigned(trace: Trace, num_replicas: int, router: Router[int] | None, estimate: Estimate) -> list[int]:
    """Return the replica of each request; without a router, the one with the least to do."""
    starts = trace.content_starts
    chosen = []
    for i in range(trace.num_requests):
        now, length = float(trace.arrival_s[i]), int(trace.input_lens[i])
        loads = estimate.loads(now)
        keys: list[Key] = []
        if trace.content is not None:  # an id stands for all before it, too
            ids = trace.content[starts[i] : starts[i + 1]][: length // trace.block_size]
            keys = [int(each).to_bytes(8, "little") for each in ids]
        if router is None:
            best, num_cached = min(loads, key=lambda name: loads[name]), 0
        else:
            best = router.rank(keys, loads)[0]
            num_cached = router.num_cached(best, keys) * trace.block_size
            router.note(best, keys)
        estimate.send(best, now, max(length - num_cached, 1), int(trace.output_lens[i]))
        chosen.append(best)
    return chosen


def part_of(trace: Trace, own: np.ndarray) -> Trace:
    """Return the requests of these numbers, in order."""
    starts = trace.content_starts
    content = trace.content
    if content is not None:
        content = np.concatenate([content[starts[i] : starts[i + 1]] for i in own])
    return dataclasses.replace(
        trace,
        arrival_s=trace.arrival_s[own],
        input_lens=trace.input_lens[own],
        output_lens=trace.output_lens[own],
        content=content,
    )


def served(
    trace: Trace, chosen: Sequence[int], cache: Combination, peak: roofline.Roofline
) -> dict[str, object]:
    """Return the results of all requests, each at its replica; hits are counted in the last half."""
    config = EngineConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_SEQS + PROMPT_TOKENS)
    hits = np.zeros(trace.num_requests, np.int64)
    ttft_s = np.zeros(trace.num_requests)
    seconds, counts = 0.0, []
    for replica in sorted(set(chosen)):
        own = np.flatnonzero(np.array(chosen) == replica)
        [result] = replay.serve(
            part_of(trace, own), [cache], peak, config, decoders.DECODERS[DECODER], warmup=0.0
        )
        if result.is_refused.any():
            raise RuntimeError(f"cache_tokens={cache.cache_tokens} must be larger: a prompt does not fit")
        hits[own] = result.hit_tokens
        ttft_s[own] = result.ttft_s
        seconds = max(seconds, float(result.moments_s[replay.FINISHED].max()))
        counts.append(len(own))
    half = trace.num_requests // 2
    return {
        "hit_rate": round(float(hits[half:].sum() / trace.input_lens[half:].sum()), 4),
        "model_seconds": round(seconds, 2),
        "model_output_tokens_per_s": round(float(np.maximum(trace.output_lens, 1).sum() / seconds), 1),
        "model_ttft_s": {f"p{p}": round(float(np.percentile(ttft_s, p)), 3) for p in (50, 90)},
        "requests_by_replica": counts,
    }


def main(argv: list[str]) -> None:
    """Simulate, and print a line for each way."""
    record.start(argv)
    machine.keep_on_disk()
    trace = traces.read(_TRACE.value).first(_REQUESTS.value)
    trace = dataclasses.replace(trace, arrival_s=trace.arrival_s / _SPEED.value)
    peak, decoder = roofline.named(_GPU.value), decoders.DECODERS[DECODER]
    cache_tokens = _CACHE_TOKENS.value or roofline.cache_tokens(peak, decoder)
    num, cache = _REPLICAS.value, Combination("lru", trace.block_size, cache_tokens)
    router = Router[int](cache_tokens // trace.block_size, _MAX_LEAD.value)

    ways: dict[str, Callable[[], list[int]]] = {
        "in_turns": lambda: [i % num for i in range(trace.num_requests)],
        "load": lambda: assigned(trace, num, None, Estimate(num, peak, decoder)),
        "prefix_then_load": lambda: assigned(trace, num, router, Estimate(num, peak, decoder)),
    }
    results = record.Results("routing", _OUT.value)
    for way, choose in ways.items():
        line = {
            "routing": way,
            "trace": trace.name,
            "num_requests": trace.num_requests,
            "num_replicas": num,
            "speed": _SPEED.value,
            "cache_tokens": cache_tokens,
            "block_size": trace.block_size,
            "model": f"{DECODER} on {_GPU.value}, a roofline",
            **served(trace, choose(), cache, peak),
        }
        results.put(line)


if __name__ == "__main__":
    app.run(main)
