"""What others do in place of our decode attention, measured on the same pool: for `decode_attention`.

Each peer gets the same lengths, and blocks drawn from a pool of the same size. Peers without block tables
get K and V gathered beforehand and padded to the longest row; the gathering is not counted. A peer that is
not installed, or fails, is reported with the reason and without a time.
"""

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode_pool import Pool

Result = tuple[str, float | None, float, str]  # name, seconds (None: not measured), spread, note
GATHERED_BYTES = 8 * 10**9  # at most, for peers that need K and V gathered


def measure(pool: Pool, lens: np.ndarray, repeats: int) -> Iterator[Result]:
    """Every peer in turn. The pool is in bfloat16."""
    for name, peer in PEERS.items():
        try:
            seconds, spread = peer(pool, lens, repeats)
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            yield name, None, 0.0, f"{type(error).__name__}: {reason[0][:200]}"
        else:
            yield name, seconds, spread, ""


def _time_jax(run: Callable[..., Any], arguments: list[tuple[Any, ...]], repeats: int) -> tuple[float, float]:
    """One call after the other over rotating arguments, without waiting in between."""
    jitted = jax.jit(run)
    jax.block_until_ready(jitted(*arguments[0]))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for one in arguments:
            out = jitted(*one)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / len(arguments))
    return statistics.median(times), max(times) - min(times)


def _time_torch(
    run: Callable[..., Any], arguments: list[tuple[Any, ...]], repeats: int
) -> tuple[float, float]:
    torch = _module("torch")

    run(*arguments[0])
    times = []
    on_gpu = torch.cuda.is_available()
    for _ in range(repeats):
        if on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
        start = time.perf_counter()
        for one in arguments:
            run(*one)
        seconds = time.perf_counter() - start
        if on_gpu:
            end.record()
            torch.cuda.synchronize()
            seconds = begin.elapsed_time(end) / 1000
        times.append(seconds / len(arguments))
    return statistics.median(times), max(times) - min(times)


def _module(name: str) -> Any:
    """An optional package; ImportError says which."""
    return importlib.import_module(name)


