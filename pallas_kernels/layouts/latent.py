"""The layout of latent attention: one array, for values are a part of the keys."""

import jax

from pallas_kernels.layouts.base import Arrays, Layout, Sizes
from pallas_kernels.layouts.dense import Dense, put

LATENT = "latent"


class Latent(Dense):
    """One vector a token and head, which is both K and V, token after token: of latent attention, where all
    heads read one vector, and V is its first numbers.

    `write` takes K, and leaves V out. Bytes of a block are those of K alone.
    """

    axes = ("block", "token", "head", "dim")

    @property
    def names(self) -> tuple[str, str]:
        """Name of the array of K, for K and again for V."""
        return LATENT, LATENT

    def write(
        self, arrays: Arrays, sizes: Sizes, k: jax.Array, v: jax.Array, slots: jax.Array
    ) -> dict[str, jax.Array]:
        names = (LATENT,)
        return dict(arrays) | put(arrays, names, self.axes, (k,), slots, sizes.block_size)

    def keys_alone(self) -> Layout:
        return self
