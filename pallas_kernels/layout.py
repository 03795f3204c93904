"""The layouts of a cache, which callers name with `kv_layout`: in which order its axes lie."""

from typing import Literal, NamedTuple

import jax

Layout = Literal["token_major", "head_major"]
DEFAULT: Layout = "token_major"
AXES = {
    "token_major": ("num_blocks", "block_size", "num_kv_heads", "head_dim"),
    "head_major": ("num_blocks", "num_kv_heads", "block_size", "head_dim"),
}


class Sizes(NamedTuple):
    """The sizes of a cache's axes."""

    num_blocks: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int


def sizes(cache: jax.Array, kv_layout: str) -> Sizes:
    """The sizes of a cache in that layout."""
    return Sizes(**dict(zip(AXES[kv_layout], cache.shape, strict=True)))
