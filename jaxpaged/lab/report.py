"""Report of the laboratory: one HTML file with its plots inside, and the numbers beside it."""

import html
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from jaxpaged.checks import InputError
from jaxpaged.lab import questions
from jaxpaged.lab.combination import Combination
from jaxpaged.lab.questions import Reuse
from jaxpaged.lab.serving.replay import Served, Serving, percentiles
from jaxpaged.lab.serving.roofline import DECODERS, GPUS, cache_tokens
from jaxpaged.lab.sweep import LIFETIME_EDGES_S, Result
from jaxpaged.lab.traces import Trace
from jaxpaged.step.state import Counter

MOMENTS = 200  # points of the plot of memory over time
MIDDLE_AND_WORST = (50, 99)  # percentiles
MEMORY_COLORS = ("#4477aa", "#ccbb44", "#eeeeee")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px }
td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
svg { width: 100%; height: auto }
.model { background: #fff6e0; padding: .5rem 1rem }
"""


def numbers(
    trace: Trace, results: Sequence[Result], reuse: Reuse | None, serving: Serving | None
) -> dict[str, Any]:
    """Return all numbers that the report shows."""
    return {
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "num_requests": trace.num_requests,
            "seconds": float(trace.arrival_s[-1]),
            "input_tokens": int(trace.input_lens.sum()),
            "output_tokens": int(trace.output_lens.sum()),
            "block_size": trace.block_size,
            "knows_content": trace.content is not None,
        },
        "hit_rates": [result.line() for result in results],
        "lifetimes": [
            asdict(result.combination)
            | {"edges_s": LIFETIME_EDGES_S.tolist(), "num_evicted": result.lifetimes.tolist()}
            for result in results
        ],
        "waste": [{"block_size": size, "share": share} for size, share in questions.waste(trace).items()],
        "reuse": None
        if reuse is None
        else {
            "share_asked_again": len(reuse.tokens) / reuse.num_asked,
            "distance_tokens": percentiles(reuse.tokens),
            "seconds": percentiles(reuse.seconds),
        },
        "served": None
        if serving is None
        else {
            "is": "a model, not a measurement",
            "gpu": serving.gpu,
            "decoder": serving.decoder,
            "room_for_tokens": cache_tokens(GPUS[serving.gpu], DECODERS[serving.decoder]),
            "max_num_seqs": serving.config.max_num_seqs,
            "max_num_batched_tokens": serving.config.max_num_batched_tokens,
            "num_requests": serving.num_requests,
            "caches": [
                served.line() | {"memory": [asdict(each) for each in served.over_time(MOMENTS)]}
                for served in serving.caches
            ],
        },
    }


def write(folder: str, trace: Trace, results: Sequence[Result], serving: Serving | None) -> Path:
    """Write `report.html` and `report.json` into the folder, which is made. Raises `InputError`."""
    reuse = questions.reuse(trace)
    found = numbers(trace, results, reuse, serving)
    page = _page(trace, results, reuse, serving, found)
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "report.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (path / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"out={folder!r} cannot be written: {error}") from error
    return path / "report.html"


def _page(
    trace: Trace,
    results: Sequence[Result],
    reuse: Reuse | None,
    serving: Serving | None,
    found: dict[str, Any],
) -> str:
    about = found["trace"]
    parts = [
        f"<p>{about['num_requests']:,} requests in {about['seconds']:,.0f} s, {about['input_tokens']:,} "
        f"tokens in and {about['output_tokens']:,} out. Replayed one after the other through jaxpaged's own "
        "block tables and prefix cache; answers are not cached. Hit tokens over input tokens of the requests "
        "after the warm-up.</p>",
        "<h2>Hit rate by cache size</h2>",
        _figure(lambda axis: _draw_hit_rates(axis, results)),
        _table(
            ("policy", "block size", "cache tokens", "hit rate"),
            [(*_names(result.combination), f"{result.hit_rate:.4f}") for result in results],
        ),
        "<h2>How long blocks live</h2>",
        "<p>From when a block has its content to when it is taken for another, of all that were evicted.</p>",
        _figure(lambda axis: _draw_lifetimes(axis, results)),
        "<h2>Waste inside blocks</h2>",
        "<p>Places without a token in the blocks of finished requests, prompt and answer.</p>",
        _figure(lambda axis: _draw_waste(axis, found["waste"])),
    ]
    if reuse is not None and len(reuse.tokens):
        parts += [
            "<h2>Reuse distances</h2>",
            f"<p>{found['reuse']['share_asked_again']:.1%} of the blocks asked for were asked for before. "
            "How many tokens of distinct blocks were asked for in between, and how much time has passed.</p>",
            _figure(lambda axis: _draw_shares(axis, reuse.tokens, "tokens of distinct blocks")),
            _figure(lambda axis: _draw_shares(axis, reuse.seconds, "seconds")),
        ]
    if serving is not None:
        parts += _serving(serving)
    title = html.escape(trace.name)
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{title}</h1>\n{body}\n</html>\n"
    )


def _serving(serving: Serving) -> list[str]:
    config = serving.config
    room = cache_tokens(GPUS[serving.gpu], DECODERS[serving.decoder])
    return [
        "<h2>Served in the time of a GPU</h2>",
        '<p class="model"><b>A model, not a measurement.</b> '
        f"The first {serving.num_requests:,} requests, each when it came, through jaxpaged's own scheduler, "
        "allocator and prefix cache, with a model that computes nothing. A step takes what "
        f"{html.escape(serving.decoder)} in bfloat16 takes at the peaks of {html.escape(serving.gpu)}: "
        "its arithmetic or its reading of weights, K and V, whichever is longer, and nothing else takes any "
        f"time. At most {config.max_num_seqs} requests run together, and {config.max_num_batched_tokens:,} "
        "tokens are computed in one step. Refused is who would not fit alone. Times are of the requests "
        f"after the warm-up, counts of all. {html.escape(serving.gpu)} itself has room for the K and V of "
        f"{room:,} tokens beside the weights; to read a larger cache, wherever it is, costs nothing more "
        "here.</p>",
        _table(
            (
                *("policy", "block size", "cache tokens", "refused", "preemptions", "most held"),
                *(f"queue p{p}, s" for p in MIDDLE_AND_WORST),
                *(f"TTFT p{p}, s" for p in MIDDLE_AND_WORST),
                *(f"TPOT p{p}, ms" for p in MIDDLE_AND_WORST),
            ),
            [_served_row(served) for served in serving.caches],
        ),
        "<h3>Queueing and preemptions by cache size</h3>",
        _figure(lambda axis: _draw_waits(axis, serving.caches)),
        _figure(lambda axis: _draw_preemptions(axis, serving.caches)),
        "<h3>Memory over time</h3>",
        "<p>Blocks that requests hold, free ones whose content can still be found, and free ones without; "
        "and how many requests wait.</p>",
        *(
            _figure(lambda axis, served=served: _draw_memory(axis, served))  # type: ignore[misc]
            for served in serving.caches
            if served.memory
        ),
    ]


def _served_row(served: Served) -> tuple[object, ...]:
    line = served.line()
    return (
        *_names(served.combination),
        line["num_refused_requests"],
        line["num_preemptions"],
        f"{line['most_held']:.0%}",
        *(
            f"{scale * line[name][f'p{p}']:.2f}" if line[name] else ""
            for name, scale in (("queue_s", 1), ("ttft_s", 1), ("tpot_s", 1000))
            for p in MIDDLE_AND_WORST
        ),
    )


def _names(combination: Combination) -> tuple[object, ...]:
    """Return the first columns of a combination's line in a table."""
    return combination.policy, combination.block_size, combination.size


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    def line(tag: str, values: Sequence[object]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values) + "</tr>"

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"


def _figure(draw: Callable[[Axes], None]) -> str:
    """Return a drawing as SVG to put into a page."""
    with plt.rc_context({"svg.hashsalt": "jaxpaged", "svg.fonttype": "none"}):
        figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
        try:
            draw(axis)
            axis.grid(alpha=0.3)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
        finally:
            plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def _draw_hit_rates(axis: Axes, results: Sequence[Result]) -> None:
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.combination.policy, result.combination.block_size), []).append(result)
    for (policy, block_size), group in groups.items():
        sized = sorted((r.combination.cache_tokens, r.hit_rate) for r in group if r.combination.cache_tokens)
        label = f"{policy}, {block_size}"
        if sized:
            axis.plot(*zip(*sized, strict=True), "o-", label=label, markersize=4)
        for result in group:
            if result.combination.cache_tokens is None:
                axis.axhline(result.hit_rate, color="gray", linestyle=":", linewidth=1)
    axis.set(xlabel="cache, tokens", ylabel="hit rate", ylim=(0, None))
    if axis.lines:
        axis.set_xscale("log", base=2)
    if groups and axis.get_legend_handles_labels()[0]:
        axis.legend(title="policy, block size", fontsize=8)


