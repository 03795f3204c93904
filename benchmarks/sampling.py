"""Cost of choosing the next tokens, from logits to tokens.

    python -m benchmarks.sampling [--repeats 30] [--out FILE]
    python -m benchmarks.sampling --smoke                        once, tiny

JSON lines on stdout, one for each number of rows, vocabulary and mix. `us` are microseconds of a call that
samples, and scores if a row wants that, as a step does; the work is repeated inside one program, so that
dispatch counts for little, with the logits changed a little each time, so that nothing is moved out of the
loop: `us_of_that` is what this alone takes, and is in `us`. `share_of_step`: of SMOLLM2_STEP_MS, of 16 rows
of 49,152 tokens.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax import lax

from benchmarks import record
from benchmarks.llama import llama_config
from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity
from jaxpaged.engine.door import Door
from jaxpaged.engine.request_encoding import filled, row_values
from jaxpaged.engine.setup import Setup
from jaxpaged.sampling import Context, edited, sample, score
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import Rows, empty_rows

_REPEATS = flags.DEFINE_integer("repeats", 30, "Calls of the program.", lower_bound=1)
_SMOKE = flags.DEFINE_boolean("smoke", False, "Tiny sizes, two repeats.")
_OUT = flags.DEFINE_string("out", None, "Append the lines to this file as well.")

SMOLLM2_STEP_MS = 20.0  # a decode step of 16 rows, two cores with AVX-512, bfloat16
LENGTH = 1024  # tokens of each row, half of them its answer
AT_ONCE = 8  # samplings in one call of the program

# Each has its turn, row by row.
MIXES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0}],
    "draws": [{}],
    "top_p": [{"top_p": 0.9}],
    "penalties": [{"temperature": 0, "presence_penalty": 0.5, "repetition_penalty": 1.1}],
    "logprobs": [{"temperature": 0, "logprobs": 20}],
    "everything": [
        {"temperature": 0},
        {"temperature": 0.7, "top_k": 50, "min_p": 0.01, "min_tokens": LENGTH},
        {"top_p": 0.9, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
        {"temperature": 0.9, "logit_bias": dict.fromkeys(range(300), -5.0), "logprobs": 20},
        {"allowed_token_ids": list(range(0, 40_000, 2)), "presence_penalty": 0.4},
    ],
}


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    results = record.Results("sampling", _OUT.value, device=jax.devices()[0].device_kind)
    sizes = [(4, 40_000)] if _SMOKE.value else [(16, 49_152), (16, 151_936), (256, 49_152), (256, 151_936)]
    repeats = 2 if _SMOKE.value else _REPEATS.value
    for num_rows, vocab_size in sizes:
        logits = jnp.asarray(
            np.random.default_rng(0).normal(scale=3, size=(num_rows, vocab_size)), jnp.float32
        )
        base = min(
            _times(
                lambda logits, rows: likeliest_column(logits),
                logits,
                _rows("greedy", num_rows, vocab_size),
                repeats,
            )
        )
        for name in MIXES:
            us = _times(choose, logits, _rows(name, num_rows, vocab_size), max(2, repeats * 16 // num_rows))
            line = {"num_rows": num_rows, "vocab_size": vocab_size, "mix": name}
            line |= {"us": record.spread(us, digits=1), "us_of_that": round(base, 1)}
            if (num_rows, vocab_size) == (16, 49_152):
                line["share_of_step"] = round((min(us) - base) / (1000 * SMOLLM2_STEP_MS), 4)
            results.put(line)


def choose(logits: jax.Array, rows: Rows) -> jax.Array:
    """Run the part of `step.choice` that concerns logits."""
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)
    context = Context(row, rows.prompt_lens, rows.num_tokens, rows.token_ids)
    options = rows.sampling.take(row, row >= 0)
    token_ids = sample(
        logits,
        options,
        rows.num_tokens,
        lambda logits: edited(logits, rows.rules, options.has_rules, context),
    )
    scores = lax.cond(
        jnp.any(options.num_logprobs >= 0),
        lambda: score(logits, token_ids, options.num_logprobs).logprob,
        lambda: jnp.zeros(token_ids.shape),
    )
    return token_ids + scores.astype(jnp.int32)


def likeliest_column(logits: jax.Array) -> jax.Array:
    """Choose the likeliest column, which costs next to nothing."""
    return logits[:, 0].astype(jnp.int32)


def _times(
    chooses: Callable[[jax.Array, Rows], jax.Array], logits: jax.Array, rows: Rows, repeats: int
) -> list[float]:
    """Return the microseconds of one call."""

    @functools.partial(jax.jit, donate_argnums=0)
    def program(logits: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        def one(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits, total = carry
            chosen = chooses(logits, rows)
            # In place, and so that the next one depends on this one.
            logits = logits.at[:, 0].set(chosen % 2)
            return logits, total + chosen

        total = jnp.zeros(logits.shape[0], jnp.int32)
        return lax.fori_loop(0, AT_ONCE, one, (logits, total))

    logits = jnp.array(logits)
    seconds = []
    for _ in range(repeats + 1):  # the first compiles
        start = time.perf_counter()
        logits, _ = jax.block_until_ready(program(logits, rows))
        seconds.append(time.perf_counter() - start)
    return [1e6 * each / AT_ONCE for each in seconds[1:]]


def _rows(mix: str, num_rows: int, vocab_size: int) -> Rows:
    """Create rows as the door writes them, with some repeated tokens."""
    config = EngineConfig(num_blocks=1024)
    model = llama_config(
        1, 64, 64, num_q_heads=1, num_kv_heads=1, head_dim=64,
        vocab_size=vocab_size, max_model_len=2 * LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    step_config = StepConfig(max_num_seqs=num_rows, num_tiles=1, tiles_per_pass=1, attention="xla")
    door = Door(config, model, 2 * LENGTH, capacity.cache_size(Setup(config, model)), step_config)
    rng = np.random.default_rng(1)
    lines = []
    for line in range(num_rows):
        params = SamplingParams(max_tokens=None, seed=line, **MIXES[mix][line % len(MIXES[mix])])
        token_ids = rng.integers(0, 2000, LENGTH)
        [request] = door.admit(token_ids[: LENGTH // 2], params)
        lines.append(row_values(request, config, vocab_size, LENGTH) | {"token_ids": token_ids})
    return jax.tree.map(jnp.asarray, filled(empty_rows(num_rows, 2 * LENGTH, vocab_size), lines))


if __name__ == "__main__":
    app.run(main)
