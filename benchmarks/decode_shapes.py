"""Decode steps of the whole engine with random weights in the shapes of well-known models.

    python -m benchmarks.decode_shapes [--out FILE] [--budget 400]    on a GPU
    python -m benchmarks.decode_shapes --smoke                        tiny shapes, anywhere

JSON lines on stdout, one a model and batch: tokens/s, beside the most that reading weights, K and V once
allows at the card's bandwidth (`floor_tokens_per_s`), and the shares of that and of the same at the bandwidth
measured here. The engine's own `loop.run` decodes `--context` tokens and more a row, ragged, with prefix
caching; `graph` is as in `benchmarks.step_overhead`. Weights, K and V are random and the answers nonsense;
the work is the real one.

A line says when a case begins, for compiling its loop takes longest: a minute or more for 32 layers. The
first cases are both models with 256 rows.

`qwen3-0.6b-shaped` is a Llama with the sizes of Qwen3-0.6B: without Qwen3's norms of queries and keys.
"""

import functools
import itertools
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from benchmarks import decode_loop, device, record
from benchmarks.llama import LLAMA_3_SCALING, llama_config
from jaxpaged.arithmetic import cdiv
from jaxpaged.config import EngineConfig
from jaxpaged.engine import gpu_flags
from jaxpaged.engine.setup import Setup, resolve_dtype
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.models import decoder
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.step.config import MAX_STEPS

MODELS = {
    "llama-3.1-8b-shaped": llama_config(
        32, 4096, 14336, num_q_heads=32, num_kv_heads=8, head_dim=128, theta=5e5, scaling=LLAMA_3_SCALING,
        vocab_size=128256, max_model_len=131072, tie_word_embeddings=False,
    ),
    "smollm2-135m-shaped": llama_config(
        30, 576, 1536, num_q_heads=9, num_kv_heads=3, head_dim=64, theta=1e5,
        vocab_size=49152, max_model_len=8192, tie_word_embeddings=True,
    ),
    "qwen3-0.6b-shaped": llama_config(
        28, 1024, 3072, num_q_heads=16, num_kv_heads=8, head_dim=128, theta=1e6, norm_eps=1e-6,
        vocab_size=151936, max_model_len=40960, tie_word_embeddings=True,
    ),
}  # fmt: skip
TINY = llama_config(
    2, 64, 128, num_q_heads=4, num_kv_heads=2, head_dim=16,
    vocab_size=256, max_model_len=512, tie_word_embeddings=True,
)  # fmt: skip
BATCHES = (256, 1, 32, 128)
WEIGHT_SCALE = 0.02


_MODELS = flags.DEFINE_multi_enum("models", list(MODELS), MODELS, "A model; may be given several times.")
_BATCHES = flags.DEFINE_multi_integer("batches", BATCHES, "A number of rows; may be given several times.")
_CONTEXT = flags.DEFINE_integer("context", 960, "Tokens a row has at least at first.")
_LOOP = flags.DEFINE_boolean("loop_over_layers", False, "As `EngineConfig` has it.")
_REPEATS = flags.DEFINE_integer("repeats", 5, f"Runs of {MAX_STEPS} steps.", lower_bound=1)
_BUDGET = flags.DEFINE_float("budget", 400, "Seconds after which no case begins.")
_SMOKE = flags.DEFINE_boolean("smoke", False, "One tiny model, two batches.")
_OUT = flags.DEFINE_string("out", None, "Append the lines to this file as well.")


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    budget = record.Budget(_BUDGET.value)
    gpu_flags.set_defaults()
    models: dict[str, ModelConfig] = {name: MODELS[name] for name in _MODELS.value}
    batches, context_len, repeats, num_bytes = _BATCHES.value, _CONTEXT.value, _REPEATS.value, 8 * 10**9
    if _SMOKE.value:
        models, batches, context_len, repeats, num_bytes = {"tiny": TINY}, [4], 64, 2, 2 * 10**6
    found = device.described(_SMOKE.value)
    bandwidth = device.read_bandwidth(num_bytes)
    found |= {"graph": decode_loop.has_flags(), "read_gb_per_s": round(bandwidth / 1e9, 1)}
    results = record.Results("decode_shapes", _OUT.value, short=True, **found)
    for batch, (name, config) in itertools.product(batches, models.items()):
        if budget.is_spent():
            break
        print(json.dumps({"model": name, "num_rows": batch, "what": "begins"}), flush=True)
        line = measure(random_model(config), batch, context_len, repeats, bandwidth)
        results.put({"model": name} | line)