def _by_policy(caches: Sequence[Served]) -> dict[tuple[str, int], list[Served]]:
    """Group caches of a limited size by policy and block size, the smallest first."""
    groups: dict[tuple[str, int], list[Served]] = {}
    for served in sorted(caches, key=lambda served: served.combination.cache_tokens or 0):
        if served.combination.cache_tokens is not None:
            each = served.combination
            groups.setdefault((each.policy, each.block_size), []).append(served)
    return groups


def _draw_waits(axis: Axes, caches: Sequence[Served]) -> None:
    for (policy, block_size), group in _by_policy(caches).items():
        for p, style in zip(MIDDLE_AND_WORST, ("o-", "o:"), strict=True):
            sized = [
                (served.combination.cache_tokens, np.percentile(served.queue_s, p))
                for served in group
                if len(served.queue_s)
            ]
            if sized:
                label = f"{policy}, {block_size}, p{p}"
                axis.plot(*zip(*sized, strict=True), style, label=label, markersize=4)
    _by_size(axis, "seconds from arrival to start")


def _draw_preemptions(axis: Axes, caches: Sequence[Served]) -> None:
    for (policy, block_size), group in _by_policy(caches).items():
        sized = [
            (served.combination.cache_tokens, served.counters[Counter.NUM_PREEMPTIONS]) for served in group
        ]
        axis.plot(*zip(*sized, strict=True), "o-", label=f"{policy}, {block_size}", markersize=4)
    _by_size(axis, "preemptions")


