"""Hits of libCacheSim's eviction policies, for `tests/reference/test_eviction.py`.

    python tests/goldens/make_policies.py        needs `pip install libcachesim`, and nothing of this package

Each trace is a list of contents that are asked for one by one, each of size 1. `hits` counts how often the
content was there. Traces are drawn with Python's own generator, and are written to the file with the hits.
"""

import json
import random
from importlib import metadata
from pathlib import Path

import libcachesim

OUT = Path(__file__).with_name("policies.json")
NUM_REQUESTS = 1500
SIZES = (20, 50, 100, 200)
POLICIES = {
    "lru": libcachesim.LRU,
    "fifo": libcachesim.FIFO,
    "sieve": libcachesim.Sieve,
    "s3fifo": libcachesim.S3FIFO,
    "plain_lfu": libcachesim.LFU,
    "tinylfu": libcachesim.WTinyLFU,
}


def zipf(rng: random.Random) -> list[int]:
    """Draw contents by popularity: content i with the weight 1 / (i + 1)."""
    contents = range(600)
    return rng.choices(contents, [1 / (1 + each) for each in contents], k=NUM_REQUESTS)


def scans(rng: random.Random) -> list[int]:
    """Draw contents by popularity, with runs between them that are asked for once."""
    popular, trace = zipf(rng), []
    fresh = iter(range(1000, 10**6))
    while len(trace) < NUM_REQUESTS:
        trace += popular[len(trace) : len(trace) + rng.randint(1, 60)]
        trace += [next(fresh) for _ in range(rng.randint(0, 80))]
    return trace[:NUM_REQUESTS]


def shifts(rng: random.Random) -> list[int]:
    """Draw contents near a place that moves on, and comes back where it was."""
    return [int(abs(rng.gauss(0, 25)) + 2 * (number // 5 % 120)) for number in range(NUM_REQUESTS)]


def hits(kind: type, trace: list[int], size: int) -> int:
    cache, count = kind(cache_size=size), 0
    for content in trace:
        request = libcachesim.Request()
        request.obj_id, request.obj_size = content, 1
        count += cache.get(request)
    return count


def main() -> None:
    """Write the file."""
    traces = {make.__name__: make(random.Random(seed)) for seed, make in enumerate((zipf, scans, shifts))}
    found = {
        name: {
            policy: {str(size): hits(kind, trace, size) for size in SIZES}
            for policy, kind in POLICIES.items()
        }
        for name, trace in traces.items()
    }
    version = f"libcachesim {metadata.version('libcachesim')}"
    OUT.write_text(json.dumps({"by": version, "traces": traces, "hits": found}) + "\n")


if __name__ == "__main__":
    main()