def measure(model: Decoder, batch: int, context_len: int, repeats: int, bandwidth: float) -> dict[str, Any]:
    """Return the line of one model and batch."""
    start = time.perf_counter()
    c, dtype = model.config, model.dtype
    attention = Setup(EngineConfig(), c).attention
    assert isinstance(attention, str)
    max_model_len = context_len + decode_loop.BLOCK_SIZE + MAX_STEPS * (repeats + 2)
    # Beside the null block, and those that stay free, for all rows at their longest.
    num_blocks = 1 + math.ceil(1.02 * batch * cdiv(max_model_len, decode_loop.BLOCK_SIZE))
    seq_lens = [context_len + row % decode_loop.BLOCK_SIZE for row in range(batch)]
    loop = decode_loop.create(
        model,
        random_cache(model, num_blocks),
        num_blocks=num_blocks,
        seq_lens=seq_lens,
        max_model_len=max_model_len,
        prefix_caching=True,
        attention=attention,
    )
    loop.seconds_per_step()  # compiles
    seconds_to_start = time.perf_counter() - start
    loop.seconds_per_step()
    seconds = [loop.seconds_per_step() for _ in range(repeats)]

    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * dtype.itemsize
    num_seen = sum(seq_lens) + batch * MAX_STEPS * (2 + repeats / 2)  # in the middle of what was timed
    weight_bytes = read_weight_bytes(model)
    num_bytes = weight_bytes + num_seen * per_token
    ms = record.spread([s * 1e3 for s in seconds], digits=3)
    median = float(np.median(seconds))
    return {
        "dtype": str(dtype),
        "attention": attention,
        "loop_over_layers": model.form.loops,
        "num_rows": batch,
        "num_blocks": num_blocks,
        "tokens_a_row": round(num_seen / batch),
        "ms_per_step": ms,
        "tokens_per_s": round(batch / median, 1),
        "weight_bytes": weight_bytes,
        "kv_bytes": round(num_seen * per_token),
        "floor_tokens_per_s": round(batch * (device.peak().num_bytes or bandwidth) / num_bytes, 1),
        **device.peak().share_of_bytes(num_bytes / median),
        "share_of_measured_read": round(num_bytes / median / bandwidth, 4),
        "seconds_to_start": round(seconds_to_start, 1),
    }


def random_model(config: ModelConfig) -> Decoder:
    """Create a model with normal weights, on the device."""
    dtype = resolve_dtype(EngineConfig())
    graphdef, params = nnx.split(
        decoder.abstract(config, LoadAs(dtype, loop_over_layers=_LOOP.value or None))
    )
    return nnx.merge(graphdef, _random_like(params, seed=0))


def random_cache(model: Decoder, num_blocks: int) -> KVCache:
    """Create K and V of normal values: zeros would take less power than real ones, and so less time."""
    shapes = jax.eval_shape(lambda: model.create_cache(num_blocks, decode_loop.BLOCK_SIZE))
    return _random_like(shapes, seed=1)


def _random_like[T](shapes: T, seed: int) -> T:
    """Replace each shape by normal values."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    filled = [
        _normal(key, shape=leaf.shape, dtype=leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, filled)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, *, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return WEIGHT_SCALE * jax.random.normal(key, shape, dtype)


def read_weight_bytes(model: Decoder) -> int:
    """Return the bytes of weights that a step reads: next to nothing of an untied embedding table."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return total if model.config.tie_word_embeddings else total - model.embedding[...].nbytes


if __name__ == "__main__":
    app.run(main)
