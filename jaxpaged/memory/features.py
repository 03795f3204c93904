"""Features of tokens in the blocks of a cache, one vector a token: what a head that drafts reads.

They lie in the cache of the head's K and V as one more array, which moves with its blocks. To a layer that
cache is no pool before they are `taken`.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpaged.memory.kv_cache import KVCache

NAME = "features"

Features = Float[Array, "blocks_or_one one_or_blocks block_size width"]


def beside(cache: KVCache, width: int) -> KVCache:
    """Return the cache with features of zeros for each of its tokens."""
    leading = (1, cache.num_blocks) if cache.axis else (cache.num_blocks, 1)
    return put(cache, jnp.zeros((*leading, cache.block_size, width), cache.dtype))


def put(cache: KVCache, features: Features) -> KVCache:
    """Return the cache with these features."""
    return replace(cache, blocks=cache.blocks | {NAME: features})


def taken(cache: KVCache) -> tuple[KVCache, Features]:
    """Return the cache without its features, and these."""
    rest = {name: x for name, x in cache.blocks.items() if name != NAME}
    return replace(cache, blocks=rest), cache.blocks[NAME]


def read(features: Features, slots: Int[Array, " n"]) -> Float[Array, "n width"]:
    """Return the features of the tokens in these slots."""
    return features[_places(features, slots)]


def write(features: Features, slots: Int[Array, " n"], new: Float[Array, "n width"]) -> Features:
    """Put features of tokens into their slots; in slot 0, the null block's, nobody looks."""
    return features.at[_places(features, slots)].set(new.astype(features.dtype))


def _places(features: Features, slots: Int[Array, " n"]) -> tuple[Array | int, ...]:
    """Return the indices of slots in the array as it is: XLA copies a reshaped one at a condition."""
    block, offset = slots // features.shape[2], slots % features.shape[2]
    return (block, 0, offset) if features.shape[1] == 1 else (0, block, offset)
