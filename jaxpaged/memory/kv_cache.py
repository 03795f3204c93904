"""The arrays that hold keys and values, one pair a layer, and how a model reads and writes them."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import ops
from pallas_kernels.ops import TiledImplementation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """One array a layer, so that each is updated in place on its own. Block 0 is the null block."""

    k: tuple[Num[Array, "num_blocks block_size num_kv_heads head_dim"], ...]
    v: tuple[Num[Array, "num_blocks block_size num_kv_heads head_dim"], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionBatch:
    """Where the tokens of one forward pass stand: tiles of neighbouring tokens, each of one sequence."""

    slot_mapping: Int[
        Array, " num_tokens"
    ]  # of each token's K and V, 0 for none; num_tokens = tiles x tile_len
    block_tables: Int[Array, "num_tiles max_blocks_per_seq"]
    query_starts: Int[Array, " num_tiles"]  # position of each tile's first token
    seq_lens: Int[Array, " num_tiles"]  # tokens in the cache, the tile's own included; 0 for an unused tile
    implementation: TiledImplementation = field(metadata={"static": True})  # of the attention

    @property
    def is_padding(self) -> Bool[Array, " num_tokens"]:
        """The tokens that are none: their K and V go to the null block."""
        return self.slot_mapping == 0


def create(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> KVCache:
    """A cache of zeros (never uninitialised memory: what is masked must still be a number)."""

    def side() -> tuple[Num[Array, "..."], ...]:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

    return KVCache(k=side(), v=side())


def attend(
    cache: KVCache,
    layer: int,
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    k: Float[Array, "num_tokens num_kv_heads head_dim"],
    v: Float[Array, "num_tokens num_kv_heads head_dim"],
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> tuple[Float[Array, "num_tokens num_q_heads head_dim"], KVCache]:
    """Write the tokens' K and V of one layer, then let each token look at its sequence up to itself.

    With a `sliding_window` it sees only the last so many tokens, itself among them; blocks that lie wholly
    before the window of a tile's first token may be gone, with anything in their places of the block table.
    """
    k_layer, v_layer = ops.reshape_and_cache(k, v, cache.k[layer], cache.v[layer], batch.slot_mapping)
    tiles = q.reshape(batch.query_starts.shape[0], -1, *q.shape[1:])
    out = ops.tiled_paged_attention(
        tiles,
        k_layer,
        v_layer,
        batch.block_tables,
        batch.query_starts,
        batch.seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        implementation=batch.implementation,
    )
    cache = KVCache(
        k=(*cache.k[:layer], k_layer, *cache.k[layer + 1 :]),
        v=(*cache.v[:layer], v_layer, *cache.v[layer + 1 :]),
    )
    return out.reshape(q.shape), cache
