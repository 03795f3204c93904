"""K and V in arrays: how they are made, written and copied, and one layer seen in those of all."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from jaxpaged.memory.block_pool import NULL_BLOCK
from pallas_kernels.ops import reshape_and_cache, swap_blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """One array for K and one for V: a block's layers lie side by side. Block 0 is the null block.

    So a block moves in one piece, and a loop over layers carries two arrays, which are updated in place. To
    a kernel each is a pool of `num_blocks * num_layers` blocks, of which a layer's are those that `blocks_of`
    and `slots_of` name.
    """

    k: Num[Array, "num_blocks num_layers block_size num_kv_heads head_dim"]
    v: Num[Array, "num_blocks num_layers block_size num_kv_heads head_dim"]

    @property
    def num_layers(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[2]

    @property
    def pools(
        self,
    ) -> tuple[Num[Array, "blocks block_size heads dim"], Num[Array, "blocks block_size heads dim"]]:
        """K and V as kernels see them."""
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (self.k, self.v))
        return k, v

    def blocks_of(self, layer: int | Int[Array, ""], block_ids: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """The numbers in `pools` of a layer's share of these blocks; those of the null block are padding,
        too.
        """
        return block_ids * self.num_layers + layer

    def slots_of(self, layer: int | Int[Array, ""], slots: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """The slots in `pools` of a layer's K and V of the tokens in these slots."""
        blocks = self.blocks_of(layer, slots // self.block_size)
        return blocks * self.block_size + slots % self.block_size


def create(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> KVCache:
    """A cache of zeros (never uninitialised memory: what is masked must still be a number)."""
    shape = (num_blocks, num_layers, block_size, num_kv_heads, head_dim)
    return KVCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def write(
    cache: KVCache,
    layer: int | Int[Array, ""],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    slot_mapping: Int[Array, " num_tokens"],
) -> KVCache:
    """Put K and V of one layer into the tokens' slots; in slot 0, the null block's, nobody looks."""
    pools = reshape_and_cache(k, v, *cache.pools, cache.slots_of(layer, slot_mapping))
    new_k, new_v = (pool.reshape(cache.k.shape) for pool in pools)
    return KVCache(k=new_k, v=new_v)


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


def copy_within(
    cache: KVCache, sources: Int[Array, " num_pairs"], destinations: Int[Array, " num_pairs"]
) -> KVCache:
    """Copy block `sources[i]` to `destinations[i]`, in place, one after the other; where it is NULL_BLOCK,
    none. No block may be both. What is not to be copied costs nothing.
    """
    type Carry = tuple[KVCache, Bool[Array, " num_pairs"]]

    def copy_one(carry: Carry) -> Carry:
        cache, left = carry
        i = jnp.argmax(left)

        def copied(x: Num[Array, "num_blocks *block"]) -> Num[Array, "num_blocks *block"]:
            block = lax.dynamic_index_in_dim(x, sources[i], keepdims=False)
            return lax.dynamic_update_index_in_dim(x, block, destinations[i], axis=0)

        return jax.tree.map(copied, cache), left.at[i].set(False)

    return lax.while_loop(lambda carry: jnp.any(carry[1]), copy_one, (cache, sources != NULL_BLOCK))[0]
