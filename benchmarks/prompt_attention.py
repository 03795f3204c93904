"""Attention of prompts on a GPU: correctness first, then microseconds, TFLOP/s and the share of what can be.

    python -m benchmarks.prompt_attention --out results.jsonl     prompts alone and behind long prefixes
    python -m benchmarks.prompt_attention --smoke                 one, tiny, on a CPU

The engine's tiles over a paged cache, as `attention_pool.PROMPTS` says, by our kernel and by XLA. Each
program is compared with float64 in a few places, then timed as `benchmarks.device` says. Operations are those
of both products for the tokens that a query sees; `share_of_790_tflops` is of what a large product reaches on
an H200. `benchmarks.attention_peers` has the peers'.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import attention_pool, device, record
from benchmarks.attention_pool import Pool, Prompt
from pallas_kernels import ops
from pallas_kernels.ops import ragged

_SMOKE = flags.DEFINE_boolean("smoke", False, "One tiny prompt, in the interpreter.")
_BUDGET = flags.DEFINE_float("budget", 200, "Seconds in which measurements begin.")
_OUT = flags.DEFINE_string("out", None, "Append one JSON line per measurement to this file.")

KERNEL = "prompt_attention_kernel"
MODELS = ("llama-3-8b", "llama-70b/8", "mha-32")
SMOKE, SMOKE_POOLS = Prompt(prefix=40, length=40), [("llama-70b/8", "bfloat16")]


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    budget = record.Budget(_BUDGET.value)
    smoke = _SMOKE.value
    results = record.Results("prompt_attention", _OUT.value, short=True, **device.described(smoke))
    num_wrong = 0
    for line in lines(smoke):
        results.put(line)
        num_wrong += not line["ok"]
        if budget.is_spent():
            break
    if num_wrong:
        raise SystemExit(f"{num_wrong} of the lines above are not ok")


def lines(smoke: bool) -> Iterator[dict[str, Any]]:
    """Return a line for each model, prompt and implementation, the first model's first."""
    prompts = (SMOKE,) if smoke else attention_pool.PROMPTS
    pools = [(model, "bfloat16") for model in MODELS]
    pools.insert(1, (MODELS[0], "float8_e4m3fn"))
    for model, cache_dtype in SMOKE_POOLS if smoke else pools:
        pool = attention_pool.create(model, cache_dtype, 16, 2 * 10**6 if smoke else 4 * 10**9)
        for prompt in prompts:
            for implementation in ("mosaic_gpu", "xla"):
                line = {"what": implementation, "model": model, "cache": cache_dtype, **prompt._asdict()}
                try:
                    yield line | measure(pool, prompt, implementation, smoke)
                except Exception as error:  # of the compiler, say: the other cases are of interest still
                    yield line | {"ok": False, "raised": f"{type(error).__name__}: {str(error)[:300]}"}


def measure(pool: Pool, prompt: Prompt, implementation: Any, smoke: bool) -> dict[str, Any]:
    """Compile, compare, and time."""
    scale = pool.k.shape[3] ** -0.5
    is_kernel = implementation == "mosaic_gpu"
    options: dict[str, Any] = {"scale": scale, "interpret": smoke and is_kernel, **pool.scales}
    operation = functools.partial(ops.tiled_paged_attention, **options, implementation=implementation)
    sets = list(arguments(pool, prompt, 1 if smoke else 2))
    program = jax.jit(operation).lower(*sets[0]).compile()
    found = check(np.asarray(program(*sets[0]), np.float64), pool, prompt, *sets[0])
    took = device.times(program, sets, 1 if smoke else 7 if is_kernel else 2, KERNEL if is_kernel else "")
    return found | measured(took, pool, prompt)


def arguments(pool: Pool, prompt: Prompt, count: int) -> Iterator[tuple[jax.Array, ...]]:
    """Yield arguments of `ops.tiled_paged_attention` for a prompt, `count` times in other blocks."""
    tile_len, total = ragged.TILE_LEN, prompt.prefix + prompt.length
    num_tiles = -(-prompt.length // tile_len)
    q = pool.queries(num_tiles, tile_len)
    starts = prompt.prefix + tile_len * jnp.arange(num_tiles, dtype=jnp.int32)
    seq_lens = jnp.full(num_tiles, total, jnp.int32)
    for table in pool.tables(1, -(-total // pool.block_size), count):
        yield q, pool.k, pool.v, jnp.broadcast_to(table, (num_tiles, table.shape[1])), starts, seq_lens


def check(got: np.ndarray, pool: Pool, prompt: Prompt, *arrays: jax.Array) -> dict[str, Any]:
    """Compare the first, middle and last query of a prompt with float64, in the heads of one group."""
    q, _, _, tables, _, _ = arrays
    heads, want = slice(0, pool.group_size), []
    places = [divmod(query, q.shape[1]) for query in (0, prompt.length // 2, prompt.length - 1)]
    k, v, _ = pool.read(tables[0])
    k, v = (x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (k, v))
    for tile, token in places:
        upto = prompt.prefix + tile * q.shape[1] + token + 1
        scores = np.asarray(q[tile, token, heads], np.float64) @ k[:upto].T * k.shape[1] ** -0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        want.append(weights / weights.sum(axis=1, keepdims=True) @ v[:upto])
    return attention_pool.verdict(np.stack([got[place][heads] for place in places]), np.stack(want))


def measured(took: device.Times, pool: Pool, prompt: Prompt) -> dict[str, Any]:
    """Return the numbers of one measurement."""
    flops = prompt.flops(pool.num_q_heads, pool.k.shape[3])
    return {
        **took.line,
        "tflops": round(flops / took.median / 1e12, 2),
        **device.peak().share_of_flops(flops / took.median),
    }


if __name__ == "__main__":
    app.run(main)
