"""The layout `fused`."""

from pallas_kernels.layouts.dense import Dense


class Fused(Dense):
    """A block's K and its V next to each other in one array, each token-major: one fetch a block.

    Layer after layer, as engines with a tensor for each layer have them.
    """

    axes = ("block", "kv", "token", "head", "dim")
    layers_apart = True