def _rotations(pool: Pool, lens: np.ndarray, gathered: bool) -> tuple[int, int]:
    """(sets of arguments, blocks per row): enough sets to leave the L2, few enough for the memory."""
    blocks = -(-int(lens.max()) // pool.block_size)
    block_bytes = 2 * pool.k.nbytes // pool.k.shape[0]
    set_bytes = len(lens) * blocks * block_bytes
    if gathered and set_bytes > GATHERED_BYTES:
        raise MemoryError(f"gathered K and V would take {set_bytes / 1e9:.0f} GB")
    enough = 5 * 10**8 // set_bytes + 1
    return int(min(32, max(2, enough), max(2, GATHERED_BYTES // set_bytes) if gathered else 32)), blocks


def _tables(pool: Pool, num_seqs: int, blocks: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.integers(1, pool.k.shape[0], (num_seqs, blocks), np.int32) for _ in range(count)]


def jax_triton(pool: Pool, lens: np.ndarray, repeats: int) -> tuple[float, float]:
    """JAX's own Pallas Triton kernel, deprecated."""
    from jax.experimental.pallas.ops.gpu import paged_attention as triton

    count, blocks = _rotations(pool, lens, gathered=False)
    splits = 16 if blocks >= 128 else 1
    blocks = -(-blocks // (8 * splits)) * 8 * splits
    pages = [jnp.transpose(cache, (2, 0, 1, 3)) for cache in (pool.k, pool.v)]
    q = pool.queries(len(lens))

    def run(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lens: jax.Array) -> jax.Array:
        return triton.paged_attention(q, k, v, table, lens, k_splits=splits)

    sets = [(q, *pages, jnp.asarray(t), jnp.asarray(lens)) for t in _tables(pool, len(lens), blocks, count)]
    return _time_jax(run, sets, repeats)


def jax_dot_product_attention(pool: Pool, lens: np.ndarray, repeats: int) -> tuple[float, float]:
    """jax.nn.dot_product_attention over gathered K and V: cuDNN on a GPU, XLA elsewhere."""
    count, blocks = _rotations(pool, lens, gathered=True)
    q = pool.queries(len(lens))[:, None]
    implementation: Any = "cudnn" if jax.devices()[0].platform == "gpu" else "xla"

    def gathered(cache: jax.Array, table: np.ndarray) -> jax.Array:
        return cache[jnp.asarray(table)].reshape(len(lens), -1, *cache.shape[2:])

    def run(q: jax.Array, k: jax.Array, v: jax.Array, lens: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=lens, implementation=implementation
        )

    sets = [
        (q, gathered(pool.k, t), gathered(pool.v, t), jnp.asarray(lens))
        for t in _tables(pool, len(lens), blocks, count)
    ]
    return _time_jax(run, sets, repeats)


def torch_sdpa(pool: Pool, lens: np.ndarray, repeats: int) -> tuple[float, float]:
    """PyTorch's scaled_dot_product_attention over gathered K and V; rows of one length need no mask."""
    torch = _module("torch")

    if len(set(lens.tolist())) > 1:
        raise ValueError("rows of different lengths would need a mask")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count, _ = _rotations(pool, lens, gathered=True)
    num_kv_heads, head_dim = pool.k.shape[2:]
    tokens = int(lens[0])

    def random(heads: int, tokens: int) -> Any:
        return torch.randn(len(lens), heads, tokens, head_dim, dtype=torch.bfloat16, device=device)

    def run(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q = random(pool.num_q_heads, 1)
    sets = [(q, random(num_kv_heads, tokens), random(num_kv_heads, tokens)) for _ in range(count)]
    return _time_torch(run, sets, repeats)


def torch_flex_attention(pool: Pool, lens: np.ndarray, repeats: int) -> tuple[float, float]:
    """PyTorch's flex_attention over one physical cache, with a mask that knows whose each block is."""
    torch, flex = _module("torch"), _module("torch.nn.attention.flex_attention")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_kv_heads, head_dim = pool.k.shape[2:]
    num_seqs, tokens = len(lens), int(lens.max())
    total = num_seqs * tokens
    owner = torch.arange(total, device=device) // tokens
    position = torch.arange(total, device=device) % tokens
    limit = torch.as_tensor(lens, device=device)

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (owner[key] == batch) & (position[key] < limit[batch])

    block_mask = flex.create_block_mask(mask, num_seqs, None, 1, total, device=device)
    q = torch.randn(num_seqs, pool.num_q_heads, 1, head_dim, dtype=torch.bfloat16, device=device)
    cache = [
        torch.randn(1, num_kv_heads, total, head_dim, dtype=torch.bfloat16, device=device) for _ in range(2)
    ]
    compiled = torch.compile(flex.flex_attention)

    def run(q: Any, k: Any, v: Any) -> Any:
        shared = [x.expand(num_seqs, -1, -1, -1) for x in (k, v)]
        return compiled(q, *shared, block_mask=block_mask, enable_gqa=True)

    return _time_torch(run, [(q, *cache)] * 2, repeats)


def flashinfer_decode(pool: Pool, lens: np.ndarray, repeats: int) -> tuple[float, float]:
    """FlashInfer's batch decode over a paged cache; its plan is not counted."""
    flashinfer, torch = _module("flashinfer"), _module("torch")

    count, _ = _rotations(pool, lens, gathered=False)
    num_kv_heads, head_dim = pool.k.shape[2:]
    num_blocks = min(pool.k.shape[0], 4 * 10**9 // (pool.block_size * num_kv_heads * head_dim * 4))
    shape = (num_blocks, pool.block_size, num_kv_heads, head_dim)
    cache = tuple(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(len(lens), pool.num_q_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    held = -(-lens // pool.block_size)
    indptr = torch.as_tensor(np.concatenate([[0], np.cumsum(held)]).astype(np.int32), device="cuda")
    last = torch.as_tensor((lens - (held - 1) * pool.block_size).astype(np.int32), device="cuda")
    sets = []
    for _ in range(min(count, 8)):
        workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        indices = torch.randint(0, num_blocks, (int(held.sum()),), dtype=torch.int32, device="cuda")
        wrapper.plan(
            indptr, indices, last, q.shape[1], num_kv_heads, head_dim, pool.block_size,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        sets.append((wrapper,))
    return _time_torch(lambda wrapper: wrapper.run(q, cache), sets, repeats)


PEERS: dict[str, Callable[[Pool, np.ndarray, int], tuple[float, float]]] = {
    "jax pallas triton": jax_triton,
    "jax dot_product_attention, gathered": jax_dot_product_attention,
    "torch sdpa, gathered": torch_sdpa,
    "torch flex_attention, paged mask": torch_flex_attention,
    "flashinfer batch decode": flashinfer_decode,
}
