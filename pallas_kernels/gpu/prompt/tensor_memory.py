"""Products of prompts by tcgen05, on GPUs that have tensor memory.

A consumer has 128 rows, one in each lane of tensor memory, and columns of its own there: for the scores of a
tile, for their weights, and for the product with V. It starts a product, waits until that is done, and loads
the sums; while it takes its softmax, the tensor cores have the other consumer's. A thread has a whole row.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS = 128
MAX_HEAD_DIM = 128  # a thread has as many sums in registers
LOADED_AT_A_TIME = 8  # columns of a product: more make ptxas spill


class Tensors(NamedTuple):
    """Tensor memory of a program, and the barriers of its products: side by side, a consumer's columns."""

    scores: Any  # [128, num_warpgroups * tile_kv] float32
    weights: Any  # likewise, in 16 bits
    sums: Any  # [128, num_warpgroups * head_dim] float32
    done: Any  # [num_warpgroups]

    def of(self, warpgroup: jax.Array, num_warpgroups: int) -> "Tensors":
        """Return a consumer's own."""

        def columns(memory: Any) -> Any:
            width = memory.shape[1] // num_warpgroups
            return memory.at[:, pl.ds(warpgroup * width, width)]

        return Tensors(
            columns(self.scores), columns(self.weights), columns(self.sums), self.done.at[warpgroup]
        )


def types(num_warpgroups: int, tile_kv: int, head_dim: int, dtype: Any) -> Tensors:
    """Return the types of `Tensors`, for plgpu.kernel."""
    return Tensors(
        plgpu.TMEM((ROWS, num_warpgroups * tile_kv), jnp.float32),
        plgpu.TMEM((ROWS, num_warpgroups * tile_kv), dtype, packed=True),
        plgpu.TMEM((ROWS, num_warpgroups * head_dim), jnp.float32),
        plgpu.Barrier(num_barriers=num_warpgroups, orders_tensor_core=True),
    )


def scores(its: Tensors, q: Any, k: Any) -> jax.Array:
    """Compute q @ k for a tile: both are in shared memory, and free afterwards."""
    plgpu.tcgen05_mma(its.scores, q, k, its.done, accumulate=False)
    plgpu.barrier_wait(its.done)
    found: jax.Array = plgpu.async_load_tmem(its.scores)
    plgpu.wait_load_tmem()  # before the next tile's are written there
    return found


def add_product(its: Tensors, out: jax.Array, weights: jax.Array, v: Any) -> jax.Array:
    """Compute out + weights @ v: v is in shared memory, and free afterwards."""
    plgpu.async_store_tmem(its.weights, weights)
    plgpu.commit_tmem()
    plgpu.tcgen05_mma(its.sums, its.weights, v, its.done, accumulate=False)
    plgpu.barrier_wait(its.done)
    pieces, width = [], out.shape[1]
    for first in range(0, width, LOADED_AT_A_TIME):
        columns = slice(first, min(first + LOADED_AT_A_TIME, width))
        sums = plgpu.async_load_tmem(its.sums.at[:, pl.ds(first, columns.stop - first)])
        pieces.append(out[:, columns] + sums)
    plgpu.wait_load_tmem()
    return lax.concatenate(pieces, 1)
