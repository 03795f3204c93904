"""The compiled program of pooling: a pass over tiles of prompts, whose hidden states are added up by row."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxpaged.contracts.attentions import Attention
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.decoder import Decoder
from pallas_kernels.ops import TiledImplementation

Hidden = Float[Array, "num_tiles tile_len hidden"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Work of one pass: tiles of neighbouring tokens of one prompt each, a prompt's tiles in order."""

    token_ids: Int[Array, "num_tiles tile_len"]
    weights: Float[Array, "num_tiles tile_len"]  # of each token's hidden state in its row's sum; 0: not in it
    rows: Int[Array, " num_tiles"]  # of the block tables, and of the sums
    starts: Int[Array, " num_tiles"]  # position of a tile's first token
    ends: Int[Array, " num_tiles"]  # one beyond its last; 0 for an unused tile
    block_tables: Int[Array, "num_rows max_blocks_per_seq"]


@functools.partial(
    jax.jit,
    static_argnums=(0,),
    static_argnames=("implementation", "wants_all"),
    donate_argnames=("cache", "sums"),
)
def add_pass(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    cache: KVCache,
    sums: Float[Array, "num_rows hidden"],
    tiles: Tiles,
    *,
    implementation: TiledImplementation | Attention,
    wants_all: bool = False,
) -> tuple[KVCache, Float[Array, "num_rows hidden"], Hidden | None]:
    """Compute a pass, and add its tokens' hidden states, in float32, to the sums of their rows.

    Tiles are added one after the other: so a row's sum has the same bits in any company.

    Returns the cache with the tokens' K and V, the sums, and with `wants_all` every token's hidden state,
    which is 0 for those that are none.
    """
    positions = tiles.starts[:, None] + jnp.arange(tiles.token_ids.shape[1], dtype=jnp.int32)
    is_token = positions < tiles.ends[:, None]
    block = tiles.block_tables.at[tiles.rows[:, None], positions // cache.block_size].get(mode="clip")
    slots = jnp.where(is_token, block * cache.block_size + positions % cache.block_size, 0)
    wanted = is_token if wants_all else tiles.weights != 0
    batch = PassBatch(
        slot_mapping=slots.reshape(-1),
        block_tables=tiles.block_tables,
        query_starts=tiles.starts,
        seq_lens=tiles.ends,
        implementation=implementation,
        table_rows=tiles.rows,
        wanted=wanted.reshape(-1),
    )
    model: Decoder = nnx.merge(graphdef, params)
    flat, cache = model(
        tiles.token_ids.reshape(-1), jnp.where(is_token, positions, 0).reshape(-1), cache, batch
    )
    # Hidden states of tokens that are not wanted may be anything, NaN too.
    hidden = jnp.where(wanted[:, :, None], flat.reshape(*positions.shape, -1).astype(jnp.float32), 0)

    def add(i: Int[Array, ""], sums: Float[Array, "num_rows hidden"]) -> Float[Array, "num_rows hidden"]:
        return sums.at[tiles.rows[i]].add(jnp.sum(hidden[i] * tiles.weights[i][:, None], axis=0))

    sums = lax.fori_loop(0, tiles.rows.shape[0], add, sums)
    return cache, sums, hidden if wants_all else None
