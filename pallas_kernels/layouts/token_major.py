"""The layout `token_major`, the default."""

from pallas_kernels.layouts.base import Layout
from pallas_kernels.layouts.dense import Dense
from pallas_kernels.layouts.latent import Latent


class TokenMajor(Dense):
    """A token's heads side by side, token after token: what projections give, and what a prompt is written
    in.
    """

    axes = ("block", "token", "head", "dim")

    def keys_alone(self) -> Layout:
        return Latent()


TOKEN_MAJOR = TokenMajor()  # the default
