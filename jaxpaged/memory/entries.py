"""Flat entries: a batch's things of unequal number a row, laid out one after the other in a fixed array."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from jaxpaged.arithmetic import cdiv

# Entries per iteration of a loop whose number of items is traced.
CHUNK = 128


def number_through(
    counts: Int[Array, " rows"], num_entries: int, first: int | Int[Array, ""] | None = None
) -> tuple[Int[Array, " num_entries"], Int[Array, " num_entries"], Bool[Array, " num_entries"]]:
    """Lay out `counts[r]` things of each row r: each entry's row, its number in the row, and if it is one.

    Rows never decrease, not even in the entries that are left over. With a `first`, only from that thing on.
    """
    end = jnp.cumsum(counts, dtype=jnp.int32)
    start = end - counts
    index = jnp.arange(num_entries, dtype=jnp.int32)
    if first is None:
        begins = start
    else:
        begins, index = jnp.maximum(start - first, 0), index + first
    row = jnp.cumsum(jnp.zeros(num_entries, jnp.int32).at[begins].add(1, mode="drop"), dtype=jnp.int32) - 1
    return row, index - start[row], index < end[-1]


def in_chunks[Carry](
    counts: Int[Array, " rows"], take: Callable[[Array, Array, Array, Carry], Carry], carry: Carry
) -> Carry:
    """Take `counts[r]` things of each row r, row by row, CHUNK at a time: costs what there is.

    `take` gets the entries of a chunk as `number_through` has them, and what the chunk before it gave back.
    """

    def take_chunk(i: int | Int[Array, ""], carry: Carry) -> Carry:
        return take(*number_through(counts, CHUNK, i * CHUNK), carry)

    return lax.fori_loop(0, cdiv(jnp.sum(counts, dtype=jnp.int32), CHUNK), take_chunk, carry)


def dealt(counts: Int[Array, " rows"], num: int | Int[Array, ""]) -> Int[Array, " rows"]:
    """Return how many of the first `num` items belong to each row, if row r has `counts[r]`, in order."""
    before = jnp.cumsum(counts, dtype=jnp.int32) - counts
    return jnp.clip(num - before, 0, counts)


def unbroken(ok: Bool[Array, " n"], is_first: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """Return whether an entry and all before it in its row are `ok`; `is_first` begins a row."""
    index = jnp.arange(ok.shape[0], dtype=jnp.int32)
    return lax.cummax(jnp.where(ok, -1, index)) < lax.cummax(jnp.where(is_first, index, 0))


def first_equal(*keys: Array, mask: Bool[Array, " n"]) -> Int[Array, " n"]:
    """Return the index of the first masked entry with each masked entry's keys; for others their own index.

    By hashing: of all entries in a bucket the first is tried, and those that differ from it try another one.
    Entries with the same keys go together, and the first of all is always settled: so the loop ends.
    """
    num_entries = mask.shape[0]
    index = jnp.arange(num_entries, dtype=jnp.int32)
    num_buckets = 1 << (4 * num_entries).bit_length()
    type Search = tuple[UInt32[Array, ""], Int[Array, " n"], Bool[Array, " n"]]

    def attempt(search: Search) -> Search:
        seed, first, pending = search
        bucket = jnp.broadcast_to(seed, index.shape)
        for key in keys:
            bucket = (bucket ^ key.astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
            bucket ^= bucket >> 15
        bucket = (bucket % num_buckets).astype(jnp.int32)
        table = jnp.full(num_buckets, num_entries, jnp.int32)
        table = table.at[jnp.where(pending, bucket, num_buckets)].min(index, mode="drop")
        tried = table[bucket]
        equal = functools.reduce(jnp.logical_and, [key == key[tried] for key in keys], pending)
        return seed * jnp.uint32(0x85EBCA6B) + 1, jnp.where(equal, tried, first), pending & ~equal

    start = (jnp.uint32(1), index, mask)
    return lax.while_loop(lambda search: jnp.any(search[2]), attempt, start)[1]


def after_reading(read: Int[Array, "*n"], value: Int[Array, "*n"] | int) -> Int[Array, "*n"]:
    """Return `value` so that XLA reads `read` before it writes; `value` must nowhere be less than `read`.

    An array that is read and then written to is updated in place only if what is written depends on what was
    read. Else XLA is free to write first, and copies the whole array to be safe.
    """
    return jnp.maximum(read, value)
