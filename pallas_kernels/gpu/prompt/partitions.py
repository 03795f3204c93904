"""Partitions of long contexts for the prompt kernel: each is a program's, and the last program to finish
merges them.

The partitions of a tile lie between multiples of a number of tokens that follows from the tile's position
alone (`partitioning_of`). So a token's bits do not depend on what else is in the pass: each partition has a
program of its own, however many tiles there are.

    partition i:  m_i = max s[t],  l_i = sum exp2(s[t] - m_i),  o_i = sum exp2(s[t] - m_i) v[t]
    tile:         sum_i exp2(m_i - m) o_i / sum_i exp2(m_i - m) l_i        with m = max m_i, added up in order

A tile of one partition is written at once. Otherwise each consumer of a program stores its rows' result in
memory, and the one that arrives last (`arrival_counter`) merges them.

Never in partitions: tiles with a window of no more than two partitions, and calls where no sequence can have
two.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import common
from pallas_kernels.gpu.attention import Softmax
from pallas_kernels.gpu.partitioning import Partitioning, PartitionList, partition_list
from pallas_kernels.gpu.prompt.program import Problem, seen_by
from pallas_kernels.gpu.prompt.softmax import nothing

MIN_TOKENS = 8192  # of a partition: storing and merging it takes a few microseconds, computing it 150
PROGRAMS = 64  # for the partitions of one tile: half of an H200's multiprocessors
MIN_PARTITIONS, MAX_PARTITIONS = 4, 32  # of a tile
PARTIAL_BYTES = 2**29  # of partial results in one launch: calls with more tiles are several launches
STATS_WIDTH = 8  # the narrowest array that lies in registers as a wgmma's result does
LOADED_AT_A_TIME = 2  # partitions whose loads are in flight together, while they are merged


def partitioning_of(num_programs: int, *, is_interpreted: bool = False) -> Partitioning:
    """Return the default rule, for tiles that each have `num_programs` programs without partitions.

    In Pallas' interpreter tiles have one partition, unless a test asks for more. It runs one program after
    the other, and reports a race when one reads another's result.
    """
    max_count = max(MIN_PARTITIONS, min(MAX_PARTITIONS, PROGRAMS // num_programs))
    return Partitioning(MIN_TOKENS, 1 if is_interpreted else max_count)


def max_partitions(p: Problem, capacity: int, partitioning: Partitioning) -> int:
    """Return the most partitions that a tile can have, in sequences of `capacity` tokens at most."""
    if partitioning.tokens % p.tile_kv:
        raise ValueError(
            f"{partitioning.tokens=} must be a multiple of the {p.tile_kv} tokens that are read at a time"
        )
    is_short = p.most_seen is not None and p.most_seen <= 2 * partitioning.tokens
    return 1 if is_short else partitioning.bound(capacity)


def plan(
    p: Problem, positions: jax.Array, seq_lens: jax.Array, capacity: int, partitioning: Partitioning
) -> PartitionList:
    """List the partitions: 16 bytes each, computed by XLA. Layers that are no loop share one computation of
    it.

    positions, seq_lens: [num_tiles] int32, the position of each tile's first query, and tokens in the cache.
    """
    start, end = jnp.broadcast_arrays(*seen_by(p, positions, seq_lens))
    first = p.first_seen(positions)
    first = jnp.zeros_like(positions) if first is None else jnp.maximum(first, 0)
    # The size follows from the tile's position alone: a sequence may grow, or end within the tile.
    size = partitioning.sizes(first, positions + p.query_len, capacity)
    return partition_list(start, end, size, positions.shape[0] * max_partitions(p, capacity, partitioning))


class Partials(NamedTuple):
    """The partial results of each consumer's rows, in the GPU's memory."""

    out: Any  # [max_items, num_kv_heads, num_chunks, num_warpgroups, warpgroup_rows, head_dim] float32
    max: Any  # [max_items, num_kv_heads, num_chunks, num_warpgroups, warpgroup_rows, 8] float32, all the same
    sum: Any  # likewise


def partials_of(p: Problem, max_items: int) -> Partials:
    """Return the types of `Partials`."""
    shape = max_items, p.num_kv_heads, p.num_chunks, p.num_warpgroups, p.warpgroup_rows
    out, stats = (jax.ShapeDtypeStruct((*shape, width), jnp.float32) for width in (p.head_dim, STATS_WIDTH))
    return Partials(out, stats, stats)


class ComputedPartition(NamedTuple):
    """The partition that a consumer of a program has computed, and the memory for all of them."""

    items: Any  # of `PartitionList`
    item: jax.Array
    partials: Partials
    at: tuple[jax.Array, ...]  # kv head, chunk and warpgroup

    @property
    def number(self) -> jax.Array:
        """The partition's index among the tile's. Read where it is needed: registers are short before."""
        return lax.rem(self.items[self.item, 3], 1 << 16)

    @property
    def num_partitions(self) -> jax.Array:
        """The number of the tile's partitions."""
        return lax.div(self.items[self.item, 3], 1 << 16)


