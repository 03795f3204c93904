"""The operations on caches in NumPy, in place where that is quicker."""

import ml_dtypes
import numpy as np


def reshape_and_cache(
    k, v, k_cache, v_cache, slot_mapping, k_scale=None, v_scale=None, kv_layout="token_major"
):
    """Write K and V into the caches that are given."""
    heads_first = kv_layout == "head_major"
    num_blocks, block_size = k_cache.shape[0], k_cache.shape[2 if heads_first else 1]
    written = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    block, offset = np.divmod(slot_mapping[written], block_size)
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        new = new[written]
        if scale is not None:
            new = new / np.reshape(scale, (-1, 1))
            if cache.dtype == np.int8:
                new = np.clip(np.rint(new), -128, 127)
            else:
                largest = float(ml_dtypes.finfo(cache.dtype).max)
                new = np.clip(new, -largest, largest)
        if heads_first:
            cache[block, :, offset] = new.astype(cache.dtype)
        else:
            cache[block, offset] = new.astype(cache.dtype)


def copy_blocks(caches, pairs):
    """Copy all blocks at once, each from where its content comes in the end."""
    origin = np.arange(len(caches[0]))
    for source, target in pairs:
        if 0 <= source < len(origin) and 0 <= target < len(origin):
            origin[target] = origin[source]
    return [cache[origin] for cache in caches]


def swap_blocks(source, target, pairs):
    """Copy blocks into the target."""
    inside = np.all((pairs >= 0) & (pairs < [len(source), len(target)]), axis=1)
    for source_block, target_block in pairs[inside]:
        target[target_block] = source[source_block]


def merge(out, maxima, sums, sinks=None):
    """Merge partial results, brought to one maximum."""
    largest = maxima.max(axis=2)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    largest = np.where(np.isfinite(largest), largest, 0)
    weights = np.exp(maxima - largest[..., None])
    total = (weights * sums).sum(axis=2)
    merged = (weights[..., None] * out).sum(axis=2)
    empty = total == 0
    if sinks is not None:
        total = total + np.exp(sinks - largest)
    return merged / np.where(empty, 1, total)[..., None]
