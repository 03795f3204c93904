"""Flat entries: a batch's things of unequal number a row, laid out one after the other in a fixed array."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def number_through(
    counts: Int[Array, " rows"], num_entries: int
) -> tuple[Int[Array, " num_entries"], Int[Array, " num_entries"], Bool[Array, " num_entries"]]:
    """Lay out `counts[r]` things of each row r: each entry's row, its number in the row, and if it is one.

    Rows never decrease, not even in the entries that are left over.
    """
    end = jnp.cumsum(counts, dtype=jnp.int32)
    start = end - counts
    row = jnp.cumsum(jnp.zeros(num_entries, jnp.int32).at[start].add(1, mode="drop"), dtype=jnp.int32) - 1
    index = jnp.arange(num_entries, dtype=jnp.int32)
    return row, index - start[row], index < end[-1]


def unbroken(ok: Bool[Array, " n"], is_first: Bool[Array, " n"]) -> Bool[Array, " n"]:
    """Whether an entry and all before it in its row are `ok`; `is_first` begins a row."""
    index = jnp.arange(ok.shape[0], dtype=jnp.int32)
    return lax.cummax(jnp.where(ok, -1, index)) < lax.cummax(jnp.where(is_first, index, 0))


def first_equal(*keys: Array, mask: Bool[Array, " n"]) -> Int[Array, " n"]:
    """The index of the first masked entry with the same keys as each masked entry; the others' own."""
    index = jnp.arange(mask.shape[0], dtype=jnp.int32)
    alone = jnp.where(mask, -1, index)  # no two of the others are equal
    *ordered, order = lax.sort([alone, *keys, index], num_keys=len(keys) + 1, is_stable=True)
    differs = functools.reduce(jnp.logical_or, [key != jnp.roll(key, 1) for key in ordered]) | (index == 0)
    first = order[lax.cummax(jnp.where(differs, index, 0))]
    return jnp.zeros_like(index).at[order].set(first)


def reversed_groups(group: Int[Array, " n"]) -> Int[Array, " n"]:
    """The order that turns each group of equal neighbours around, but leaves the groups in theirs."""
    index = jnp.arange(group.shape[0], dtype=jnp.int32)
    is_first = (index == 0) | (group != jnp.roll(group, 1))
    is_last = jnp.roll(is_first, -1) | (index == index[-1])
    first = lax.cummax(jnp.where(is_first, index, 0))
    last = lax.cummin(jnp.where(is_last, index, index[-1]), reverse=True)
    return first + last - index
