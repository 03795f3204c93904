"""Plots of the laboratory's tables, as figures of matplotlib. Nothing is shown: a notebook does that."""

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.figure import Figure

from jaxpaged.research.lab.colours import colours


def plot(
    rows: Iterable[Mapping[str, Any]],
    *,
    x: str = "cache_tokens",
    y: str = "hit_rate",
    by: str | None = "policy",
) -> Figure:
    """Draw a table of the laboratory: the column `y` over the column `x`, with a line for each value of `by`.

    Numbers of `x` are on a scale of powers of two; rows without one (an unbounded cache) are level dotted
    lines. Where `x` has words, there is a bar for each. A policy has the same colour in every figure.
    """
    rows = list(rows)
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(None if by is None else row[by], []).append(row)
    numbers = sorted({row[x] for row in rows if isinstance(row[x], int | float)})
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    if numbers:
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [f"{each:,}" for each in numbers], fontsize=8)
    color_of = colours(map(str, groups))
    for name, group in groups.items():
        color = color_of[str(name)]
        words = [row for row in group if isinstance(row[x], str)]
        points = sorted((row[x], row[y]) for row in group if isinstance(row[x], int | float))
        if words:
            axes.bar([row[x] for row in words], [row[y] for row in words], color=color, label=name)
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=name, markersize=4)
        for row in group:
            if row[x] is None:
                axes.axhline(row[y], color=color, linestyle=":", linewidth=1)
    axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    axes.grid(alpha=0.3)
    if by is not None and axes.get_legend_handles_labels()[0]:
        axes.legend(title=by.replace("_", " "), fontsize=8)
    return figure
