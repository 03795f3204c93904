"""Calls of paged attention: their records, and the table of which implementation serves which call.

`SUPPORT` is that table. `refuse_unserved` makes errors from it, `markdown_table` the documentation's table,
and the tests decide by it whether a case must run or be refused.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import LAYOUTS, TOKEN_MAJOR, BlockSlice, Layout, Pool, Sizes, View
from pallas_kernels.native import why_not_layout

# Served by all.
OPTIONAL = ("alibi_slopes", "sliding_window", "attention_chunk", "soft_cap", "sinks", "block_sparse")
QUANTISED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


class BlockSparse(NamedTuple):
    """A pattern of sparse blocks of `block_size` tokens that a query head sees: the last ones, and every n-th
    one.

    Let b = token // block_size, and b_q the sparse block of the query's own token. A token is seen if b > b_q
    - local_blocks, or if (b + offset) % vertical_stride == 0. The offset is 1 + head_sliding_step * q_head if
    the step is 0 or more, and 1 - head_sliding_step * kv_head if it is negative. Heads are counted over all
    ranks of a tensor-parallel group, of which this is `tp_rank`.
    """

    block_size: int
    local_blocks: int
    vertical_stride: int
    head_sliding_step: int = 0
    tp_rank: int = 0


class PackedArrays(NamedTuple):
    """The arrays of a packed view, besides those of the codes."""

    k_scale: jax.Array
    k_zero: jax.Array
    v_scale: jax.Array
    v_zero: jax.Array
    k_new: jax.Array
    new_group: jax.Array


class Arrays(NamedTuple):
    """The arrays of one attention call: as a caller gives them, and as the GPU kernels read them."""

    q: jax.Array  # [num_seqs, num_q_heads, head_dim]
    k_cache: Any  # the array in which the layout's view finds K; a caller may give a `Pool` of any layout
    v_cache: Any  # likewise of V; None beside a `Pool`
    block_tables: jax.Array  # [num_seqs, max_blocks_per_seq] int32
    seq_lens: jax.Array  # [num_seqs] int32
    table_rows: Any = None  # [num_seqs] int32, each sequence's row of block_tables; None: in their order


class Batch(NamedTuple):
    """The arrays of one attention call, checked by `ops`, with the cache as a pool."""

    q: jax.Array  # [num_seqs, num_q_heads, head_dim]
    pool: Pool
    block_tables: jax.Array  # [num_seqs, max_blocks_per_seq] int32
    seq_lens: jax.Array  # [num_seqs] int32
    table_rows: jax.Array | None = None  # [num_seqs] int32, as in `Arrays`

    @property
    def capacity(self) -> int:
        """Tokens that a row of the block tables can hold."""
        return self.block_tables.shape[1] * self.pool.sizes.block_size


class LayerKind(Protocol):
    """Protocol of a kind of layer from outside, as attention asks for it."""

    first_tokens: int  # tokens at the beginning that every query may see

    def first_read(self, num_tokens: jax.Array) -> Any:
        """Return the first token behind those that the query at position `num_tokens` may see."""
        ...

    def sees(self, query: jax.Array, key: jax.Array) -> Any:
        """Return whether the query at one position sees the token at another, which is not behind it."""
        ...


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one attention call, checked by `ops`. None means absent."""

    scale: float
    alibi_slopes: jax.Array | None = None  # [num_q_heads] float32
    sliding_window: int | None = None  # tokens, the query's own included
    attention_chunk: int | None = None  # tokens; a query sees its own chunk of the sequence alone
    layer_kind: LayerKind | None = None  # from outside, in place of a window or chunks
    soft_cap: float | None = None
    sinks: jax.Array | None = None  # [num_q_heads] float32
    k_scale: jax.Array | None = None  # [num_kv_heads] float32
    v_scale: jax.Array | None = None  # [num_kv_heads] float32
    block_sparse: BlockSparse | None = None
    # The arrays of K's and V's scales for each token, if the layout's view has them.
    token_scales: tuple[jax.Array, jax.Array] | None = None
    packed: PackedArrays | None = None  # the arrays of a packed view besides the codes
    kv_layout: Layout = TOKEN_MAJOR
    blocks: BlockSlice | None = None  # which of the arrays' blocks the call's ids name; None: all


