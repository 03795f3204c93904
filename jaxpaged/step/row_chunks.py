"""Rows computed some at a time, so that what is made of them fits a processor's cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxpaged.arithmetic import cdiv


def in_pieces[Rows, Out](
    compute: Callable[[Rows], Out], rows: Rows, num_used: Int[Array, ""], at_once: int | None
) -> Out:
    """Return what `compute` makes of these rows, `at_once` at a time; None: of all together.

    Each array of `rows`, and of what is made of them, has a line for each row. Behind the first `num_used`
    rows there may be zeros. The last piece may begin within the one before: those rows are computed twice.
    """
    num = jax.tree.leaves(rows)[0].shape[0]
    if at_once is None or at_once >= num:
        return compute(rows)

    def piece(first: Int[Array, ""] | int) -> Rows:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, at_once), rows)

    def one(i: Int[Array, ""], results: Out) -> Out:
        first = jnp.minimum(i * at_once, num - at_once)

        def put(before: Array, new: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(before, new, first, 0)

        return jax.tree.map(put, results, compute(piece(first)))

    of_one = jax.eval_shape(lambda: compute(piece(0)))
    nothing = jax.tree.map(lambda x: jnp.zeros((num, *x.shape[1:]), x.dtype), of_one)
    return lax.fori_loop(0, cdiv(num_used, at_once), one, nothing)
