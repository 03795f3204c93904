"""Partitions of long sequences, each computed by a program of its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MOST_COUNTED = 2**15 - 1  # partitions of a row: a count is the upper half of an item's number


class Partitioning(NamedTuple):
    """A rule for partitions: they begin at multiples of `tokens`, doubled until a row has at most
    `max_partitions`.
    """

    tokens: int
    max_partitions: int

    def sizes(self, start: jax.Array, end: jax.Array, capacity: int) -> jax.Array:
        """Return the tokens of a partition for each row's range [start, end); no row has more than `capacity`
        tokens.
        """
        size, longest = jnp.full_like(end, self.tokens), self.tokens
        while longest < capacity:
            size = jnp.where(-(-end // size) - start // size > self.max_partitions, 2 * size, size)
            longest *= 2
        return size

    def bound(self, capacity: int) -> int:
        """Return the most partitions that a row of up to `capacity` tokens can have."""
        return max(1, min(self.max_partitions, -(-capacity // self.tokens)))


class PartitionList(NamedTuple):
    """The partitions of all rows in one list: row by row, each row's from the first to the last."""

    num_items: jax.Array  # [1]
    items: jax.Array  # [max_items, 4] row, first token, end token, which part + 65,536 x how many


def partition_list(start: jax.Array, end: jax.Array, size: jax.Array, max_items: int) -> PartitionList:
    """List the partitions of rows' ranges [start, end). A row without tokens has one, which writes zeros.

    start, end: [num_rows] int32, tokens; size: [num_rows] int32, tokens of a partition.
    max_items: the length of the list.
    """
    first = start // size
    count = jnp.maximum(-(-end // size) - first, 1)
    stop = jnp.cumsum(count, dtype=jnp.int32)
    item = jnp.arange(max_items, dtype=jnp.int32)
    row = jnp.sum(item[:, None] >= stop[None, :], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, end.shape[0] - 1)
    part = item - (stop - count)[row]
    token = (first[row] + part) * size[row]
    bounds = jnp.maximum(start[row], token), jnp.minimum(end[row], token + size[row])
    return PartitionList(stop[-1:], jnp.stack([row, *bounds, part + (count[row] << 16)], axis=1))
