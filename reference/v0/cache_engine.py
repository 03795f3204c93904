"""Bytes per block and number of blocks that fit: the arithmetic of vLLM's cache engine and worker.

An article on vLLM v0 works an example (4 tokens, 4 layers, 8 KV heads of dimension 128, 2 bytes per element)
and finds 32,768 bytes. That leaves out one factor of two: with K *and* V, as in the formula it gives and in
vLLM's code, the block takes 65,536 bytes. 32,768 is its number of elements.
"""

from typing import Any

import numpy as np

GIB = 1 << 30  # bytes

# Bytes per element of the names that vLLM accepts and NumPy does not know.
_DTYPE_SIZES = {"bfloat16": 2, "float": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def get_dtype_size(dtype: Any) -> int:
    """Return the bytes per element of a NumPy dtype, or of a name such as "half", "bfloat16" or "fp8_e5m2".

    Raises: ValueError for a name that is neither vLLM's nor NumPy's.
    """
    if isinstance(dtype, str) and dtype in _DTYPE_SIZES:
        return _DTYPE_SIZES[dtype]
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        raise ValueError(f"{dtype=} must be a NumPy dtype or one of {sorted(_DTYPE_SIZES)}") from None


class CacheEngine:
    """A place for the block size, as in vLLM."""

    @staticmethod
    def get_cache_block_size(
        block_size: int,
        cache_dtype: str,
        num_layers: int,
        num_heads: int,
        head_size: int,
        model_dtype: Any = "half",
    ) -> int:
        """Return the bytes of one block over all layers.

        num_layers, num_heads, head_size: attention layers, KV heads and head dimension on this device.
        cache_dtype: the cache's dtype; "auto" means the model's.
        """
        key_cache_block = block_size * num_heads * head_size  # elements, in one layer
        value_cache_block = key_cache_block
        num_elements = num_layers * (key_cache_block + value_cache_block)
        return num_elements * get_dtype_size(model_dtype if cache_dtype == "auto" else cache_dtype)


def num_available_blocks(
    free_gpu_memory: int,
    total_gpu_memory: int,
    cache_block_size: int,
    gpu_memory_utilization: float = 0.9,
    cpu_swap_space: int = 4 * GIB,
    init_gpu_memory: int | None = None,
) -> tuple[int, int]:
    """Return the (GPU, CPU) blocks that fit once a trial run has shown the memory the model needs.

    The cache gets what the peak leaves of `gpu_memory_utilization * total_gpu_memory`. Sizes are in bytes; no
    number returned is negative.

    free_gpu_memory: free after the trial run.
    init_gpu_memory: free before the model was loaded; the peak is counted from there, or from the GPU's total
        when it is None, as in vLLM 0.3.
    """
    peak_memory = (total_gpu_memory if init_gpu_memory is None else init_gpu_memory) - free_gpu_memory
    num_gpu_blocks = int((total_gpu_memory * gpu_memory_utilization - peak_memory) // cache_block_size)
    num_cpu_blocks = int(cpu_swap_space // cache_block_size)
    return max(num_gpu_blocks, 0), max(num_cpu_blocks, 0)
