"""Workloads of seeded token ids: the same command sends the same to every server."""

import argparse
import dataclasses
import itertools

import numpy as np

from jaxpaged.research.lab import traces


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """One request: it is answered with exactly `max_tokens`, for the model's end is ignored."""

    prompt: list[int]
    max_tokens: int
    at_s: float | None = None  # arrival in seconds since the trace's start; None without a trace


def make(
    args: argparse.Namespace, *, seed: int | None = None, num_requests: int | None = None
) -> list[BenchRequest]:
    """Make the workload that the options describe; another seed gives another of the same kind."""
    rng = np.random.default_rng(args.seed if seed is None else seed)
    count = args.num_requests if num_requests is None else num_requests
    if args.workload == "trace":
        return _trace(args, count)
    prefixes: list[list[int]] = [[]]
    if args.workload == "shared-prefix":
        prefixes = [_tokens(rng, args, args.shared_tokens) for _ in range(args.num_prefixes)]
    return [
        BenchRequest(
            prefixes[int(rng.integers(len(prefixes)))]
            + _tokens(rng, args, _between(rng, args.prompt_tokens)),
            _between(rng, args.output_tokens),
        )
        for _ in range(count)
    ]


def _trace(args: argparse.Namespace, count: int) -> list[BenchRequest]:
    """Return the first requests of a trace in any of `lab.traces`' formats: equal content becomes equal
    tokens.
    """
    trace = traces.read(args.trace)
    asked, block = [], max(1, round(trace.block_size * args.length_scale))
    for r, (first, end) in enumerate(itertools.pairwise(trace.content_starts[: count + 1])):
        length = max(1, round(trace.input_lens[r] * args.length_scale))
        tokens: list[int] = []
        for content in () if trace.content is None else trace.content[first:end].tolist():
            tokens += _tokens(np.random.default_rng((args.seed, content)), args, block)
        tokens += _tokens(np.random.default_rng((args.seed, 1 + r, 1)), args, length)
        output = max(1, round(trace.output_lens[r] * args.length_scale))
        asked.append(BenchRequest(tokens[:length], output, float(trace.arrival_s[r])))
    return asked


def _tokens(rng: np.random.Generator, args: argparse.Namespace, count: int) -> list[int]:
    low, high = args.token_range
    tokens: list[int] = rng.integers(low, high + 1, count).tolist()
    return tokens


def _between(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))
