"""Tensor memory of a program of the prompt kernel, and the barriers of its products, on GPUs that have it.

A consumer has 128 rows, one in each lane. Two tiles of scores are under way: one of each consumer, or two of
a single one. A tile's weights take the place of its scores, so that 512 columns are enough.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

ROWS = 128
MAX_HEAD_DIM = 128
SLOTS = 2  # tiles of scores under way


class Tensors(NamedTuple):
    """Tensor memory of a program, and the barriers between who multiplies and the consumers."""

    tiles: Any  # scores [128, SLOTS * tile_kv] float32; weights in 16 bits, the half of twice as many columns
    sums: Any  # [128, num_warpgroups * head_dim] float32
    scored: Any  # [SLOTS]: a tile's scores are there
    weighted: Any  # [SLOTS]: its weights are there, and the sums may be added to
    added: Any  # [num_warpgroups]: its product with V has been added to the sums

    def scores(self, slot: Any) -> Any:
        """Return a slot's scores."""
        scores, _ = self.tiles
        width = scores.shape[1] // SLOTS
        return scores.at[:, pl.ds(slot * width, width)]

    def weights(self, slot: Any) -> Any:
        """Return a slot's weights."""
        _, weights = self.tiles
        width = weights.shape[1] // SLOTS
        return weights.at[:, pl.ds(slot * width, width // 2)]

    def sums_of(self, consumer: Any, head_dim: int) -> Any:
        """Return a consumer's sums."""
        return self.sums.at[:, pl.ds(consumer * head_dim, head_dim)]


def types(num_warpgroups: int, tile_kv: int, head_dim: int, dtype: Any, *, is_interpreted: bool) -> Tensors:
    """Return the types of `Tensors`, for plgpu.kernel.

    Pallas' interpreter takes memory with two uses as one whole, and sees a race where one slot has scores and
    the other weights. There the two are apart.
    """
    scores = plgpu.TMEM((ROWS, SLOTS * tile_kv), jnp.float32)
    weights = plgpu.TMEM((ROWS, 2 * SLOTS * tile_kv), dtype, packed=True)

    def barriers(count: int) -> Any:
        return plgpu.Barrier(num_barriers=count, orders_tensor_core=True)

    return Tensors(
        (scores, weights) if is_interpreted else plgpu.RefUnion(scores, weights),
        plgpu.TMEM((ROWS, num_warpgroups * head_dim), jnp.float32),
        barriers(SLOTS),
        barriers(SLOTS),
        barriers(num_warpgroups),
    )


def slot_of(i: jax.Array, consumer: Any, num_warpgroups: int) -> Any:
    """Return the slot of a consumer's tile."""
    return consumer if num_warpgroups == SLOTS else jax.lax.rem(i, jnp.int32(SLOTS))
