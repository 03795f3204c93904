"""Peers of our attention, measured on a GPU in the same shapes.

    python -m benchmarks.attention_peers --what decode --of jax     or prompts, and torch
    python -m benchmarks.attention_peers --what decode --smoke      tiny, on a CPU

JSON lines, one a case and peer. Each gets the same lengths, and blocks drawn from a pool of the same size.
Peers without block tables get K and V gathered beforehand and padded to the longest row; the gathering is not
counted. All are timed by the device, as ours are: JAX's as `benchmarks.device` says, PyTorch's by its
profiler, which asks the same CUPTI. A peer that is not installed, or fails, is named with the reason and
without a time. Those of JAX and those of PyTorch are asked for in processes of their own, for either's
profiler wants the GPU for itself.

FlashInfer and FlashAttention 3 (`flash_attn_interface`) may lie in a folder that PYTHONPATH names.
"""

import functools
import importlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import attention_pool, device, record
from benchmarks.attention_pool import Pool, Prompt
from benchmarks.device import Times

_WHAT = flags.DEFINE_enum("what", "decode", ["decode", "prompts"], "Of which table.")
_OF = flags.DEFINE_multi_enum("of", ["jax", "torch"], ["jax", "torch"], "Whose: may be given twice.")
_BUDGET = flags.DEFINE_float("budget", 60, "Seconds in which measurements begin.")
_SMOKE = flags.DEFINE_boolean("smoke", False, "Tiny sizes, on a CPU.")
_OUT = flags.DEFINE_string("out", None, "Append one JSON line per measurement to this file.")

MODEL = "llama-3-8b"
BLOCK_SIZE = 16
GATHERED_BYTES = 8 * 10**9  # at most, for peers that need K and V gathered
REPEATS = 5


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    budget = record.Budget(_BUDGET.value)
    smoke, what = _SMOKE.value, _WHAT.value
    results = record.Results("attention_peers", _OUT.value, short=True, **device.described(smoke))
    pool = attention_pool.create(MODEL, "bfloat16", BLOCK_SIZE, (20 if smoke else 4000) * 10**6)
    cases: Sequence[Any] = attention_pool.DECODE_CASES if what == "decode" else attention_pool.PROMPTS
    if smoke:
        cases = [(2, 40)] if what == "decode" else [Prompt(0, 8)]
    repeats = 1 if smoke else REPEATS
    for case, (whose, peer) in itertools.product(cases, PEERS[what]):
        if whose not in _OF.value:
            continue
        if budget.is_spent():
            break
        line = {"what": peer.__name__.replace("_", " "), "model": MODEL} | _shape(case)
        try:
            line |= _measured(peer(pool, case, repeats), pool, case)
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            line |= {"skipped": f"{type(error).__name__}: {reason[0][:200]}"}
        results.put(line)


def _shape(case: Any) -> dict[str, int]:
    return case._asdict() if isinstance(case, Prompt) else {"num_seqs": case[0], "context": case[1]}


def _measured(took: Times, pool: Pool, case: Any) -> dict[str, Any]:
    line = {"us": round(took.median * 1e6, 2), "spread_us": round(took.spread * 1e6, 2), "clock": took.clock}
    if isinstance(case, Prompt):
        rate = case.flops(pool.num_q_heads, pool.k.shape[3]) / took.median
        return line | {
            "tflops": round(rate / 1e12, 2),
            **device.peak().share_of_flops(rate),
        }
    rate = pool.bytes_read(np.full(*case)) / took.median
    return line | {
        "gb_per_s": round(rate / 1e9, 1),
        **device.peak().share_of_bytes(rate),
    }


