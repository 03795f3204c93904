"""A layout of one's own: `python examples/my_layout.py` runs the layouts' tests and benchmark on it.

To serve a model with it: `LLM("smollm2", kv_layout="examples.my_layout:HalvesOfHeads")`.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import LAYOUTS, Layout

ROOT = Path(__file__).parents[1]


class HalvesOfHeads(Layout):
    """The first halves of all heads, then the second ones: what RoPE turns together lies apart.

    K and V are [num_blocks, 2, block_size, num_kv_heads, head_dim / 2].
    """

    def arrays(self, num_blocks, block_size, num_kv_heads, head_dim, dtype):
        """Return the shape and dtype of each array of one layer; num_blocks is its first axis."""
        spec = jax.ShapeDtypeStruct((num_blocks, 2, block_size, num_kv_heads, head_dim // 2), dtype)
        return {"k": spec, "v": spec}

    def write(self, arrays, sizes, k, v, slots):
        """Return the arrays with new tokens [num_tokens, num_kv_heads, head_dim] in their slots."""
        block, offset = jnp.divmod(slots, sizes.block_size)
        new = {}
        for name, x in (("k", k), ("v", v)):
            halves = x.reshape(*x.shape[:2], 2, -1).swapaxes(1, 2)  # [num_tokens, 2, num_kv_heads, half]
            new[name] = arrays[name].at[block, :, offset].set(halves.astype(arrays[name].dtype))
        return new

    def read(self, arrays, sizes, block_ids, dtype):
        """Return K and V of blocks [*n], each [*n, block_size, num_kv_heads, head_dim]."""
        shape = (*block_ids.shape, *sizes[1:])
        halves = (jnp.moveaxis(arrays[name][block_ids], -4, -2) for name in "kv")
        k, v = (x.reshape(shape).astype(dtype) for x in halves)
        return k, v

    def why_not(self, block_size, head_dim, dtype):
        """Return the rule that such blocks break; None if they break none."""
        return "head_dim must be even" if head_dim % 2 else None


def main() -> int:
    """Register the layout, then run the tests and the benchmark of all layouts on it."""
    import pytest

    sys.path.insert(0, str(ROOT))
    LAYOUTS["halves_of_heads"] = HalvesOfHeads()
    suites = [str(ROOT / "tests" / folder / "test_layouts.py") for folder in ("kernels", "engine")]
    if failed := pytest.main(["-q", "-n0", "-m", "", "-k", "halves_of_heads", *suites]):
        return failed
    from benchmarks import layouts

    return layouts.app.run(
        layouts.main, ["layouts", "--layouts=token_major,halves_of_heads", "--block_sizes=16", *sys.argv[1:]]
    )


if __name__ == "__main__":
    sys.exit(main())
