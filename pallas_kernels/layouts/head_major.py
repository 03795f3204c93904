"""The layout `head_major`."""

from pallas_kernels.layouts.dense import Dense


class HeadMajor(Dense):
    """Layout with all tokens of a head side by side, so that a program that computes one head reads one
    piece.
    """

    axes = ("block", "head", "token", "dim")
