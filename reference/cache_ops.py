"""Cache operations on arrays, written as loops over tokens and blocks.

A slot is one token's place: slot = block_id * block_size + offset. Block 0 is the null block: nobody owns
it, padding is written into it, and its content means nothing. Nothing here changes its arguments: the new
arrays are returned.
"""

from collections.abc import Sequence

import numpy as np

QUANTISED_TYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


def token_of(
    cache: np.ndarray, block_table: np.ndarray, token: int, kv_layout: str = "token_major"
) -> np.ndarray:
    """Return the entry [num_kv_heads, head_dim] of a sequence's token, found through its row of the block
    table.
    """
    block_size = cache.shape[1 if kv_layout == "token_major" else 2]
    block = cache[int(block_table[token // block_size])]
    return block[token % block_size] if kv_layout == "token_major" else block[:, token % block_size]


def quantise(x: np.ndarray, scale: np.ndarray | float | None, dtype: np.dtype) -> np.ndarray:
    """Return the stored form of x [..., num_kv_heads, head_dim]: x / scale, brought into dtype's range.

    Floating types saturate at their largest finite number; int8 is rounded half to even and clipped to
    -128 .. 127. Without a scale (a cache in a 16- or 32-bit type) it is a plain conversion.
    """
    if scale is None:
        return x.astype(dtype)
    scale = np.asarray(scale, np.float32)
    if scale.ndim == 1:
        scale = scale[:, None]
    scaled = x.astype(np.float32) / scale
    if dtype == np.int8:
        return np.clip(np.rint(scaled), -128, 127).astype(np.int8)
    largest = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[np.dtype(dtype).name]
    return np.clip(scaled, -largest, largest).astype(dtype)


def reshape_and_cache(
    k: np.ndarray,
    v: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    slot_mapping: np.ndarray,
    *,
    k_scale: np.ndarray | float | None = None,
    v_scale: np.ndarray | float | None = None,
    kv_layout: str = "token_major",
) -> tuple[np.ndarray, np.ndarray]:
    """Write k and v [num_tokens, num_kv_heads, head_dim] to their slots.

    A token whose slot lies outside the cache (-1, say) is padding: it goes to slot 0 of the null block.
    Later tokens overwrite earlier ones. Returns: the new k_cache and v_cache.
    """
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    block_size = k_cache.shape[1 if kv_layout == "token_major" else 2]
    for token, slot in enumerate(slot_mapping):
        slot = int(slot)
        if not 0 <= slot < k_cache.shape[0] * block_size:
            slot = 0
        block, offset = divmod(slot, block_size)
        place = (block, offset) if kv_layout == "token_major" else (block, slice(None), offset)
        k_cache[place] = quantise(k[token], k_scale, k_cache.dtype)
        v_cache[place] = quantise(v[token], v_scale, v_cache.dtype)
    return k_cache, v_cache


def copy_blocks(caches: Sequence[np.ndarray], pairs: np.ndarray) -> list[np.ndarray]:
    """Copy block pairs[i, 0] onto block pairs[i, 1] in every cache, one pair after the other.

    So a pair sees what the pairs before it have written. A pair that names a block outside the cache changes
    nothing. Returns: the new caches.
    """
    new = [cache.copy() for cache in caches]
    for source, target in np.asarray(pairs):
        for cache in new:
            if 0 <= source < len(cache) and 0 <= target < len(cache):
                cache[target] = cache[source].copy()
    return new


def swap_blocks(source: np.ndarray, target: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Copy block pairs[i, 0] of one pool onto block pairs[i, 1] of another, in order.

    A pair that names a block outside its pool changes nothing. Returns: the new target.
    """
    target = target.copy()
    for from_block, to_block in np.asarray(pairs):
        if 0 <= from_block < len(source) and 0 <= to_block < len(target):
            target[to_block] = source[from_block]
    return target


def gather(
    cache: np.ndarray, block_table: np.ndarray, seq_len: int, kv_layout: str = "token_major"
) -> np.ndarray:
    """Return a sequence's tokens in order, [seq_len, num_kv_heads, head_dim]."""
    heads_axis = 2 if kv_layout == "token_major" else 1
    tokens = np.empty((seq_len, cache.shape[heads_axis], cache.shape[3]), cache.dtype)
    for t in range(seq_len):
        tokens[t] = token_of(cache, block_table, t, kv_layout)
    return tokens
