"""Figures of the laboratory's report, as SVG."""

import colorsys
import html
import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from jaxpaged.research.lab.colours import colours
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.lab.serving.replay import Served
from jaxpaged.research.lab.sweep import LIFETIME_EDGES_S, Result
from jaxpaged.step.state import Counter

WIDE, SMALL = (4.6, 2.9), (3.3, 2.4)  # inches
MOMENTS = 200  # points of the plot of memory over time
LINES = ("-", "--", ":", "-.")  # of block sizes
MARKS_S: dict[float, str] = {
    **{1e-3: "1 ms", 1e-2: "10 ms", 0.1: "0.1 s", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min"},
    **{3600: "1 h", 6 * 3600: "6 h", 86400: "1 d", 7 * 86400: "7 d", 30 * 86400: "30 d"},
}


def plain(number: float) -> str:
    """Return a number for an axis: 16.4k, 1.05M."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:g}"


def shade(colour: str, share: float) -> str:
    """Return the colour, the lighter the smaller `share` in [0, 1] is."""
    hue, light, saturation = colorsys.rgb_to_hls(*matplotlib.colors.to_rgb(colour))
    return matplotlib.colors.to_hex(
        colorsys.hls_to_rgb(hue, light + (0.85 - light) * (1 - share), saturation)
    )


def figure(draw: Callable[[Axes], None], title: str, size: tuple[float, float] = WIDE) -> str:
    """Return a drawing as SVG to put into a page; `title` is what a screen reader says."""
    settings: Any = {"svg.hashsalt": "jaxpaged", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9}
    with plt.rc_context(settings):
        made, axis = plt.subplots(figsize=size, layout="constrained")
        try:
            axis.grid(alpha=0.3, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            draw(axis)
            text = io.StringIO()
            made.savefig(text, format="svg", metadata={"Date": None})
        finally:
            plt.close(made)
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title)}"', 1)


class Figures:
    """Figures of one report: a colour for each policy, a line style for each block size."""

    def __init__(self, combinations: Sequence[Combination]) -> None:
        self.colours = colours(each.policy for each in combinations)
        sizes = sorted({each.block_size for each in combinations})
        self._line = {size: LINES[i % len(LINES)] for i, size in enumerate(sizes)}
        self.cache_sizes = sorted({each.cache_tokens for each in combinations if each.cache_tokens})

    def name(self, combination: Combination) -> str:
        """Return a policy's name, with the block size where there are several."""
        if len(self._line) == 1:
            return combination.label
        return f"{combination.label}, blocks of {combination.block_size}"

    def shade(self, combination: Combination) -> str:
        """Return a policy's colour, the lighter the smaller the cache is."""
        of = self.cache_sizes
        share = (1 + of.index(combination.cache_tokens)) / len(of) if combination.cache_tokens else 1.0
        return shade(self.colours[combination.policy], share)

    def by_size(self, axis: Axes, cells: Sequence[tuple[Combination, float]]) -> None:
        """Draw a line for each policy and block size over the sizes of caches."""
        groups: dict[tuple[str, int], list[tuple[int, float, Combination]]] = {}
        for each, value in cells:
            if each.cache_tokens is not None:
                group = groups.setdefault((each.label, each.block_size), [])
                group.append((each.cache_tokens, value, each))
        for group in groups.values():
            sizes, values, (each, *_) = zip(*sorted(group, key=lambda point: point[0]), strict=True)
            style: Any = {"color": self.colours[each.policy], "linestyle": self._line[each.block_size]}
            marker = "s" if each.one_table else "o"
            axis.plot(sizes, values, marker=marker, label=self.name(each), markersize=3.5, **style)
        if groups:
            axis.set_xscale("log", base=2)
            ticks(axis.xaxis, self.cache_sizes[:: -(-len(self.cache_sizes) // 8)], plain)
            axis.legend(fontsize=7.5, ncols=1 + len(groups) // 7, framealpha=0.7)
        else:
            empty(axis, "no cache of a limited size")
        axis.set_xlabel("cache, tokens")

    def hit_rates(self, axis: Axes, results: Sequence[Result]) -> None:
        """Draw hit rates by cache size; caches without a limit are dotted lines."""
        for result in results:
            if result.combination.cache_tokens is None:
                axis.axhline(result.hit_rate, color="gray", linestyle=":", linewidth=1)
        self.by_size(axis, [(result.combination, result.hit_rate) for result in results])
        axis.set(ylabel="hit rate", ylim=(0, None))

    def waits(self, axis: Axes, caches: Sequence[Served], percentile: int) -> None:
        """Draw a percentile of the time to start by cache size."""
        cells = [
            (served.combination, np.percentile(served.queue_s, percentile))
            for served in caches
            if len(served.queue_s)
        ]
        self.by_size(axis, cells)
        axis.set(title=f"p{percentile}", ylabel="from arrival to start")
        axis.set_yscale("symlog", linthresh=0.01)
        axis.set_ylim(bottom=0)
        max_seconds = max((value for _, value in cells), default=0.0)
        ticks(
            axis.yaxis,
            [0.0, *(s for s in MARKS_S if 0.01 <= s <= 1.5 * max_seconds)],
            lambda s: MARKS_S.get(s, "0"),
        )

    def preemptions(self, axis: Axes, caches: Sequence[Served]) -> None:
        """Draw how many preemptions there were by cache size."""
        cells = [(served.combination, served.counters[Counter.NUM_PREEMPTIONS]) for served in caches]
        self.by_size(axis, cells)
        axis.set_ylabel("preemptions")
        axis.set_yscale("symlog", linthresh=1)
        max_preemptions = max((value for _, value in cells), default=0)
        axis.set_ylim(0, max(1.5, 1.3 * max_preemptions))
        ticks(
            axis.yaxis,
            [0, *(n for n in (10**i for i in range(10)) if n <= max(1, 1.3 * max_preemptions))],
            plain,
        )

    def lifetimes(self, axis: Axes, results: Sequence[Result], seconds: float) -> None:
        """Draw, of one policy, the share of evicted blocks that were there for less than each time."""
        within = np.append(LIFETIME_EDGES_S[seconds > LIFETIME_EDGES_S], max(seconds, 0.002))
        for result in results:
            lives = result.lifetimes
            if lives.sum():
                shares = (np.cumsum(lives) / lives.sum())[: len(within)]
                axis.plot(within, shares, color=self.shade(result.combination), linewidth=1.4)
        if not axis.lines:
            empty(axis, "nothing was evicted")
        time_axis(axis, 0.1 if seconds > 10 else 1e-3, max(seconds, 0.002))
        axis.set(title=self.name(results[0].combination), ylabel="share", ylim=(0, 1.02))

    def memory(self, axis: Axes, served: Served) -> None:
        """Draw who has the blocks over time, and how many requests wait."""
        moments = served.over_time(MOMENTS)
        times = [each.time_s for each in moments]
        shares = [
            [getattr(each, name) / served.num_usable for each in moments]
            for name in ("num_held", "num_cached", "num_empty")
        ]
        colour = self.colours[served.combination.policy]
        axis.stackplot(times, *shares, colors=(colour, shade(colour, 0.3), "#eeeeee"))
        title = f"{self.name(served.combination)}, {served.combination.size} tokens"
        axis.set(title=title, xlabel="seconds", ylabel="share of blocks", ylim=(0, 1), xlim=(0, times[-1]))
        waiting = axis.twinx()
        waiting.spines["top"].set_visible(False)
        waiting.plot(times, [each.num_waiting for each in moments], "k-", linewidth=0.8)
        waiting.set(ylabel="waiting", ylim=(0, max(1, *(each.num_waiting for each in moments))))


def waste(axis: Axes, lines: Sequence[dict[str, Any]]) -> None:
    """Draw the share of places without a token by block size."""
    sizes = [each["block_size"] for each in lines]
    axis.plot(sizes, [each["share"] for each in lines], "o-", color="#555555", markersize=3.5)
    axis.set(xlabel="block size, tokens", ylabel="share of places", ylim=(0, None))
    axis.set_xscale("log", base=2)
    ticks(axis.xaxis, sizes, str)


def reuse_tokens(axis: Axes, tokens: np.ndarray) -> None:
    """Draw the share of reuses within so many tokens of distinct blocks."""
    _shares(axis, tokens)
    axis.set_xlabel("tokens of distinct blocks")
    axis.set_xscale("log")
    first = 10 ** np.floor(np.log10(max(1, tokens.min())))
    axis.set_xlim(first, max(10 * first, tokens.max()))
    ticks(axis.xaxis, [n for n in 10.0 ** np.arange(13) if first <= n <= tokens.max()], plain)


def reuse_seconds(axis: Axes, seconds: np.ndarray, trace_s: float) -> None:
    """Draw the share of reuses within so much time."""
    _shares(axis, np.maximum(seconds, 1e-3))
    axis.set_xlabel("time in between")
    time_axis(axis, 0.1 if trace_s > 10 else 1e-3, max(trace_s, 0.002))


def _shares(axis: Axes, values: np.ndarray) -> None:
    shares = np.linspace(0, 1, 201)
    axis.plot(np.quantile(values, shares), shares, color="#555555")
    axis.set(ylabel="share of reuses", ylim=(0, 1.02))


def time_axis(axis: Axes, first: float, last: float) -> None:
    """Let x be time from `first` to `last` in seconds, in units that people use."""
    axis.set_xscale("log")
    axis.set_xlim(first, last)
    marks = [s for s in MARKS_S if first <= s <= last]
    ticks(axis.xaxis, marks[:: -(-len(marks) // 5)], lambda s: MARKS_S[s])


def ticks(axis: Any, places: Sequence[float], label: Callable[[Any], str]) -> None:
    """Set an axis' ticks, and nothing between them."""
    axis.set_major_locator(FixedLocator([float(place) for place in places]))
    axis.set_minor_locator(NullLocator())
    axis.set_ticklabels([label(place) for place in places])


def empty(axis: Axes, why: str) -> None:
    """Draw a sentence about the reason why a figure is empty."""
    axis.text(0.5, 0.5, why, transform=axis.transAxes, ha="center", va="center", color="gray")