def first_seen(position: jax.Array, window: int | None, chunk: int | None) -> jax.Array | None:
    """Return the first token that a query at `position` may see, inside of kernels or outside.

    With a window it may be negative, if the window begins before the sequence. None: there is no bound.
    A position before the sequence, of no query, gives a number that is not positive.
    """
    if chunk is not None:
        length = jnp.int32(chunk) if position.ndim == 0 else jnp.full_like(position, chunk)
        return position - lax.rem(position, length)
    return None if window is None else position + (1 - window)


def view_of(options: Options) -> View:
    """Return the view by which a kernel reads the layout. Raise ValueError if the layout has none."""
    view = options.kv_layout.view()
    if packed := options.kv_layout.packed_view():
        view = View(packed.k, packed.v)
    if view is None:
        raise ValueError(f"kv_layout={options.kv_layout} must have a view")
    return view


def sizes_of(arrays: Arrays, options: Options) -> Sizes:
    """Return the sizes of the pool that holds these arrays of a view."""
    sizes = view_of(options).k.sizes(arrays.k_cache.shape)
    is_packed = options.kv_layout.packed_view() is not None
    return sizes._replace(head_dim=2 * sizes.head_dim) if is_packed else sizes


@dataclasses.dataclass(frozen=True)
class Served:
    """The calls that one implementation serves; None in place of a tuple means anything."""

    dtypes: tuple[str, ...]  # of q
    cache_dtypes: tuple[str, ...]  # of the caches; a type that is not quantised must also be q's
    head_dims: tuple[int, ...] | None
    quantised_head_dims: tuple[int, ...] | None  # with a cache of 8 bits a number
    block_sizes: tuple[int, ...] | None
    max_group_size: int | None
    scaled_block_sizes: tuple[int, ...] | None = None  # with a scale for each token
    packed_head_dims: tuple[int, ...] | None = None  # with 4 bits a number
    packed_block_sizes: tuple[int, ...] | None = None  # likewise
    needs_view: bool = False  # whether it reads only what a view shows

    def serves(self, kv_layout: Layout) -> bool:
        """Return whether the implementation can read a layout."""
        has_view = kv_layout.view() is not None or kv_layout.packed_view() is not None
        return not self.needs_view or has_view

    def block_sizes_of(self, kv_layout: Layout) -> tuple[int, ...] | None:
        """Return the block sizes that it serves in a layout; None for any."""
        view = kv_layout.view()
        if kv_layout.packed_view() is not None:
            return self.packed_block_sizes
        return self.block_sizes if view is None or view.k_scale is None else self.scaled_block_sizes

    @property
    def kv_layouts(self) -> list[str]:
        """The names of the registered layouts that it can read."""
        dtype = jnp.dtype("bfloat16")
        return [
            name
            for name, kv_layout in LAYOUTS.items()
            if self.serves(kv_layout)
            and any(kv_layout.why_not(size, 64, dtype) is None for size in self.block_sizes or (1, 64))
        ]


SUPPORT: dict[str, Served] = {
    "xla": Served(
        dtypes=("float16", "bfloat16", "float32"),
        cache_dtypes=("float16", "bfloat16", "float32", *QUANTISED_DTYPES),
        head_dims=None,
        quantised_head_dims=None,
        block_sizes=None,
        max_group_size=None,
    ),
    "mosaic_gpu": Served(
        dtypes=("float16", "bfloat16"),
        cache_dtypes=("float16", "bfloat16", *QUANTISED_DTYPES),
        head_dims=(64, 80, 96, 112, 128, 192, 256),
        quantised_head_dims=(64, 128, 192, 256),
        block_sizes=(8, 16, 32, 64, 128, 256),
        scaled_block_sizes=(32, 64, 128, 256),
        packed_head_dims=(64, 128),
        packed_block_sizes=(64, 128, 256),
        max_group_size=16,
        needs_view=True,
    ),
}


def listed(name: str, value: object, allowed: tuple[object, ...] | list[str] | None) -> list[str]:
    """Return a complaint about a value that is none of those allowed, or nothing; None allows any."""
    if allowed is None or value in allowed:
        return []
    return [f"{name}={value} (served: {', '.join(map(str, allowed)) or 'none'})"]


