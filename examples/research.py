"""Research: a block layout and an eviction policy of one's own, measured beside the built-in ones.

Run it from the checkout with `python -m examples.research`, or cell by cell in an editor. `--out` names the
folder for the pictures.
"""

# %% A layout: 8 bits a number, with one scale for all heads of a token. The built-in one has one a head.
import argparse
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from jaxpaged.memory import eviction
from jaxpaged.memory.ranked_queue import Ranking
from jaxpaged.research.lab import sweep, traces
from jaxpaged.research.lab.belady import LAB_POLICIES
from jaxpaged.research.lab.combination import Combination
from pallas_kernels.layouts import LAYOUTS, Layout, create, named

matplotlib.use("Agg")
import matplotlib.pyplot as plt

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="docs/drawings")
args, _ = parser.parse_known_args()


class OneScale(Layout):
    """K and V as int8, with a float32 scale for each token."""

    def arrays(self, num_blocks, block_size, num_kv_heads, head_dim, dtype):
        """Return the arrays of one layer: codes and scales of K and of V."""
        codes = jax.ShapeDtypeStruct((num_blocks, block_size, num_kv_heads, head_dim), jnp.int8)
        scales = jax.ShapeDtypeStruct((num_blocks, block_size), jnp.float32)
        return {"k": codes, "v": codes, "k_scale": scales, "v_scale": scales}

    def write(self, arrays, sizes, k, v, slots):
        """Return the arrays with tokens [num_tokens, num_kv_heads, head_dim] in their slots."""
        block, offset = jnp.divmod(slots, sizes.block_size)
        new = {}
        for name, x in (("k", k), ("v", v)):
            scale = jnp.maximum(jnp.abs(x).max((1, 2)), 1e-30).astype(jnp.float32) / 127
            codes = jnp.round(x.astype(jnp.float32) / scale[:, None, None]).astype(jnp.int8)
            new[name] = arrays[name].at[block, offset].set(codes)
            new[f"{name}_scale"] = arrays[f"{name}_scale"].at[block, offset].set(scale)
        return new

    def read(self, arrays, sizes, block_ids, dtype):
        """Return K and V of blocks [*n] as [*n, block_size, num_kv_heads, head_dim]."""
        k, v = (
            (arrays[name][block_ids] * arrays[f"{name}_scale"][block_ids][..., None, None]).astype(dtype)
            for name in "kv"
        )
        return k, v


# %% Write the same tokens in each layout, read them back, and compare bytes and errors.
rng = np.random.default_rng(0)
num_blocks, block_size, num_kv_heads, head_dim = 5, 64, 4, 64
heads = np.array([0.25, 0.5, 1, 4])[:, None]  # heads differ in size, as those of real models do
k, v = (jnp.asarray(heads * rng.standard_normal((256, num_kv_heads, head_dim)), jnp.float32) for _ in "kv")
slots = jnp.arange(block_size, block_size + 256, dtype=jnp.int32)
found = {}
for name, layout in {"one_scale": OneScale(), **{n: named(n) for n in LAYOUTS if n != "token"}}.items():
    pool = create(layout, num_blocks, block_size, num_kv_heads, head_dim, jnp.dtype("float32"))
    arrays = layout.write(pool.arrays, pool.sizes, k, v, slots)
    again, _ = layout.read(arrays, pool.sizes, jnp.arange(1, num_blocks), jnp.dtype("float32"))
    error = np.abs(again.reshape(k.shape) - k).mean((0, 2)) / np.abs(k).mean((0, 2))
    size = layout.block_bytes(block_size, num_kv_heads, head_dim, jnp.dtype("float32")) / block_size
    found[name] = (size, float(error.max()))
    print(f"{name:<16} {size:6.0f} bytes a token, error of the worst head {found[name][1]:.2%}")

figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
quantised = {name: point for name, point in found.items() if point[1] > 0}
for name, (size, error) in quantised.items():
    axes.scatter(size, 100 * error, label=name)
axes.set(xlabel="bytes a token of one layer", ylabel="mean error of the worst head, %", yscale="log")
axes.legend()
figure.savefig(f"{args.out}/research_layouts.png", dpi=110)

# %% A policy: the most recently used block goes first. Registered, it is a policy like any other.


def newest_first(queue, block_ids, is_first, now):
    """Rank freed blocks: the newest goes first."""
    return 0 * now, -now


LAB_POLICIES["mru"] = eviction.policy("mru", Ranking(newest_first))

# %% A trace: 12 conversations, whose turns repeat what was said and go on.
lines, histories = [], [[first] for first in range(12)]
next_id = 100
for number in range(400):
    history = histories[int(rng.zipf(1.5)) % len(histories)]
    history.append(next_id := next_id + 1)
    request = {"timestamp": 250 * number, "input_length": 64 * len(history), "output_length": 8}
    lines.append(request | {"hash_ids": list(history), "block_size": 64})
    if len(history) > 40:
        del history[1:]
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "trace.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    trace = traces.read(str(file))

# %% Send it through caches of several sizes, under several policies.
policies, cache_tokens = ("lru", "s3fifo", "mru", "belady"), (4096, 8192, 12288, 16384)
combinations = [Combination(p, trace.block_size, n) for p in policies for n in cache_tokens]
rates = {
    (r.combination.policy, r.combination.cache_tokens): r.hit_rate for r in sweep.sweep(trace, combinations)
}
figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
for policy in policies:
    axes.plot(cache_tokens, [rates[policy, n] for n in cache_tokens], marker="o", label=policy)
    print(policy, [f"{rates[policy, n]:.3f}" for n in cache_tokens])
axes.set(xlabel="tokens in the cache", ylabel="hit rate", ylim=(0, 1))
axes.legend()
figure.savefig(f"{args.out}/research_policies.png", dpi=110)
del LAB_POLICIES["mru"]
