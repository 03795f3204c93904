"""The layout `all_layers`."""

from pallas_kernels.layouts.dense import Dense


class AllLayers(Dense):
    """One array for all: a block's layers side by side, of each its K and then its V.

    A block moves in one piece, into the host's memory or to another machine.
    """

    axes = ("block", "kv", "token", "head", "dim")
