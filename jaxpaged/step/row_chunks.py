"""Rows computed in chunks, so that a chunk's intermediate values fit a processor's cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxpaged.arithmetic import cdiv


def in_row_chunks[Rows, Out](
    compute: Callable[[Rows], Out], rows: Rows, num_used: Int[Array, ""], at_once: int | None
) -> Out:
    """Apply `compute` to all rows, `at_once` rows at a time; None: to all together.

    Each array of `rows` and of the results has one line for each row. Results of rows behind the first
    `num_used` may be zeros. The last chunk may overlap the chunk before it; their common rows are computed
    twice.
    """
    num = jax.tree.leaves(rows)[0].shape[0]
    if at_once is None or at_once >= num:
        return compute(rows)

    def chunk(first: Int[Array, ""] | int) -> Rows:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, at_once), rows)

    def one(i: Int[Array, ""], results: Out) -> Out:
        first = jnp.minimum(i * at_once, num - at_once)

        def put(before: Array, new: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(before, new, first, 0)

        return jax.tree.map(put, results, compute(chunk(first)))

    of_one = jax.eval_shape(lambda: compute(chunk(0)))
    nothing = jax.tree.map(lambda x: jnp.zeros((num, *x.shape[1:]), x.dtype), of_one)
    return lax.fori_loop(0, cdiv(num_used, at_once), one, nothing)
