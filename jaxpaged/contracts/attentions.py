"""The contract of attention: what a function from outside is called with, and what it says that it serves.

A function takes what `pallas_kernels.ops` says of the operation that it does, with queries of one dtype and a
cache that holds their own K and V already:

- `decode`: `paged_attention(q, k_cache, v_cache, block_tables, seq_lens, *, scale, ...)`
- `prompts`: `tiled_paged_attention(q, k_cache, v_cache, block_tables, query_starts, seq_lens, *, scale, ...)`
- `ragged`: `ragged_paged_attention(q, k_cache, v_cache, block_tables, seq_lens, cu_query_lens, *, ...)`

So what `jaxpaged verify kernel` has checked is what an engine runs. Functions are traced inside the compiled
loop: JAX, Pallas, `jax.pure_callback` and `jax.ffi` calls are all possible. Of the keyword options only those
are given that the model has.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpaged.checks import InputError, check, shown
from jaxpaged.contracts import versions
from pallas_kernels.layouts import LAYOUTS, Dense, Layout, Pool
from pallas_kernels.ops import TiledImplementation
from pallas_kernels.support import listed

OPERATIONS = ("decode", "prompts", "ragged")
OPTIONS = ("alibi_slopes", "attention_chunk", "layer_kind", "sinks", "sliding_window", "soft_cap")


@dataclass(frozen=True)
class Support:
    """The calls that a function serves; None in place of a tuple means anything."""

    dtypes: tuple[str, ...] | None = None  # of the queries
    head_dims: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None  # tokens
    max_group_size: int | None = None  # query heads of one kv head
    # Names of layouts. One of two arrays comes as `k_cache` and `v_cache`, in its order of axes. Any other
    # comes as a `Pool` and None.
    layouts: tuple[str, ...] | None = ("token_major",)
    options: tuple[str, ...] = ()  # of OPTIONS: what it computes if a model has it
    platforms: tuple[str, ...] | None = None  # "cpu", "gpu"

    def __post_init__(self) -> None:
        """Check the names of options. Raises `InputError`."""
        for name in self.options:
            check("support.options", name, f"of {', '.join(OPTIONS)}", name in OPTIONS)

    def why_not(self, call: "Call") -> str | None:
        """Return a sentence about the properties of a call that the function does not serve; None if it
        serves the call.
        """
        wrong = [
            *listed("dtype", call.dtype.name, self.dtypes),
            *listed("head_dim", call.head_dim, self.head_dims),
            *listed("block_size", call.block_size, self.block_sizes),
            *listed("kv_layout", name_of(call.layout), self.layouts),
            *listed("platform", call.platform, self.platforms),
        ]
        for option in call.options:
            wrong += listed("option", option, self.options)
        if self.max_group_size is not None and call.group_size > self.max_group_size:
            wrong.append(
                f"num_q_heads // num_kv_heads={call.group_size} (served: up to {self.max_group_size})"
            )
        return f"it does not serve {'; '.join(wrong)}" if wrong else None


@dataclass(frozen=True)
class Call:
    """The properties of an engine's attention calls by which `Support` judges."""

    dtype: jnp.dtype
    head_dim: int
    block_size: int
    group_size: int
    layout: Layout
    platform: str
    options: tuple[str, ...]  # of OPTIONS, those that the model has


@dataclass(frozen=True)
class Attention:
    """Attention from outside: functions by operation, and the limits of each.

    `decode` computes a token a sequence, `prompts` tiles of neighbouring tokens, and `ragged` both. Ours
    computes what has no function.
    """

    decode: Callable[..., Any] | None = None
    prompts: Callable[..., Any] | None = None
    ragged: Callable[..., Any] | None = None
    support: Support = Support()
    contract: int = 1
    name: str = ""  # set when it is found by its path
    # What computes the operations without a function; the engine chooses it.
    rest: TiledImplementation = "xla"

    def function(self, tile_len: int) -> Callable[..., Any] | None:
        """Return the function for tiles of this length; None where ours computes them."""
        return self.ragged or (self.decode if tile_len == 1 else self.prompts)

    def ours(self, tile_len: int) -> TiledImplementation | None:
        """Return our implementation for tiles of this length; None where a function computes them."""
        return None if self.function(tile_len) is not None else self.rest

    def words(self) -> str:
        """Return a phrase for users about the functions that compute attention."""
        operations = " and ".join(name for name in OPERATIONS if getattr(self, name) is not None)
        return self.name if self.ragged or (self.decode and self.prompts) else f"{self.name} for {operations}"

    def __str__(self) -> str:
        return self.words()


def attention[F: Callable[..., Any]](
    operation: Literal["decode", "prompts", "ragged"], support: Support | None = None, *, contract: int = 1
) -> Callable[[F], F]:
    """Declare the operation and the limits of a function; the decorator returns the function itself."""
    check("operation", operation, f"one of {', '.join(OPERATIONS)}", operation in OPERATIONS)

    def declared(function: F) -> F:
        for name, value in (
            ("operation", operation),
            ("support", support or Support()),
            ("contract", contract),
        ):
            setattr(function, name, value)
        return function

    return declared