def _time_torch(run: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], repeats: int) -> Times:
    """Time PyTorch as `device.times` times JAX."""
    torch = _module("torch")
    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    activity = torch.profiler.ProfilerActivity
    run(*arguments[0])
    seconds, clock = [], "trace" if on_gpu else "host"
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as traced:
            for one in arguments:
                run(*one)
            wait()
        took = time.perf_counter() - start
        if on_gpu:
            took = sum(event.self_device_time_total for event in traced.key_averages()) / 1e6
            if not took:
                raise RuntimeError("PyTorch's profiler saw no kernel")
        seconds.append(took / len(arguments))
    return Times(tuple(seconds), clock)


def _module(name: str) -> Any:
    """Import an optional package; ImportError says which."""
    return importlib.import_module(name)


def _device() -> str:
    return "cuda" if _module("torch").cuda.is_available() else "cpu"


def _num_sets(num_tokens: int, pool: Pool) -> int:
    """Return the number of sets of gathered K and V: enough to leave the L2, few enough for the memory."""
    set_bytes = pool.bytes_read(np.array([num_tokens]))
    if 2 * set_bytes > GATHERED_BYTES:
        raise MemoryError(f"gathered K and V would take {2 * set_bytes / 1e9:.0f} GB")
    return int(max(2, min(32, 5 * 10**8 // set_bytes)))


def _blocks(pool: Pool, num_tokens: int) -> int:
    return -(-num_tokens // pool.block_size)


# Of decode steps: rows of one length.


def jax_pallas_triton(pool: Pool, case: tuple[int, int], repeats: int) -> Times:
    """Run JAX's own Pallas Triton kernel, deprecated."""
    from jax.experimental.pallas.ops.gpu import paged_attention as triton

    num_seqs, tokens = case
    splits = 16 if _blocks(pool, tokens) >= 128 else 1
    blocks = -(-_blocks(pool, tokens) // (8 * splits)) * 8 * splits
    pages = [jnp.transpose(cache, (2, 0, 1, 3)) for cache in (pool.k, pool.v)]
    q, lens = pool.queries(num_seqs), jnp.full(num_seqs, tokens, jnp.int32)

    def run(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lens: jax.Array) -> jax.Array:
        return triton.paged_attention(q, k, v, table, lens, k_splits=splits)

    return device.times(
        jax.jit(run), [(q, *pages, t, lens) for t in pool.tables(num_seqs, blocks, 16)], repeats
    )


def jax_dot_product_attention_gathered(pool: Pool, case: tuple[int, int], repeats: int) -> Times:
    """Run jax.nn.dot_product_attention: cuDNN on a GPU, XLA elsewhere."""
    num_seqs, tokens = case
    q = pool.queries(num_seqs)[:, None]
    lens = jnp.full(num_seqs, tokens, jnp.int32)
    return _dot_product(pool, q, num_seqs, tokens, repeats, key_value_seq_lengths=lens)


def torch_sdpa_gathered(pool: Pool, case: tuple[int, int], repeats: int) -> Times:
    """Run PyTorch's scaled_dot_product_attention."""
    return _sdpa(pool, case[0], 1, case[1], repeats)


def torch_flex_attention(pool: Pool, case: tuple[int, int], repeats: int) -> Times:
    """Run PyTorch's flex_attention over one physical cache, with a mask that knows each block's sequence."""
    torch, flex = _module("torch"), _module("torch.nn.attention.flex_attention")
    num_seqs, tokens = case
    on, total = _device(), num_seqs * tokens
    if num_seqs * total > 2**31:
        raise MemoryError("the mask would have too many entries")
    owner = torch.arange(total, device=on) // tokens

    def mask(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return owner[key] == batch

    block_mask = flex.create_block_mask(mask, num_seqs, None, 1, total, device=on)
    num_kv_heads, head_dim = pool.k.shape[2:]
    q = torch.randn(num_seqs, pool.num_q_heads, 1, head_dim, dtype=torch.bfloat16, device=on)
    cache = [torch.randn(1, num_kv_heads, total, head_dim, dtype=torch.bfloat16, device=on) for _ in range(2)]
    compiled = torch.compile(flex.flex_attention)

    def run(q: Any, k: Any, v: Any) -> Any:
        shared = [x.expand(num_seqs, -1, -1, -1) for x in (k, v)]
        return compiled(q, *shared, block_mask=block_mask, enable_gqa=True)

    return _time_torch(run, [(q, *cache)] * 2, repeats)


def flashinfer_decode(pool: Pool, case: tuple[int, int], repeats: int) -> Times:
    """Run FlashInfer's batch decode with tensor cores; its plan is not counted."""
    flashinfer, torch = _module("flashinfer"), _module("torch")
    num_seqs, tokens = case
    num_kv_heads, head_dim = pool.k.shape[2:]
    cache, pages = _torch_pages(pool)
    q = torch.randn(num_seqs, pool.num_q_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    indptr, last = _torch_bounds(pool, num_seqs, tokens)
    sets = []
    for _ in range(8):
        workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            indptr, pages(num_seqs, tokens).flatten(), last, q.shape[1], num_kv_heads, head_dim,
            pool.block_size, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        sets.append((wrapper,))
    return _time_torch(lambda wrapper: wrapper.run(q, cache), sets, repeats)


def flash_attention_3(pool: Pool, case: tuple[int, int] | Prompt, repeats: int) -> Times:
    """Run FlashAttention 3 over a paged cache, for decode steps and for prompts."""
    flash, torch = _module("flash_attn_interface"), _module("torch")
    if torch.cuda.get_device_capability()[0] != 9:
        raise RuntimeError("FlashAttention 3 serves Hopper GPUs alone")
    if isinstance(case, Prompt):
        num_seqs, query_len, tokens = 1, case.length, case.prefix + case.length
    else:
        (num_seqs, tokens), query_len = case, 1
    (k, v), pages = _torch_pages(pool)
    shape = (num_seqs, query_len, pool.num_q_heads, k.shape[3])
    q = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    lens = torch.full((num_seqs,), tokens, dtype=torch.int32, device="cuda")

    def run(table: Any) -> Any:
        return flash.flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, page_table=table, causal=True)

    return _time_torch(run, [(pages(num_seqs, tokens),) for _ in range(8)], repeats)


# Of prompts: one sequence.


def jax_dot_product_attention_prompt(pool: Pool, case: Prompt, repeats: int) -> Times:
    """Run jax.nn.dot_product_attention over contiguous K and V; its causal mask knows no prefix."""
    _need_no_prefix(case)
    return _dot_product(pool, pool.queries(1, case.length), 1, case.length, repeats, is_causal=True)


def jax_mosaic_attention(pool: Pool, case: Prompt, repeats: int) -> Times:
    """Run JAX's own Mosaic kernel over contiguous K and V; its causal mask knows no prefix."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu as mgpu

    _need_no_prefix(case)
    tile = mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2, causal=True)
    run = jax.jit(functools.partial(mgpu.attention, config=tile))
    q = pool.queries(1, case.length)
    return device.times(run, [(q, *_gathered(pool, 1, case.length, i)) for i in range(2)], repeats)


def torch_sdpa_prompt(pool: Pool, case: Prompt, repeats: int) -> Times:
    """Run PyTorch's scaled_dot_product_attention over contiguous K and V, causal."""
    return _sdpa(pool, 1, case.length, case.prefix + case.length, repeats)


def flashinfer_prefill(pool: Pool, case: Prompt, repeats: int) -> Times:
    """Run FlashInfer's batch prefill over a paged cache; its plan is not counted."""
    flashinfer, torch = _module("flashinfer"), _module("torch")
    tokens = case.prefix + case.length
    num_kv_heads, head_dim = pool.k.shape[2:]
    cache, pages = _torch_pages(pool)
    q = torch.randn(case.length, pool.num_q_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    indptr, last = _torch_bounds(pool, 1, tokens)
    queries = torch.tensor([0, case.length], dtype=torch.int32, device="cuda")
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        queries, indptr, pages(1, tokens).flatten(), last, q.shape[1], num_kv_heads, head_dim,
        pool.block_size, causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return _time_torch(lambda: wrapper.run(q, cache), [()] * 2, repeats)


def _need_no_prefix(case: Prompt) -> None:
    if case.prefix:
        raise NotImplementedError(f"prefix={case.prefix} must be 0")


def _gathered(pool: Pool, num_seqs: int, tokens: int, number: int) -> tuple[jax.Array, jax.Array]:
    """Return K and V of rows of one length, [num_seqs, tokens, num_kv_heads, head_dim]."""
    table = pool.table(num_seqs, _blocks(pool, tokens), number)
    k, v = (c[table].reshape(num_seqs, -1, *c.shape[2:])[:, :tokens] for c in (pool.k, pool.v))
    return k, v


def _dot_product(pool: Pool, q: jax.Array, num_seqs: int, tokens: int, repeats: int, **options: Any) -> Times:
    implementation: Any = "cudnn" if jax.devices()[0].platform == "gpu" else "xla"
    run = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation=implementation, **options))
    number = _num_sets(num_seqs * tokens, pool)
    return device.times(run, [(q, *_gathered(pool, num_seqs, tokens, i)) for i in range(number)], repeats)


def _sdpa(pool: Pool, num_seqs: int, query_len: int, tokens: int, repeats: int) -> Times:
    torch, bias = _module("torch"), _module("torch.nn.attention.bias")
    num_kv_heads, head_dim = pool.k.shape[2:]

    def random(heads: int, tokens: int) -> Any:
        return torch.randn(num_seqs, heads, tokens, head_dim, dtype=torch.bfloat16, device=_device())

    is_causal = 1 < query_len == tokens
    mask = bias.causal_lower_right(query_len, tokens) if 1 < query_len < tokens else None

    def run(q: Any, k: Any, v: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=True)

    q = random(pool.num_q_heads, query_len)
    number = _num_sets(num_seqs * tokens, pool)
    return _time_torch(
        run, [(q, *(random(num_kv_heads, tokens) for _ in range(2))) for _ in range(number)], repeats
    )


def _torch_pages(pool: Pool) -> tuple[tuple[Any, Any], Callable[[int, int], Any]]:
    """Return K and V of a pool as large as ours, and a function that draws tables of its pages."""
    torch = _module("torch")
    k, v = (torch.randn(pool.k.shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def pages(num_seqs: int, tokens: int) -> Any:
        shape = (num_seqs, _blocks(pool, tokens))
        return torch.randint(1, k.shape[0], shape, dtype=torch.int32, device="cuda")

    return (k, v), pages


def _torch_bounds(pool: Pool, num_seqs: int, tokens: int) -> tuple[Any, Any]:
    """Return FlashInfer's bounds of rows of one length: each one's first page, and its last page's tokens."""
    torch, blocks = _module("torch"), _blocks(pool, tokens)
    indptr = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * blocks
    last = tokens - (blocks - 1) * pool.block_size
    return indptr, torch.full((num_seqs,), last, dtype=torch.int32, device="cuda")


Peer = Callable[[Pool, Any, int], Times]
PEERS: dict[str, list[tuple[str, Peer]]] = {
    "decode": [
        ("jax", jax_pallas_triton),
        ("jax", jax_dot_product_attention_gathered),
        ("torch", flashinfer_decode),
        ("torch", flash_attention_3),
        ("torch", torch_sdpa_gathered),
        ("torch", torch_flex_attention),
    ],
    "prompts": [
        ("jax", jax_mosaic_attention),
        ("jax", jax_dot_product_attention_prompt),
        ("torch", flashinfer_prefill),
        ("torch", flash_attention_3),
        ("torch", torch_sdpa_prompt),
    ],
}


if __name__ == "__main__":
    app.run(main)
