"""Tables of the laboratory: lists of dicts with plain values, one dict for each row."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxpaged.arithmetic import cdiv
from jaxpaged.checks import InputError, checked_choice, checked_number
from jaxpaged.research.lab import belady, questions, sweep
from jaxpaged.research.lab.combination import Combination, default_cache_tokens
from jaxpaged.research.lab.traces import Trace
from pallas_kernels.layouts import choose

type Table = list[dict[str, Any]]

LLAMA_8B = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def policies() -> list[str]:
    """Return the names of all eviction policies that the laboratory knows."""
    return list(belady.LAB_POLICIES)


def hit_rates(
    trace: Trace,
    policies: Sequence[str] = ("lru",),
    cache_tokens: Sequence[int | None] | None = None,
    block_sizes: Sequence[int] | None = None,
    *,
    warmup: float = 0.5,
    partial: bool = False,
    resident: int = 1,
) -> Table:
    """Send the trace through caches, and return a row for each policy, block size and cache size.

    Args:
        trace: of `lab.read`, `lab.of_requests`, `lab.chat` or `lab.agents`.
        policies: names of eviction policies; `lab.policies()` has all.
        cache_tokens: sizes of caches in tokens; None in it: nothing is ever evicted. By default those of
            `jaxpaged lab`.
        block_sizes: tokens a block; by default the trace's own.
        warmup: share of the requests, the first ones, that fill the cache and are not counted.
        partial: whether a prompt's last, partly filled block may hit, too.
        resident: requests that hold their blocks at the same time.

    A row has `policy`, `block_size`, `cache_tokens`, `hit_rate` (hit tokens over input tokens),
    `saved_compute` (the share of the prompts' computation that hits save), and the counts behind them.
    Raises `InputError`.
    """
    combinations = [
        Combination(policy, size, tokens)
        for size in block_sizes or [trace.block_size]
        for policy in policies
        for tokens in cache_tokens or default_cache_tokens(int(trace.input_lens.sum()), size)
    ]
    for each in combinations:
        belady.named(each.policy)
        if each.cache_tokens is not None and each.cache_tokens < each.block_size:
            raise InputError(f"cache_tokens={each.cache_tokens} must be at least a block, {each.block_size}")
    results = sweep.sweep(trace, combinations, warmup=warmup, partial=partial, resident=resident)
    return [result.line() for result in results]


def gains(rows: Iterable[Mapping[str, Any]], over: str = "lru", bound: str = "belady") -> Table:
    """Return the rows of `hit_rates` with the gain of each policy over the policy `over` in the same cache.

    `gain` is the difference of hit rates; `of_bound` is the gain's share of what the bound gains, None where
    the bound gains nothing or is not in the table. Rows without a row of `over` are refused (`InputError`).
    """
    rows_with_gains: Table = [dict(row) for row in rows]
    rates = {
        (row["policy"], row["block_size"], row["cache_tokens"]): row["hit_rate"] for row in rows_with_gains
    }
    for row in rows_with_gains:
        cache = row["block_size"], row["cache_tokens"]
        if (over, *cache) not in rates:
            raise InputError(f"over={over!r} must be a policy of the table, for each block and cache size")
        base, bound_rate = rates[over, *cache], rates.get((bound, *cache))
        row["gain"] = row["hit_rate"] - base
        row["of_bound"] = (
            row["gain"] / (bound_rate - base) if bound_rate is not None and bound_rate > base else None
        )
    return rows_with_gains


def block_sizes(
    trace: Trace, sizes: Sequence[int], cache_tokens: int | None, policy: str = "lru", **options: Any
) -> Table:
    """Return one row for each block size: the hit rate in a cache of one size, and the wasted share of slots.

    `waste` is the share of slots, in the blocks of finished requests, that hold no token; `blocks_a_request`
    is the mean length of a block table. `options` are those of `hit_rates`.
    """
    rows = hit_rates(trace, [policy], [cache_tokens], sizes, **options)
    lens = trace.input_lens + trace.output_lens
    wasted = questions.waste(trace, tuple(sizes))
    for row in rows:
        row["waste"] = wasted[row["block_size"]]
        row["blocks_a_request"] = float(cdiv(lens, row["block_size"]).mean())
    return rows


def layouts(
    trace: Trace,
    names: Sequence[str],
    *,
    cache_bytes: float,
    model: Mapping[str, Any] = LLAMA_8B,
    policy: str = "lru",
    block_size: int | None = None,
    **options: Any,
) -> Table:
    """Return one row for each layout: the tokens that `cache_bytes` hold in it, and its hit rate.

    Args:
        trace: as in `hit_rates`.
        names: layouts, as the engine's `kv_layout` takes them.
        cache_bytes: memory for K and V of all layers.
        model: `num_layers`, `num_kv_heads`, `head_dim` and `dtype`; by default those of Llama 3.1 8B.
        policy: an eviction policy.
        block_size: tokens a block; by default the trace's own.
        options: those of `hit_rates`.

    A row has `layout` and `bytes_a_token` beside what `hit_rates` has. Raises `InputError`.
    """
    checked_number("cache_bytes", cache_bytes, "a number > 0", 1, 2**62)
    dtypes = {name: jnp.dtype(name) for name in ("float32", "bfloat16", "float16")}
    dtype = dtypes[checked_choice("dtype", model["dtype"], dtypes)]
    size = trace.block_size if block_size is None else block_size
    rows = []
    for name in names:
        layout = choose(kv_layout=name)
        of_layer = layout.block_bytes(size, model["num_kv_heads"], model["head_dim"], dtype)
        num_bytes = model["num_layers"] * of_layer
        num_blocks = int(cache_bytes // num_bytes)
        if num_blocks < 1:
            raise InputError(f"cache_bytes={cache_bytes:g} must be at least a block, {num_bytes} bytes")
        rows.append({"layout": name, "bytes_a_token": num_bytes / size, "cache_tokens": num_blocks * size})
    tokens = [row["cache_tokens"] for row in rows]
    rates = hit_rates(trace, [policy], tokens, [size], **options)
    return [row | line for row, line in zip(rows, rates, strict=True)]


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table as CSV, with a line of names first; None is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """Return a table as Markdown; shares have four digits, and None of `cache_tokens` is "unbounded"."""
    names = list(rows[0] if rows else ()) if columns is None else list(columns)

    def text(name: str, value: Any) -> str:
        if value is None:
            return "unbounded" if name == "cache_tokens" else ""
        if isinstance(value, float):
            return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"
        return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")

    lines = [names, ["---"] * len(names), *([text(name, row[name]) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