def refuse_unserved(
    implementation: str,
    *,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    head_dim: int,
    block_size: int,
    group_size: int,
    options: Options,
) -> None:
    """Raise NotImplementedError unless the implementation serves the call; name the unserved values and the
    served ones.
    """
    served = SUPPORT[implementation]
    wrong = listed("q.dtype", jnp.dtype(dtype).name, served.dtypes)
    wrong += listed("k_cache.dtype", jnp.dtype(cache_dtype).name, served.cache_dtypes)
    is_quantised = jnp.dtype(cache_dtype).name in QUANTISED_DTYPES
    head_dims = served.quantised_head_dims if is_quantised else served.head_dims
    if options.kv_layout.packed_view() is not None:
        head_dims = served.packed_head_dims
    wrong += listed("head_dim", head_dim, head_dims)
    wrong += listed("block_size", block_size, served.block_sizes_of(options.kv_layout))
    if not served.serves(options.kv_layout):
        wrong += listed("kv_layout", options.kv_layout, served.kv_layouts)
    max_group_size = served.max_group_size
    if max_group_size is not None and group_size > max_group_size:
        wrong.append(f"num_q_heads // num_kv_heads={group_size} (served: up to {max_group_size})")
    if options.layer_kind is not None and implementation != "xla":
        wrong.append("a kind of layer from outside")
    if wrong:
        others = " or ".join(f"implementation={name!r}" for name in SUPPORT if name != implementation)
        raise NotImplementedError(
            f"{implementation} paged attention does not serve {'; '.join(wrong)}. Use {others}."
        )


def markdown_table() -> str:
    """Return the support table as Markdown: one column per implementation, one line per property."""

    def join(values: Iterable[object] | None) -> str:
        return "any" if values is None else ", ".join(map(str, values))

    lines = {
        "type of q": [join(s.dtypes) for s in SUPPORT.values()],
        "type of the cache": [join(s.cache_dtypes) for s in SUPPORT.values()],
        "head_dim": [join(s.head_dims) for s in SUPPORT.values()],
        "head_dim with an 8-bit cache": [join(s.quantised_head_dims) for s in SUPPORT.values()],
        "block_size": [join(s.block_sizes) for s in SUPPORT.values()],
        "block_size with a scale a token": [join(s.scaled_block_sizes) for s in SUPPORT.values()],
        "head_dim with 4 bits a number": [join(s.packed_head_dims) for s in SUPPORT.values()],
        "block_size with 4 bits a number": [join(s.packed_block_sizes) for s in SUPPORT.values()],
        "query heads per kv head": [
            "any" if s.max_group_size is None else f"1 to {s.max_group_size}" for s in SUPPORT.values()
        ],
        "cache layout": [join(s.kv_layouts) for s in SUPPORT.values()],
    }
    lines[", ".join(OPTIONAL)] = ["yes"] * len(SUPPORT)
    rows = [["", *(f"`{name}`" for name in SUPPORT)], ["---"] * (len(SUPPORT) + 1)]
    rows += [[name, *cells] for name, cells in lines.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def layouts_table() -> str:
    """Return a Markdown table of the registered layouts: what each is, its size, and which implementations
    read it.

    `native` is `pallas_kernels.native`. Bits are for SmolLM2's heads in bfloat16, with 64 tokens a block.
    """
    dtype, sizes = jnp.dtype("bfloat16"), (64, 3, 64)
    rows = [["`kv_layout`", "what it is", "bits a number", "read by"], ["---"] * 4]
    for name, kv_layout in LAYOUTS.items():
        block_size = next(size for size in (sizes[0], 1) if kv_layout.why_not(size, sizes[2], dtype) is None)
        bits = (
            8 * kv_layout.block_bytes(block_size, *sizes[1:], dtype) / (2 * block_size * sizes[1] * sizes[2])
        )
        readers = [reader for reader, served in SUPPORT.items() if name in served.kv_layouts]
        if why_not_layout(kv_layout, dtype) is None:
            readers.insert(1, "native")
        what = (type(kv_layout).__doc__ or "").split("\n\n")[0].strip().rstrip(".")
        rows.append([f"`{name}`", " ".join(what.split()), f"{bits:g}", ", ".join(readers)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
