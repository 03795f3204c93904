"""The layout `token_major`, the default."""

from pallas_kernels.layouts.dense import Dense


class TokenMajor(Dense):
    """A token's heads side by side, token after token: what projections give, and what a prompt is written
    in.
    """

    axes = ("block", "token", "head", "dim")


TOKEN_MAJOR = TokenMajor()  # the default
