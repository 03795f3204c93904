"""Flat batches of queries as tiles: the tile and offset of a token, and the sequence and position of a tile.

A sequence with one query is a tile of one token. One with more has tiles of `tile_len` tokens from its first
query on. Both lists have a fixed length: entries for sequences of the other kind, and unused tiles, have no
tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

TILE_LEN = 32  # tokens; what a GPU's prompt kernel fills its rows with, for groups of four heads


class Tiles(NamedTuple):
    """The tiles of a flat batch."""

    seq: Int[Array, " num_tiles"]
    first_token: Int[Array, " num_tiles"]  # in the flat batch
    position: Int[Array, " num_tiles"]  # of its first token, in the sequence
    seq_len: Int[Array, " num_tiles"]  # tokens of its sequence; 0 for an unused tile


class ResultLocations(NamedTuple):
    """The locations of the results of a flat batch's tokens."""

    is_query: jax.Array  # [num_tokens]
    is_single: jax.Array  # [num_tokens] whether it is its sequence's only query
    seq: jax.Array  # [num_tokens]
    tile: jax.Array  # [num_tokens]
    offset: jax.Array  # [num_tokens] in the tile


def num_tiles(num_tokens: int, num_seqs: int, max_query_len: int, tile_len: int) -> int:
    """Return the most tiles that can have queries."""
    return min(num_tokens // tile_len + num_seqs, num_seqs * -(-max_query_len // tile_len))


def singles(seq_lens: Int[Array, " num_seqs"], cu_query_lens: Int[Array, " num_seqs_plus_1"]) -> Tiles:
    """Return a tile of one token for each sequence that has one query."""
    is_single = jnp.diff(cu_query_lens) == 1
    seq = jnp.arange(seq_lens.shape[0], dtype=jnp.int32)
    return Tiles(seq, cu_query_lens[:-1], seq_lens - 1, jnp.where(is_single, seq_lens, 0))


def tiles(
    seq_lens: Int[Array, " num_seqs"],
    cu_query_lens: Int[Array, " num_seqs_plus_1"],
    num_tokens: int,
    count: int,
    tile_len: int,
) -> tuple[Tiles, ResultLocations]:
    """Return `count` tiles for the sequences with several queries, and where every token's result lies."""
    query_lens = jnp.diff(cu_query_lens)
    counts = jnp.where(query_lens > 1, -(-query_lens // tile_len), 0)
    stop = jnp.cumsum(counts, dtype=jnp.int32)
    last_seq = seq_lens.shape[0] - 1

    tile = jnp.arange(count, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(tile[:, None] >= stop, axis=1, dtype=jnp.int32), last_seq)
    first = (tile - (stop - counts)[seq]) * tile_len  # among the sequence's queries
    position = seq_lens[seq] - query_lens[seq] + first
    made = Tiles(seq, cu_query_lens[seq] + first, position, jnp.where(tile < stop[-1], seq_lens[seq], 0))

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(token[:, None] >= cu_query_lens[1:], axis=1, dtype=jnp.int32), last_seq)
    number = token - cu_query_lens[seq]
    places = ResultLocations(
        is_query=token < cu_query_lens[-1],
        is_single=query_lens[seq] == 1,
        seq=seq,
        tile=(stop - counts)[seq] + number // tile_len,
        offset=number % tile_len,
    )
    return made, places


def queries_of(
    q: Float[Array, "num_tokens num_q_heads head_dim"], tiles: Tiles, tile_len: int
) -> Float[Array, "num_tiles tile_len num_q_heads head_dim"]:
    """Return the tiles' queries; padding has any values."""
    return q.at[tiles.first_token[:, None] + jnp.arange(tile_len)].get(mode="clip")
