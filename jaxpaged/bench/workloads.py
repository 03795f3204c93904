"""What is asked: seeded token ids, so that the same command asks the same of every server."""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from jaxpaged.checks import InputError

TRACE_BLOCK = 512  # tokens that one of a trace's hash_ids stands for


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request: it is answered with exactly `max_tokens`, for the model's end is ignored."""

    prompt: list[int]
    max_tokens: int
    at_s: float | None = None  # of a trace: when it came, from its beginning


def make(
    args: argparse.Namespace, *, seed: int | None = None, num_requests: int | None = None
) -> list[Asked]:
    """The workload that was asked for; with another seed one of the same kind."""
    rng = np.random.default_rng(args.seed if seed is None else seed)
    count = args.num_requests if num_requests is None else num_requests
    if args.workload == "trace":
        return _trace(args, count)
    prefixes: list[list[int]] = [[]]
    if args.workload == "shared-prefix":
        prefixes = [_tokens(rng, args, args.shared_tokens) for _ in range(args.num_prefixes)]
    return [
        Asked(
            prefixes[int(rng.integers(len(prefixes)))]
            + _tokens(rng, args, _between(rng, args.prompt_tokens)),
            _between(rng, args.output_tokens),
        )
        for _ in range(count)
    ]


def _trace(args: argparse.Namespace, count: int) -> list[Asked]:
    """The first requests of a trace in Mooncake's format: equal `hash_ids` become equal tokens."""
    asked, block = [], max(1, round(TRACE_BLOCK * args.length_scale))
    try:
        with Path(args.trace).open(encoding="utf-8") as lines:
            for number, line in zip(range(1, count + 1), lines, strict=False):
                value = json.loads(line)
                length = max(1, round(value["input_length"] * args.length_scale))
                tokens: list[int] = []
                for hash_id in value["hash_ids"]:
                    tokens += _tokens(np.random.default_rng((args.seed, hash_id)), args, block)
                tokens += _tokens(np.random.default_rng((args.seed, number, 1)), args, length)
                output = max(1, round(value["output_length"] * args.length_scale))
                asked.append(Asked(tokens[:length], output, value["timestamp"] / 1000))
    except OSError as error:
        raise InputError(f"--trace {args.trace!r} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--trace {args.trace!r}, line {len(asked) + 1}: must have timestamp, input_length, "
            f"output_length and hash_ids ({error})"
        ) from error
    return asked


def _tokens(rng: np.random.Generator, args: argparse.Namespace, count: int) -> list[int]:
    least, most = args.token_range
    tokens: list[int] = rng.integers(least, most + 1, count).tolist()
    return tokens


def _between(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(bounds[0], bounds[1] + 1))
