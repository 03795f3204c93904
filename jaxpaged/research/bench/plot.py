"""The runs as a picture: how many answers were how fast, and what more load does."""

from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from jaxpaged.checks import InputError
from jaxpaged.research.bench.client import Answered


def draw(runs: Sequence[Sequence[Answered]], lines: Sequence[dict[str, Any]], file: str) -> None:
    """Draw the latencies of all runs into a file. Raises `InputError` if it cannot be written in that
    form.
    """
    figure, axes = plt.subplots(1, 4, figsize=(16, 3.6), layout="constrained")
    key = "concurrency" if "concurrency" in lines[0] else "rate"
    for answers, line in zip(runs, lines, strict=True):
        good = [each for each in answers if each.error is None]
        for axis, name in zip(axes, ("ttft_s", "tpot_s", "e2e_s"), strict=False):
            values = np.sort([1000 * getattr(each, name) for each in good])
            axis.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), label=f"{line[key]:g}")
    for axis, title in zip(axes, ("time to first token", "time a token", "whole answer"), strict=False):
        axis.set(title=title, xlabel="ms", ylabel="share of answers", ylim=(0, 1.02))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes[0].legend(title="clients" if key == "concurrency" else "a second")
    axes[3].plot([line[key] for line in lines], [line["output_tokens_per_s"] for line in lines], "o-")
    axes[3].set(title="throughput", xlabel=key, ylabel="tokens a second")
    axes[3].set_ylim(bottom=0)
    axes[3].grid(alpha=0.3)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {file!r} cannot be written: {error}") from error
    finally:
        plt.close(figure)
