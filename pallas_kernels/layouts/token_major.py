"""The layout `token_major`, the default."""

from pallas_kernels.layouts.base import Layout
from pallas_kernels.layouts.dense import Dense
from pallas_kernels.layouts.latent import Latent


class TokenMajor(Dense):
    """Layout with all heads of a token side by side, token after token, in the order in which projections
    give them.
    """

    axes = ("block", "token", "head", "dim")

    def keys_alone(self) -> Layout:
        return Latent()


TOKEN_MAJOR = TokenMajor()  # the default
