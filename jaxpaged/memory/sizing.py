"""How many bytes a block takes, and how many blocks fit."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxpaged.checks import INT32_MAX, InputError, check
from pallas_kernels.layouts import TOKEN_MAJOR, Layout

MOST_BLOCKS = 2**20  # of a small model in a large memory: beyond, more blocks only cost time to make


@dataclass(frozen=True)
class CacheSize:
    """What the cache will hold, and why it has that size."""

    num_blocks: int  # the null block included
    bytes_per_block: int
    block_size: int  # tokens
    reason: str

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """Tokens the cache has places for (not in the null block)."""
        return (self.num_blocks - 1) * self.block_size


def bytes_per_block(
    *,
    block_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: jnp.dtype,
    layout: Layout = TOKEN_MAJOR,
) -> int:
    """Bytes of one block over all layers; by default vLLM's `CacheEngine.get_cache_block_size`."""
    return num_layers * layout.block_bytes(block_size, num_kv_heads, head_dim, dtype)


def cache_size(
    *,
    num_blocks: int | None,
    bytes_per_block: int,
    state_bytes_per_block: int,
    block_size: int,
    num_layers: int,
    available_bytes: int,
    available_why: str,
) -> CacheSize:
    """Size the cache: `num_blocks` if given, else what `available_bytes` hold, with what is kept of each
    block.

    Not only what the rows can use: what they leave is where finished requests' prefixes stay findable.
    Raises `InputError` if not even one sequence of one block would fit, or if a slot's number, all layers
    counted, would be no int32.
    """
    most = INT32_MAX // (num_layers * block_size)
    if num_blocks is not None:
        rule = f"at most {most}, for {num_layers} layers of {block_size} tokens a block"
        check("num_blocks", num_blocks, rule, num_blocks <= most)
        return CacheSize(num_blocks, bytes_per_block, block_size, "num_blocks was given")
    fit = available_bytes // (bytes_per_block + state_bytes_per_block)
    if fit < 2:
        raise InputError(
            f"the cache needs at least 2 blocks of {bytes_per_block} bytes, "
            f"but only {max(available_bytes, 0)} bytes are available ({available_why})"
        )
    most = min(MOST_BLOCKS, most)
    if fit > most:
        reason = f"as many as are made without being asked for, in {available_why}"
        return CacheSize(most, bytes_per_block, block_size, reason)
    return CacheSize(fit, bytes_per_block, block_size, f"as many as fit into {available_why}")
