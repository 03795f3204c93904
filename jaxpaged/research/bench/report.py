"""Report of a run: what its answers add up to."""

import argparse
import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import jaxpaged
from jaxpaged.research.bench.client import Answered, Level

PERCENTILES = (50, 90, 95, 99)


def summary(
    args: argparse.Namespace, level: Level, answers: Sequence[Answered], limits_ms: Mapping[str, float]
) -> dict[str, Any]:
    """Return one run as a line: times in ms, throughput in tokens and requests a second.

    `itl` is what lies between two chunks of one answer, as its reader sees them: a server may send several
    tokens in one. `goodput` is the share of requests that keep all limits, and how many of them a second.
    """
    good = [each for each in answers if each.error is None]
    seconds = max((each.ended_s for each in answers), default=0.0) or 1e-9
    itl = [b - a for each in good for a, b in zip(each.chunks_s, each.chunks_s[1:], strict=False)]
    kept = [
        each
        for each in good
        if all(1000 * getattr(each, f"{name}_s") <= limit for name, limit in limits_ms.items())
    ]
    output = sum(each.num_output_tokens for each in good)
    prompt = sum(each.num_prompt_tokens for each in good)
    made: dict[str, Any] = {
        "workload": args.workload,
        **level,
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(output / seconds, 1),
        "total_tokens_per_s": round((output + prompt) / seconds, 1),
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": sum(each.num_cached_tokens for each in good),
    }
    for name, values in (
        ("ttft", [each.ttft_s for each in good]),
        ("tpot", [each.tpot_s for each in good if each.num_output_tokens > 1]),
        ("itl", itl),
        ("e2e", [each.e2e_s for each in good]),
    ):
        made[f"{name}_ms"] = percentiles_ms(values)
    if limits_ms:
        made["goodput"] = {
            "limits_ms": dict(limits_ms),
            "share": round(len(kept) / max(1, len(answers)), 4),
            "requests_per_s": round(len(kept) / seconds, 3),
        }
    options = ("seed", "prompt_tokens", "output_tokens", "shared_tokens", "num_prefixes", "trace")
    return made | {
        "options": {name: getattr(args, name) for name in options},
        "base_url": args.base_url,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "versions": {"python": platform.python_version(), "jaxpaged": jaxpaged.__version__},
    }


def percentiles_ms(values: Sequence[float]) -> dict[str, float] | None:
    """Return the mean and the percentiles, in ms, of values in seconds; None without values."""
    if not values:
        return None
    percentiles = np.percentile(values, PERCENTILES)
    named = {
        f"p{p}": round(1000 * float(value), 3) for p, value in zip(PERCENTILES, percentiles, strict=True)
    }
    return {"mean": round(1000 * float(np.mean(values)), 3)} | named


def one(level: Level, answered: Answered) -> dict[str, Any]:
    """Return one request as a line."""
    times = {name: round(getattr(answered, name), 6) for name in ("due_s", "sent_s", "ended_s")}
    numbers = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "error")
    return (
        dict(level)
        | times
        | {name: getattr(answered, name) for name in numbers}
        | {"chunks_s": [round(at, 6) for at in answered.chunks_s]}
    )


def line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def for_people(value: Mapping[str, Any]) -> str:
    """Return a run's summary as short text."""
    level = f"{value['concurrency']:g} clients" if "concurrency" in value else f"{value['rate']:g} a second"
    parts = [f"{level}: {value['output_tokens_per_s']:.0f} tokens a second"]
    for name in ("ttft", "tpot", "e2e"):
        if (times := value[f"{name}_ms"]) is not None:
            parts.append(f"{name} {times['p50']:.0f} / {times['p99']:.0f} ms")
    if "goodput" in value:
        parts.append(f"{value['goodput']['share']:.1%} within the limits")
    return ", ".join([*parts, f"{value['failed']} of {value['requests']} failed"])
