"""Cases for the layouts' tests: sizes that each layout supports, and its oracle, for all layouts of the
registry.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from pallas_kernels import layouts
from pallas_kernels.layouts import LAYOUTS, Layout, Sizes
from reference import layouts as reference
from reference.layouts import Oracle

HEAD_DIM = 16
NUM_HEADS = 2
# Two groups of tokens, or few tokens, or one: the first that the layout has blocks of.
BLOCK_SIZES = (4, 32, 1)
EACH = list(LAYOUTS)


def block_size_of(layout: Layout, candidates: tuple[int, ...] = BLOCK_SIZES, head_dim: int = HEAD_DIM) -> int:
    """Return the first of these sizes that the layout supports."""
    dtype = jnp.dtype("float32")
    return next(size for size in candidates if layout.why_not(size, head_dim, dtype) is None)


def sizes_of(layout: Layout, num_blocks: int = 9) -> Sizes:
    return Sizes(num_blocks, block_size_of(layout), NUM_HEADS, HEAD_DIM)


def empty(layout: Layout, sizes: Sizes) -> dict[str, np.ndarray]:
    """Return a layer's arrays before anything is written."""
    pool = layouts.create(layout, *sizes, jnp.dtype("float32"))
    return {name: np.array(array) for name, array in pool.arrays.items()}


def oracle(name: str, sizes: Sizes) -> Oracle | None:
    """Return the oracle of a registered layout; None for one from elsewhere, which only promises are checked
    of.
    """
    block = sizes[1:]
    ones = np.ones(sizes.num_kv_heads, np.float32)
    by_name = {
        "token_major": lambda: reference.plain(reference.token_major, *block),
        "token": lambda: reference.plain(reference.token, *block),
        "head_major": lambda: reference.plain(reference.head_major, *block),
        "fused": lambda: reference.plain(reference.fused, *block),
        "all_layers": lambda: reference.plain(reference.fused, *block),
        "split_x": lambda: reference.plain(reference.split_x, *block),
        "int8_per_token": lambda: reference.int8_per_token(reference.token_major, *block),
        "int4_grouped": lambda: reference.int4_grouped(*block),
        "fp8_e4m3": lambda: float8("fp8_e4m3", sizes, ones, ones),
        "fp8_e5m2": lambda: float8("fp8_e5m2", sizes, ones, ones),
    }
    return by_name[name]() if name in by_name else None


def by_itself(layout: Layout, sizes: Sizes) -> Oracle:
    """Return a layout from outside as an oracle: its own numbers, in a model that is not ours."""

    def write(
        arrays: dict[str, np.ndarray], k: np.ndarray, v: np.ndarray, slots: np.ndarray
    ) -> dict[str, np.ndarray]:
        arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
        for i in range(len(slots)):  # two tokens at least, and the second may be there twice
            its = (jnp.asarray(np.stack([x[i], x[i]]), jnp.float32) for x in (k, v))
            new = layout.write(arrays, sizes, *its, jnp.asarray([slots[i], slots[i]], jnp.int32))
            arrays = dict(new)
        return arrays

    def read(arrays: Mapping[str, np.ndarray], block: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = layout.read(arrays, sizes, jnp.asarray([block], jnp.int32), jnp.dtype("float32"))
        return np.asarray(k[0]), np.asarray(v[0])

    return Oracle(sizes.block_size, write, read)


def float8(cache_dtype: str, sizes: Sizes, k_scale: np.ndarray, v_scale: np.ndarray) -> Oracle:
    largest = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[cache_dtype]
    dtype = np.dtype(layouts.FP8_TYPES[cache_dtype])
    base = reference.plain(reference.token_major, *sizes[1:])
    return reference.float8(base, dtype, largest, k_scale, v_scale)
