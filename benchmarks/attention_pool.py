"""Pools of blocks in the shapes of well-known models, and what of attention is measured on them."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import support

MODELS = {  # query heads, kv heads, head_dim
    "llama-3-8b": (32, 8, 128),
    "llama-70b/8": (8, 1, 128),
    "qwen3-64": (64, 8, 128),
    "mha-32": (32, 32, 128),
}
# Where decode attention meets its peers: rows, tokens in the cache of each.
DECODE_CASES = ((256, 1126), (1, 32768), (32, 8192), (64, 2048), (8, 1024))


class Prompt(NamedTuple):
    """Queries that are the last tokens of one sequence."""

    prefix: int  # tokens in the cache before them
    length: int

    def flops(self, num_q_heads: int, head_dim: int) -> int:
        """Return the operations of both products, for the tokens that each query sees."""
        seen = self.prefix * self.length + self.length * (self.length + 1) // 2
        return 4 * num_q_heads * head_dim * seen


# Alone, and a step's chunk of 2,048 behind a long prefix.
PROMPTS = tuple(Prompt(*sizes) for sizes in ((0, 8192), (30720, 2048), (0, 1024), (0, 32768), (129024, 2048)))


@dataclasses.dataclass(frozen=True)
class Pool:
    """Blocks of K and V in random content, token-major."""

    model: str
    cache_dtype: str
    block_size: int
    k: jax.Array
    v: jax.Array
    scales: dict[str, jax.Array]

    @property
    def num_q_heads(self) -> int:
        return MODELS[self.model][0]

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.k.shape[2]

    def queries(self, *rows: int) -> jax.Array:
        """Draw normal values, [*rows, num_q_heads, head_dim]."""
        return jax.random.normal(jax.random.key(3), (*rows, self.num_q_heads, self.k.shape[3]), jnp.bfloat16)

    def table(self, num_seqs: int, max_blocks: int, number: int = 0) -> jax.Array:
        """Draw [num_seqs, max_blocks] block ids from the whole pool: for each number others."""
        rng = np.random.default_rng(number)
        return jnp.asarray(rng.integers(1, self.k.shape[0], (num_seqs, max_blocks), np.int32))

    def tables(self, num_seqs: int, max_blocks: int, count: int) -> list[jax.Array]:
        """Return the first so many tables."""
        return [self.table(num_seqs, max_blocks, number) for number in range(count)]

    def read(self, table: jax.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copy K and V of the first kv head in a table's blocks to the host, with a table of these."""
        k, v = (np.asarray(cache[table.reshape(-1), :, :1]) for cache in (self.k, self.v))
        return k, v, np.arange(table.size).reshape(table.shape)

    def bytes_read(self, lens: np.ndarray) -> int:
        """Return the bytes of K and V of so many tokens a row, read once."""
        return int(lens.astype(np.int64).sum()) * 2 * self.k[0, 0].size * self.k.dtype.itemsize


def create(model: str, cache_dtype: str, block_size: int, num_bytes: int) -> Pool:
    """Make blocks that fill so many bytes, K and V together, on the device."""
    _, num_kv_heads, head_dim = MODELS[model]
    dtype = jnp.dtype(cache_dtype)
    num_blocks = num_bytes // (2 * block_size * num_kv_heads * head_dim * dtype.itemsize)
    shape = (num_blocks, block_size, num_kv_heads, head_dim)

    @jax.jit
    def fill(key: jax.Array) -> jax.Array:  # block by block: the generator's 32-bit numbers would not fit
        def one(_: None, key: jax.Array) -> tuple[None, jax.Array]:
            return None, jax.random.normal(key, shape[1:], jnp.bfloat16).astype(dtype)

        return lax.scan(one, None, jax.random.split(key, num_blocks))[1]

    scales = {}
    if cache_dtype in support.QUANTISED_DTYPES:
        scales = {name: jnp.float32(1) for name in ("k_scale", "v_scale")}
    k, v = fill(jax.random.key(0)), fill(jax.random.key(1))
    return Pool(model, cache_dtype, block_size, k, v, scales)


def verdict(got: np.ndarray, want: np.ndarray) -> dict[str, Any]:
    """Return the relative error, |got - want| / |want|. Bfloat16 is near 0.003; NaN is never ok."""
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return {"error": float(f"{error:.3g}"), "ok": error < 0.01}
