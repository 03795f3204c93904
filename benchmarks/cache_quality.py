"""Loss of quality by keeping K and V, or weights, in fewer bits: `python -m benchmarks.cache_quality`.

    python -m benchmarks.cache_quality [--layouts fp8_e4m3,int8_per_token] [--tokens 20480] [--out FILE]
    python -m benchmarks.cache_quality --layouts int8_per_token,my_module:Mine --table mine   for a paper
    python -m benchmarks.cache_quality --quantizations gguf,int8,fp8,int4      of the weights, not the cache
    python -m benchmarks.cache_quality --model DIR --quantizations fp8,DIR-AWQ  and of quantised directories
    python -m benchmarks.cache_quality --smoke                   one short window

SmolLM2 in float32, on the text of Python's own language reference (`pydoc_data.topics`, which comes with
Python), in windows of 1,024 tokens. A JSON line for float32 throughout and one for each quantised layout of
the registry, or each way to quantise the weights, or directory that has them quantised: perplexity, and by
how much it is more; the mean Kullback-Leibler divergence, in nats, of the next token's distribution from
float32's; how many of 64 greedy tokens after each of 16 prompts agree until the first that does not, as a
share; tokens per second of these answers, all prompts together; bytes a token in all layers, and of the
weights; the relative error of K and V that are read; and which implementations of attention read the layout.
Prompts are computed as the engine does, in tiles of 32 tokens. --table writes PREFIX.csv, .md and .tex.
"""

import functools
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

import jaxpaged
from benchmarks import paper, record
from jaxpaged.arithmetic import cdiv
from jaxpaged.config import PREFILL_TILE
from jaxpaged.models import loading
from jaxpaged.models.attention import PassBatch
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.loading import Checkpoint
from pallas_kernels import layouts, native
from pallas_kernels.layouts import LAYOUTS, TOKEN_MAJOR, Layout
from pallas_kernels.ops import choice

_LAYOUTS = flags.DEFINE_list(
    "layouts", None, "Of the registry, or module:Name; default: the quantised ones of the registry."
)
_QUANTIZATIONS = flags.DEFINE_list(
    "quantizations", [], "Of the weights, as `LLM` takes them; or directories with the same model, quantised."
)
_TOKENS = flags.DEFINE_integer("tokens", 20 * 1024, "Of the text, in whole windows.", lower_bound=1024)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 64, "Tokens.")
_MODEL = flags.DEFINE_string("model", "smollm2", "As `LLM` takes it.")
_SMOKE = flags.DEFINE_boolean("smoke", False, "One window of 64 tokens, two prompts.")
_OUT = flags.DEFINE_string("out", None, "Append the lines to this file as well.")
_TABLE = flags.DEFINE_string("table", None, "Beginning of the names of three files with a table.")

WINDOW = 1024
NUM_PROMPTS, PROMPT_LEN, NUM_NEW = 16, 64, 64
DTYPE = jnp.dtype("float32")


