"""The arrays that hold keys and values, one pair a layer: how they are made, written and copied."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jaxpaged.memory.block_pool import NULL_BLOCK
from pallas_kernels.ops import reshape_and_cache, swap_blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """One array a layer, so that each is updated in place on its own. Block 0 is the null block."""

    k: tuple[Num[Array, "num_blocks block_size num_kv_heads head_dim"], ...]
    v: tuple[Num[Array, "num_blocks block_size num_kv_heads head_dim"], ...]


def create(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> KVCache:
    """A cache of zeros (never uninitialised memory: what is masked must still be a number)."""

    def side() -> tuple[Num[Array, "..."], ...]:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

    return KVCache(k=side(), v=side())


def write(
    cache: KVCache,
    layer: int,
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    slot_mapping: Int[Array, " num_tokens"],
) -> KVCache:
    """Put K and V of one layer into the tokens' slots; in slot 0, the null block's, nobody looks."""
    k_layer, v_layer = reshape_and_cache(k, v, cache.k[layer], cache.v[layer], slot_mapping)
    return KVCache(
        k=(*cache.k[:layer], k_layer, *cache.k[layer + 1 :]),
        v=(*cache.v[:layer], v_layer, *cache.v[layer + 1 :]),
    )


def copy_blocks(
    source: KVCache,
    target: KVCache,
    sources: Int[Array, " num_pairs"],
    destinations: Int[Array, " num_pairs"],
) -> KVCache:
    """Copy block `sources[i]` of one cache to `destinations[i]` of the other; where it is NULL_BLOCK, none.

    What is not to be copied costs nothing.
    """
    pairs = jnp.where(sources == NULL_BLOCK, -1, jnp.stack([sources, destinations])).T
    return jax.tree.map(lambda a, b: swap_blocks(a, b, pairs), source, target)