def named(asked: Any) -> Attention:
    """Return the attention that a path or a value means. Raises `InputError`."""
    rule = "a function under @attention, or an Attention (docs/research/attention.md)"
    path = asked if isinstance(asked, str) else ""
    chosen = versions.imported("attention", path, rule) if path else asked
    versions.check_version("attention", asked, chosen, "attention")
    if not isinstance(chosen, Attention):
        operation, support = (getattr(chosen, name, None) for name in ("operation", "support"))
        if not callable(chosen) or operation not in OPERATIONS or not isinstance(support, Support):
            raise InputError(f"attention={shown(asked)} must be {rule}, with a support value")
        given = {operation: chosen, "support": support, "contract": getattr(chosen, "contract", 1)}
        chosen = Attention(**given, name=getattr(chosen, "__qualname__", ""))
    if all(getattr(chosen, operation) is None for operation in OPERATIONS):
        raise InputError(f"attention={shown(asked)} must have a function for {', '.join(OPERATIONS)}")
    if chosen.ragged is not None and (chosen.decode or chosen.prompts):
        raise InputError(f"attention={shown(asked)} must have no other function beside a ragged one")
    return replace(chosen, name=path or chosen.name or "attention")


def name_of(layout: Layout) -> str:
    """Return the name of a layout of ours, or how another calls itself."""
    for name, each in LAYOUTS.items():
        if layout in (each, each.on(jax.default_backend())):
            return name
    return str(layout)


def call(
    attention: Attention,
    q: Float[Array, "num_tiles tile_len num_q_heads head_dim"],
    pool: Pool,
    block_tables: Int[Array, "num_tables max_blocks_per_seq"],
    query_starts: Int[Array, " num_tiles"],
    seq_lens: Int[Array, " num_tiles"],
    table_rows: Int[Array, " num_tiles"] | None,
    *,
    scale: float,
    **options: Any,
) -> Float[Array, "num_tiles tile_len num_q_heads head_dim"]:
    """Call the function for tiles of this length, with the tiles in the form that its operation takes.

    Args are those of `ops.tiled_paged_attention`. Options that are None are left out.

    Raises: ValueError while tracing, if the result has another shape or dtype than q.
    """
    function = attention.function(q.shape[1])
    assert function is not None
    if table_rows is not None:
        block_tables = block_tables[jnp.clip(table_rows, 0, block_tables.shape[0] - 1)]
    k_cache: Any = pool
    v_cache: Any = None
    if isinstance(pool.layout, Dense) and "kv" not in pool.layout.axes:
        k_cache, v_cache = (pool.arrays[name] for name in pool.layout.names)
        block_tables = pool.array_blocks(block_tables)
    given = {"scale": scale} | {name: value for name, value in options.items() if value is not None}
    if attention.ragged is not None:
        flat, place, cu_query_lens = _flat(q, query_starts, seq_lens)
        out = function(flat, k_cache, v_cache, block_tables, seq_lens, cu_query_lens, **given)
        return _checked(attention, out, flat)[place]
    if attention.decode is not None and q.shape[1] == 1:
        return _checked(
            attention, function(q[:, 0], k_cache, v_cache, block_tables, seq_lens, **given), q[:, 0]
        )[:, None]
    return _checked(
        attention, function(q, k_cache, v_cache, block_tables, query_starts, seq_lens, **given), q
    )


def _flat(
    q: Float[Array, "num_tiles tile_len num_q_heads head_dim"],
    query_starts: Int[Array, " num_tiles"],
    seq_lens: Int[Array, " num_tiles"],
) -> tuple[
    Float[Array, "num_tokens num_q_heads head_dim"],
    Int[Array, "num_tiles tile_len"],
    Int[Array, " num_tiles_plus_1"],
]:
    """Return tiles as a flat batch, where each token of a tile is in it, and where each tile's queries begin.

    A tile is a sequence whose last tokens are its queries.
    """
    num_tiles, tile_len = q.shape[:2]
    query_lens = jnp.where(seq_lens > 0, jnp.clip(seq_lens - query_starts, 0, tile_len), 0)
    stop = jnp.cumsum(query_lens, dtype=jnp.int32)
    offset = jnp.arange(tile_len, dtype=jnp.int32)
    place = (stop - query_lens)[:, None] + offset
    is_query = offset < query_lens[:, None]
    target = jnp.where(is_query, place, num_tiles * tile_len)
    flat = jnp.zeros((num_tiles * tile_len, *q.shape[2:]), q.dtype).at[target].set(q, mode="drop")
    return flat, jnp.where(is_query, place, 0), jnp.concatenate([jnp.zeros(1, jnp.int32), stop])


def _checked(attention: Attention, out: Any, q: Any) -> Any:
    if getattr(out, "shape", None) != q.shape or getattr(out, "dtype", None) != q.dtype:
        got = f"{getattr(out, 'dtype', type(out).__name__)}{list(getattr(out, 'shape', ()))}"
        raise ValueError(
            f"attention={attention.name!r} must return {q.dtype}{list(q.shape)}, as its queries, not {got}"
        )
    return out


def functions_of(attention: Attention) -> Iterator[Callable[..., Any]]:
    """Yield the functions of an attention."""
    for operation in OPERATIONS:
        if (function := getattr(attention, operation)) is not None:
            yield function