def main(argv: list[str]) -> None:
    """Measure, and print the lines."""
    record.start(argv)
    checkpoint = loading.open_checkpoint(_MODEL.value)
    window, num_windows = (64, 1) if _SMOKE.value else (WINDOW, _TOKENS.value // WINDOW)
    tokens = np.array(checkpoint.tokenizer.encode(text())[: window * num_windows], np.int32)
    if tokens.size < window * num_windows:
        raise app.UsageError(f"--tokens={_TOKENS.value} must be at most {tokens.size}, all of the text")
    windows = tokens.reshape(num_windows, window)
    chosen = _LAYOUTS.value or []
    if not chosen and not _QUANTIZATIONS.value:
        chosen = [name for name, layout in LAYOUTS.items() if layout.cache_dtype]
    forms: dict[str, tuple[Layout, str | None]] = {"float32": (TOKEN_MAJOR, None)}
    forms |= {name: (layouts.choose(name), None) for name in chosen}
    forms |= {name: (TOKEN_MAJOR, name) for name in _QUANTIZATIONS.value}
    models = {how: nnx.split(loaded(checkpoint, how)) for how in {how for _, how in forms.values()}}
    programs = {
        name: functools.partial(
            jax.jit(functools.partial(logits, models[how][0], layout=layout)), models[how][1]
        )
        for name, (layout, how) in forms.items()
    }
    losses = dict.fromkeys(forms, 0.0)
    divergences = dict.fromkeys(forms, 0.0)
    for each in windows:
        exact = programs["float32"](each)
        for name, program in programs.items():
            loss, divergence = compare(program(each), exact, each)
            losses[name] += float(loss)
            divergences[name] += float(divergence)
    prompts = [its[:PROMPT_LEN] for its in windows[: 2 if _SMOKE.value else NUM_PROMPTS]]
    answers = {name: greedy(*form, prompts) for name, form in forms.items()}
    count = num_windows * (window - 1)
    perplexity = {name: math.exp(loss / count) for name, loss in losses.items()}
    config = checkpoint.config
    results = record.Results("cache_quality", _OUT.value)
    rows = []
    for name, (layout, how) in forms.items():
        its, tokens_per_s = answers[name]
        agree = [num_equal(a, b) for a, b in zip(its, answers["float32"][0], strict=True)]
        shape = _BLOCK_SIZE.value, config.num_kv_heads, config.head_dim
        block_bytes = layout.block_bytes(*shape, DTYPE)
        line: dict[str, Any] = {
            "quantization" if how else "layout": name,
            "tokens": int(tokens.size),
            "perplexity": round(perplexity[name], 4),
            "more": round(perplexity[name] / perplexity["float32"] - 1, 6),
            "kl_nats": round(divergences[name] / count, 7),
            "greedy_agreement": round(float(np.mean(agree)) / NUM_NEW, 3),
            "bytes_per_token": round(config.num_layers * block_bytes / _BLOCK_SIZE.value),
            "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(models[how][1])),
        }
        line |= {
            "error": float(f"{paper.error(layout, *shape, DTYPE):.3g}"),
            "tokens_per_s": round(tokens_per_s, 1),
            "kernels": paper.kernels(layout, _BLOCK_SIZE.value, config.head_dim, DTYPE),
        }
        results.put(line)
        rows.append(line | {"layout": name})
    if _TABLE.value:
        paper.write(_TABLE.value, rows)


def loaded(checkpoint: Checkpoint, how: str | None) -> Decoder:
    """Load the model, quantised so, or as this directory has it."""
    if how is None or not Path(how).is_dir():
        return checkpoint.model(LoadAs(DTYPE, how))
    return loading.open_checkpoint(how).model(LoadAs(DTYPE))


def text() -> str:
    """Return English prose with some code, 700,000 characters, always in the same order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def logits(graphdef: nnx.GraphDef, params: nnx.State, token_ids: jax.Array, *, layout: Layout) -> jax.Array:
    """Return the scores of the token after each of a window's."""
    model, block_size, num_tokens = nnx.merge(graphdef, params), _BLOCK_SIZE.value, token_ids.shape[0]
    width, num_tiles = cdiv(num_tokens, block_size), num_tokens // PREFILL_TILE
    positions = jnp.arange(num_tokens, dtype=jnp.int32)
    starts = positions[::PREFILL_TILE]
    implementation = choice.default_tiled_implementation(DTYPE, PREFILL_TILE)
    if implementation != "native" or native.why_not_layout(layout, DTYPE):
        implementation = "xla"
    batch = PassBatch(
        slot_mapping=positions + block_size,
        block_tables=jnp.broadcast_to(1 + jnp.arange(width, dtype=jnp.int32), (num_tiles, width)),
        query_starts=starts,
        seq_lens=starts + PREFILL_TILE,
        implementation=implementation,
    )
    hidden, _ = model(token_ids, positions, model.create_cache(1 + width, block_size, layout), batch)
    return model.logits(hidden)


@jax.jit
def compare(scores: jax.Array, exact: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return a window's sums of the loss, and of the divergence from the exact scores' distribution."""
    got, want = (jax.nn.log_softmax(each[:-1]) for each in (scores, exact))
    loss = -jnp.sum(jnp.take_along_axis(got, token_ids[1:, None], axis=1))
    return loss, jnp.sum(jnp.exp(want) * (want - got))


def greedy(
    layout: Layout, quantization: str | None, prompts: list[np.ndarray]
) -> tuple[list[list[int]], float]:
    """Return the engine's greedy answers, and their tokens per second in a second run of all prompts."""
    model = _MODEL.value
    if quantization is not None and Path(quantization).is_dir():
        model, quantization = quantization, None
    llm = jaxpaged.LLM(
        model,
        dtype="float32",
        quantization=quantization,
        kv_layout=layout,
        block_size=_BLOCK_SIZE.value,
        max_model_len=256,
    )
    params = jaxpaged.SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)  # so that nothing is compiled, or read for the first time
    llm.reset_prefix_cache()
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    llm.engine.close()
    answers = [list(result.outputs[0].token_ids) for result in results]
    return answers, sum(map(len, answers)) / seconds


def num_equal(a: list[int], b: list[int]) -> int:
    """Count the tokens before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


if __name__ == "__main__":
    app.run(main)