def finish(
    p: Problem,
    computed: ComputedPartition,
    state: Softmax,
    pieces: Callable[[], Iterable[tuple[int, Softmax]]],
    write: Callable[[Iterable[tuple[int, Softmax]]], None],
    is_last: Callable[[], jax.Array],
) -> None:
    """Write the tile's output, in pieces of columns, if all its other partitions have arrived.

    pieces: of the softmax, as (first column, softmax) pairs.
    write: takes such pairs.
    is_last: counts the arrival, and returns whether it is the last one.
    """
    pl.when(computed.num_partitions == 1)(lambda: write(pieces()))

    @pl.when(computed.num_partitions > 1)
    def _store() -> None:
        kept, at = computed.partials, (computed.item, *computed.at)
        for column, piece in pieces():
            width = piece.out.shape[1]
            columns = () if width == p.head_dim else (slice(None), pl.ds(column, width))
            common.store(kept.out.at[(*at, *columns)], piece.out)
        for ref, values in ((kept.max, state.max), (kept.sum, state.sum)):
            common.store(ref.at[at], lax.broadcast_in_dim(values, (p.warpgroup_rows, STATS_WIDTH), [0]))
        pl.when(is_last())(lambda: write(_merged(p, computed)))


def _merged(p: Problem, computed: ComputedPartition) -> Iterator[tuple[int, Softmax]]:
    """Merge the partitions of a tile. Yield pieces of it: the first column, and the softmax from there on."""
    count, first = computed.num_partitions, computed.item - computed.number
    for column in range(0, p.head_dim, 64):  # registers are short
        width = min(64, p.head_dim - column)
        piece = pl.ds(column, width)

        def load(i: jax.Array, columns: Any = piece) -> Softmax:
            # Past the end the last partition is read again, without weight.
            index = (first + jnp.minimum(i, count - 1), *computed.at, slice(None))
            all_same, weight = pl.ds(0, STATS_WIDTH), jnp.where(i < count, 0.0, common.LOWEST)
            out, largest, total = (
                plgpu.load(ref.at[(*index, columns_of)], layout=p.layout, optimized=False)
                for ref, columns_of in zip(computed.partials, (columns, all_same, all_same), strict=True)
            )
            return Softmax(out, largest.max(axis=1) + weight, total.max(axis=1))

        def merge(i: jax.Array, state: Softmax, load: Callable[..., Softmax] = load) -> Softmax:
            for partition in [load(i * LOADED_AT_A_TIME + k) for k in range(LOADED_AT_A_TIME)]:
                state = _merge_one(state, partition)
            return state

        rounds = pl.cdiv(count, jnp.int32(LOADED_AT_A_TIME))
        yield column, lax.fori_loop(0, rounds, merge, nothing(p, width))


def _merge_one(so_far: Softmax, partition: Softmax) -> Softmax:
    """Merge one more partition into those before it."""
    largest = jnp.maximum(so_far.max, partition.max)
    old, new = jnp.exp2(so_far.max - largest), jnp.exp2(partition.max - largest)
    out, more = (
        x.out * lax.broadcast_in_dim(w, x.out.shape, [0]) for x, w in ((so_far, old), (partition, new))
    )
    return Softmax(out + more, largest, so_far.sum * old + partition.sum * new)


def bytes_of(num_items: int, num_rows: int, head_dim: int) -> int:
    """Return the bytes of `Partials` of so many partitions, each of as many rows."""
    return num_items * num_rows * (head_dim + 2 * STATS_WIDTH) * 4


def tiles_of_a_launch(p: Problem, num_tiles: int, max_partitions: int) -> int:
    """Return the tiles of one launch, such that its `Partials` take no more than `PARTIAL_BYTES`."""
    if max_partitions == 1:
        return num_tiles
    rows = p.num_kv_heads * p.num_chunks * p.num_warpgroups * p.warpgroup_rows
    total = bytes_of(num_tiles * max_partitions, rows, p.head_dim)
    return -(-num_tiles // -(-total // PARTIAL_BYTES))
