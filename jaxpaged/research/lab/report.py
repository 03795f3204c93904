"""Report of the laboratory: one HTML file with its plots inside, and the numbers beside it."""

import datetime
import html
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes

import jaxpaged
from jaxpaged.checks import InputError
from jaxpaged.research.lab import decoders, questions, report_figures
from jaxpaged.research.lab.belady import BELADY
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.questions import Reuse
from jaxpaged.research.lab.report_figures import MOMENTS, SMALL, Figures, figure
from jaxpaged.research.lab.serving.replay import Serving, percentiles
from jaxpaged.research.lab.serving.roofline import GPUS, cache_tokens
from jaxpaged.research.lab.sweep import LIFETIME_EDGES_S, Result
from jaxpaged.research.lab.traces import Trace

MIDDLE_AND_WORST = (50, 99)  # percentiles
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 60rem; margin: 1.5rem auto;
  padding: 0 1rem }
h1 { margin-bottom: .2rem; overflow-wrap: anywhere; font-size: clamp(1.3rem, 6vw, 2rem) }
h2 { margin-top: 2.2rem }
.made, figcaption, .note { color: #5d6a7c; font-size: 14px }
code { overflow-wrap: anywhere }
.table { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; margin: .6rem 0 }
td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
td:first-child, th:first-child { text-align: left; position: sticky; left: 0; background: #fff }
i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
figure { margin: 0; min-width: 0 }
svg { display: block; max-width: 100%; height: auto }
.wide svg { width: 100%; max-width: 38rem }
svg text { font-family: system-ui, sans-serif !important }
.small { display: grid; gap: .6rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 270px), 1fr)) }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: 14px }
.model { background: #fff6e0; padding: .5rem 1rem }
"""


def numbers(
    trace: Trace,
    results: Sequence[Result],
    reuse: Reuse | None,
    serving: Serving | None,
    command: str | None = None,
) -> dict[str, Any]:
    """Return all numbers of the report, with its time and its `command`."""
    return {
        "made": {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": command,
            "versions": {"jaxpaged": jaxpaged.__version__, "jax": jax.__version__},
        },
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
            "room_for_tokens": cache_tokens(GPUS[serving.gpu], decoders.named(serving.decoder)),
            "max_num_seqs": serving.config.max_num_seqs,
            "max_num_batched_tokens": serving.config.max_num_batched_tokens,
            "num_requests": serving.num_requests,
            "caches": [
                served.line() | {"memory": [asdict(each) for each in served.over_time(MOMENTS)]}
                for served in serving.caches
            ],
        },
    }


def write(
    folder: str,
    trace: Trace,
    results: Sequence[Result],
    serving: Serving | None,
    command: str | None = None,
) -> Path:
    """Write `report.html` and `report.json` into the folder, which is made. Raises `InputError`.

    `command`: the command line that made the results.
    """
    reuse = questions.reuse(trace)
    figures = numbers(trace, results, reuse, serving, command)
    page = _page(trace, results, reuse, serving, figures)
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "report.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        (path / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"out={folder!r} cannot be written: {error}") from error
    return path / "report.html"


def _page(
    trace: Trace,
    results: Sequence[Result],
    reuse: Reuse | None,
    serving: Serving | None,
    contents: dict[str, Any],
) -> str:
    figures = Figures([result.combination for result in results])
    about, made = contents["trace"], contents["made"]
    when = datetime.datetime.fromisoformat(made["time"]).strftime("%Y-%m-%d %H:%M UTC")
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    command = f"<br><code>{html.escape(made['command'])}</code>" if made["command"] else ""
    parts = [
        f'<p class="made">{when} · {versions}{command}</p>',
        f"<p>{about['num_requests']:,} requests in {about['seconds']:,.0f} s, {about['input_tokens']:,} "
        f"tokens in and {about['output_tokens']:,} out. Replayed one after the other through jaxpaged's own "
        "block tables and prefix cache; answers are not cached. Hit tokens over input tokens of the requests "
        "after the warm-up.</p>",
        "<h2>Hit rate by cache size</h2>",
        _wide(partial(figures.hit_rates, results=results), "hit rate by cache size"),
        _pivot(
            figures,
            [(result.combination, result.hit_rate) for result in results],
            "{:.4f}".format,
            marks_most=True,
        ),
        '<p class="note">Dotted: no limit. Bold: the best policy of an engine at this size.</p>',
        "<h2>How long blocks live</h2>",
        "<p>From when a block has its content to when it is taken for another, of all that were evicted. "
        "A panel a policy, a line a cache size.</p>",
        _shades(figures),
        _small(
            (partial(figures.lifetimes, results=group, seconds=about["seconds"]), figures.name(each))
            for each, group in _by_policy(results).items()
        ),
        "<h2>Waste inside blocks</h2>",
        "<p>Places without a token in the blocks of finished requests, prompt and answer.</p>",
        _wide(partial(report_figures.waste, lines=contents["waste"]), "waste by block size"),
    ]
    if reuse is not None and len(reuse.tokens):
        in_time = partial(report_figures.reuse_seconds, seconds=reuse.seconds, trace_s=about["seconds"])
        parts += [
            "<h2>Reuse distances</h2>",
            f"<p>{contents['reuse']['share_asked_again']:.1%} of the blocks asked for were asked for before. "
            "How many tokens of distinct blocks were asked for in between, and how much time has passed.</p>",
            _small(
                [
                    (partial(report_figures.reuse_tokens, tokens=reuse.tokens), "reuse distances in tokens"),
                    (in_time, "reuse distances in time"),
                ]
            ),
        ]
    if serving is not None:
        parts += _serving(figures, serving)
    title = html.escape(trace.name)
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n<h1>{title}</h1>\n{body}\n</html>\n"
    )


def _serving(figures: Figures, serving: Serving) -> list[str]:
    config, caches = serving.config, serving.caches
    room = cache_tokens(GPUS[serving.gpu], decoders.named(serving.decoder))
    percentile = " / ".join(f"p{p}" for p in MIDDLE_AND_WORST)

    def times(name: str, scale: float) -> str:
        return _pivot(
            figures, [(served.combination, served.line()[name]) for served in caches], _times(scale)
        )

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
        f"<h3>Time to first token, s ({percentile})</h3>",
        times("ttft_s", 1),
        f"<h3>Time in the queue, s ({percentile})</h3>",
        times("queue_s", 1),
        _small(
            (partial(figures.waits, caches=caches, percentile=p), f"time in the queue, p{p}")
            for p in MIDDLE_AND_WORST
        ),
        f"<h3>Time between tokens, ms ({percentile})</h3>",
        times("tpot_s", 1000),
        "<h3>Preemptions</h3>",
        _pivot(
            figures,
            [(served.combination, served.line()["num_preemptions"]) for served in caches],
            "{:,}".format,
        ),
        _wide(partial(figures.preemptions, caches=caches), "preemptions by cache size"),
        "<h3>Requests refused, and most blocks held</h3>",
        _pivot(figures, [(served.combination, served.line()) for served in caches], _room),
        "<h3>Memory over time</h3>",
        "<p>From dark to light: blocks that requests hold, free ones whose content can still be found, and "
        "free ones without. The black line is how many requests wait.</p>",
        _small(
            (partial(figures.memory, served=served), f"memory over time, {figures.name(served.combination)}")
            for served in caches
            if served.memory
        ),
    ]


def _times(scale: float) -> Callable[[dict[str, float]], str]:
    """Return a function that shows the percentiles of a time, with so many units a second."""
    return lambda of: " / ".join(f"{scale * of[f'p{p}']:.2f}" for p in MIDDLE_AND_WORST) if of else "none"


def _room(line: dict[str, Any]) -> str:
    return f"{line['num_refused_requests']:,}, {line['most_held']:.0%}"


def _by_policy(results: Sequence[Result]) -> dict[Combination, list[Result]]:
    """Group results by policy and block size, by the first combination of each."""
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.combination.label, result.combination.block_size), []).append(result)
    return {group[0].combination: group for group in groups.values()}


def _pivot[T](
    figures: Figures,
    cells: Sequence[tuple[Combination, T]],
    show: Callable[[T], str],
    *,
    marks_most: bool = False,
) -> str:
    """Return a table with a line for each cache size, and a column for each policy and block size."""
    columns = list(dict.fromkeys((each.label, each.block_size) for each, _ in cells))
    by_size: dict[str, dict[tuple[str, int], T]] = {}
    names = {(each.label, each.block_size): (each.policy, figures.name(each)) for each, _ in cells}
    for each, value in sorted(cells, key=lambda cell: cell[0].cache_tokens or np.inf):
        by_size.setdefault(each.size, {})[each.label, each.block_size] = value
    head = "".join(
        f'<th><i style="background:{figures.colours[policy]}"></i>{html.escape(name)}</th>'
        for policy, name in (names[column] for column in columns)
    )
    lines = []
    for size, line in by_size.items():
        of_engines = [value for (policy, _), value in line.items() if policy != BELADY.name]
        best: Any = max(of_engines, default=None) if marks_most else None  # type: ignore[type-var]
        shown = {column: html.escape(show(value)) for column, value in line.items()}
        for column, value in line.items():
            if best is not None and value == best and column[0] != BELADY.name:
                shown[column] = f"<b>{shown[column]}</b>"
        lines.append(f"<td>{size}</td>" + "".join(f"<td>{shown.get(column, '')}</td>" for column in columns))
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table><tr><th>cache, tokens</th>{head}</tr>{body}</table></div>'


def _shades(figures: Figures) -> str:
    """Return a key of the shades that stand for cache sizes."""
    sizes = figures.cache_sizes
    shades = [report_figures.shade("#555555", (i + 1) / len(sizes)) for i in range(len(sizes))]
    entries = (
        f'<span><i style="background:{shade}"></i>{size:,} tokens</span>'
        for shade, size in zip(shades, sizes, strict=True)
    )
    return f'<p class="key">{"".join(entries)}</p>'


def _wide(draw: Callable[[Axes], None], title: str) -> str:
    """Return a figure as wide as there is room for, within limits."""
    return f'<figure class="wide">{figure(draw, title)}</figure>'


def _small(drawings: Iterable[tuple[Callable[[Axes], None], str]]) -> str:
    """Return small figures side by side, as many as there is room for."""
    made = "".join(f"<figure>{figure(draw, title, SMALL)}</figure>" for draw, title in drawings)
    return f'<div class="small">{made}</div>'
