"""Pools of blocks for decode attention, in the shapes of well-known models; how fast memory is read."""

import dataclasses
import time

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

    def queries(self, num_seqs: int) -> jax.Array:
        """[num_seqs, num_q_heads, head_dim] normal values."""
        return jax.random.normal(
            jax.random.key(3), (num_seqs, self.num_q_heads, self.k.shape[3]), jnp.bfloat16
        )

    def tables(self, num_seqs: int, max_blocks: int, count: int) -> jax.Array:
        """[count, num_seqs, max_blocks] block ids drawn from the whole pool."""
        shape = (count, num_seqs, max_blocks)
        return jax.random.randint(jax.random.key(2), shape, 1, self.k.shape[0], jnp.int32)

    def bytes_read(self, lens: np.ndarray) -> int:
        """K and V of so many tokens a row, once."""
        return int(lens.astype(np.int64).sum()) * 2 * self.k[0, 0].size * self.k.dtype.itemsize


def create(model: str, cache_dtype: str, block_size: int, num_bytes: int) -> Pool:
    """Blocks to fill so many bytes, K and V together, made on the device."""
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


def read_bandwidth(num_bytes: int) -> float:
    """Bytes per second of summing up a buffer of that size."""
    x = jnp.ones((max(1, num_bytes // 8), 2), jnp.float32)

    @jax.jit
    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(x)

    total(x).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        total(x).block_until_ready()
        times.append(time.perf_counter() - start)
    return x.nbytes / min(times)
