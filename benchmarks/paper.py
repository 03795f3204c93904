"""Tables of layouts for papers: one set of columns, as CSV, Markdown and LaTeX."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import layouts, native, support
from pallas_kernels.layouts import Layout

NUM_ERROR_BLOCKS = 8

# Each column: its head, how a value is shown, and whether it is a number.
COLUMNS: dict[str, tuple[str, Callable[[Any], str], bool]] = {
    "layout": ("layout", str, False),
    "bytes_per_token": ("bytes a token", "{:.0f}".format, True),
    "error": ("error of K and V", "{:.2e}".format, True),
    "perplexity": ("perplexity", "{:.4f}".format, True),
    "tokens_per_s": ("tokens per second", "{:.1f}".format, True),
    "kernels": ("read by", ", ".join, False),
}
LATEX = {"\\": r"\textbackslash{}"} | {char: "\\" + char for char in "&%$#_{}"}


def error(layout: Layout, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> float:
    """Return how far K and V that are read are from those written, normal values in float32.

    It is the root of the mean square of the difference, over that of the values.
    """
    num_tokens = NUM_ERROR_BLOCKS * block_size
    pool = layouts.create(layout, 1 + NUM_ERROR_BLOCKS, block_size, num_kv_heads, head_dim, dtype)
    written = jax.random.normal(jax.random.key(0), (2, num_tokens, num_kv_heads, head_dim), jnp.float32)
    slots = block_size + jnp.arange(num_tokens, dtype=jnp.int32)
    k, v = written.astype(dtype)
    arrays = layout.write(pool.arrays, pool.sizes, k, v, slots)
    blocks = 1 + jnp.arange(NUM_ERROR_BLOCKS, dtype=jnp.int32)
    read = jnp.stack(layout.read({**pool.arrays, **arrays}, pool.sizes, blocks, jnp.dtype("float32")))
    away = read.reshape(written.shape) - written
    return float(jnp.sqrt(jnp.mean(away**2) / jnp.mean(written**2)))


def kernels(layout: Layout, block_size: int, head_dim: int, dtype: jnp.dtype) -> list[str]:
    """Return which implementations of attention read a layout in blocks and heads of these sizes.

    Those of a GPU are asked for in bfloat16.
    """
    gpu = support.SUPPORT["mosaic_gpu"]
    head_dims = gpu.head_dims if layout.cache_dtype is None else gpu.quantised_head_dims
    if layout.packed_view() is not None:
        head_dims = gpu.packed_head_dims
    found = ["xla"]
    if native.why_not_layout(layout, dtype) is None:
        found.append("native")
    is_served = gpu.serves(layout) and block_size in (gpu.block_sizes_of(layout) or ())
    if is_served and head_dim in (head_dims or ()):
        found.append("mosaic_gpu")
    return found


def write(prefix: str, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write `prefix`.csv, .md and .tex: a line for each row, without columns that none of them has."""
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    texts = {".csv": as_csv(names, rows), ".md": as_markdown(names, rows), ".tex": as_latex(names, rows)}
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    files = [Path(f"{prefix}{suffix}") for suffix in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def as_csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV, with all digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = (row.get(name) for name in names)
        writer.writerow([" ".join(value) if isinstance(value, list) else value for value in values])
    return out.getvalue()


def as_markdown(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table of Markdown."""
    rules = ["---:" if COLUMNS[name][2] else "---" for name in names]
    lines = [[COLUMNS[name][0] for name in names], rules, *(_shown(names, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_latex(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a tabular of LaTeX with the rules of booktabs."""
    head, *lines = (
        " & ".join("".join(LATEX.get(char, char) for char in cell) for cell in line) + r" \\"
        for line in ([COLUMNS[name][0] for name in names], *(_shown(names, row) for row in rows))
    )
    kinds = "".join("r" if COLUMNS[name][2] else "l" for name in names)
    parts = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", head, r"\midrule", *lines]
    return "\n".join([*parts, r"\bottomrule", r"\end{tabular}", ""])


def _shown(names: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    return ["" if row.get(name) is None else COLUMNS[name][1](row[name]) for name in names]
