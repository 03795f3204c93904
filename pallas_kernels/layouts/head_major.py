"""The layout `head_major`."""

from pallas_kernels.layouts.dense import Dense


class HeadMajor(Dense):
    """A head's tokens side by side: what a program that computes one head reads lies in one piece."""

    axes = ("block", "head", "token", "dim")