def _by_size(axis: Axes, what: str) -> None:
    axis.set(xlabel="cache, tokens", ylabel=what)
    axis.set_yscale("symlog", linthresh=0.01 if "seconds" in what else 1)
    if axis.lines:
        axis.set_xscale("log", base=2)
        axis.legend(title="policy, block size", fontsize=7)


def _draw_memory(axis: Axes, served: Served) -> None:
    moments = served.over_time(MOMENTS)
    times = [each.time_s for each in moments]
    shares = [
        [getattr(each, name) / served.num_usable for each in moments]
        for name in ("num_held", "num_cached", "num_empty")
    ]
    axis.stackplot(times, *shares, labels=("held", "free, with content", "free"), colors=MEMORY_COLORS)
    each = served.combination
    title = f"{each.policy}, blocks of {each.block_size}, {each.size} tokens"
    axis.set(title=title, xlabel="seconds", ylabel="share of blocks", ylim=(0, 1.0))
    waiting = axis.twinx()
    waiting.plot(times, [each.num_waiting for each in moments], "k-", linewidth=0.8, label="waiting")
    waiting.set(ylabel="requests that wait", ylim=(0, None))
    axis.legend(fontsize=7, loc="upper left")


def _draw_lifetimes(axis: Axes, results: Sequence[Result]) -> None:
    for result in results:
        lives, each = result.lifetimes, result.combination
        if lives.sum():
            name = f"{each.policy}, {each.block_size}, {each.size}"
            axis.step(LIFETIME_EDGES_S, np.cumsum(lives) / lives.sum(), where="post", label=name)
    axis.set(xlabel="seconds", ylabel="share of evicted blocks", ylim=(0, 1.02), xscale="log")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def _draw_waste(axis: Axes, waste: Sequence[dict[str, Any]]) -> None:
    axis.plot([each["block_size"] for each in waste], [each["share"] for each in waste], "o-")
    axis.set(xlabel="block size, tokens", ylabel="share of places", ylim=(0, None))
    axis.set_xscale("log", base=2)


def _draw_shares(axis: Axes, values: np.ndarray, what: str) -> None:
    shares = np.linspace(0, 1, 201)
    axis.step(np.quantile(values, shares), shares, where="post")
    axis.set(xlabel=what, ylabel="share of reuses", ylim=(0, 1.02))
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xlim(left=0)
