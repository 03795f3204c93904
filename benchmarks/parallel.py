"""The serving loop on several devices: `python -m benchmarks.parallel`, on a CPU's virtual ones.

A Llama of random weights answers a batch of short prompts, so nearly all is decoding. Ways, which take turns:
the loop as it is on one device ("plain"), the same inside a `shard_map` over a mesh of one, and over meshes
of more. Standard output is a JSON line for each: tokens a second, its time as a multiple of the plain one's
(the median over rounds), and what devices tell each other in a decode step, from the compiled program: how
many collectives, and the bytes of their results. Virtual devices share the machine's cores: more of them show
what splitting costs, not what it gains.
"""

import contextlib
import dataclasses
import functools
import itertools
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import record
from benchmarks.llama import llama_config
from jaxpaged import EngineConfig, SamplingParams, disk_cache
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.programs import Program
from jaxpaged.engine.setup import Setup
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.layer_form import form_of
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import StoredWeights, random_weights
from jaxpaged.parallel.mesh import mesh_of

_SIZES = flags.DEFINE_list("sizes", ["1", "2", "4"], "Devices of the meshes, with commas between them.")
_SUMS = flags.DEFINE_enum("sums", "fast", ["fast", "ordered"], "How devices add up.")
_LAYERS = flags.DEFINE_integer("layers", 12, "Of the model.", lower_bound=1)
_HIDDEN = flags.DEFINE_integer("hidden", 512, "A multiple of 512.", lower_bound=512)
_ROWS = flags.DEFINE_integer("rows", 16, "Requests in a batch.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 64, "Of each answer.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each way.", lower_bound=1)

PLAIN = "plain"
BYTES = {"f32": 4, "bf16": 2, "u32": 4, "s32": 4}
_ids = itertools.count(1)


def model_config() -> ModelConfig:
    hidden = _HIDDEN.value
    return llama_config(
        _LAYERS.value, hidden, 3 * hidden, num_q_heads=hidden // 64, num_kv_heads=hidden // 128, head_dim=64,
        norm_eps=1e-6, vocab_size=8192, max_model_len=512,
    )  # fmt: skip


@functools.cache
def weights(config: ModelConfig) -> dict[str, np.ndarray]:
    return random_weights(config, NAMES, seed=0)


def driver_of(way: str) -> Driver:
    """Create an engine without a thread; that of a mesh of one device is split into one."""
    size = 1 if way == PLAIN else int(way)
    config = model_config()

    def load(load_as: LoadAs) -> Decoder:
        return Decoder(StoredWeights(config, NAMES, weights(config), load_as))

    options: dict[str, Any] = {"tensor_parallel_size": size, "tensor_parallel_sums": _SUMS.value}
    options |= {"dtype": "float32", "max_num_seqs": _ROWS.value, "num_blocks": 1 + 40 * _ROWS.value}
    on_a_mesh = mock.patch.object(Setup, "mesh", mesh_of(size))
    with contextlib.nullcontext() if way == PLAIN else on_a_mesh:
        return Driver(EngineConfig(**options), config, load)


def generate(driver: Driver) -> float:
    """Return the seconds for a batch."""
    params = SamplingParams(max_tokens=_TOKENS.value, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    for row in range(_ROWS.value):
        [request] = driver.door.admit([100 + row, 200, 300], params)
        driver.add(dataclasses.replace(request, request_id=next(_ids)))
    while driver.has_work:
        driver.turn()
    return time.perf_counter() - start


def collectives(driver: Driver) -> dict[str, dict[str, int]]:
    """Count a decode step's collectives by kind, and the bytes of their results.

    A decode pass is recognised by the shape of its results: rows, by the model's width or by the vocabulary.
    """
    program: Any = driver.device.kept_run
    assert isinstance(program, Program)
    config = driver.door.model_config
    times = config.num_layers if form_of(jnp.dtype("float32")).loops else 1
    found: dict[str, dict[str, int]] = {}
    text = program.call.as_text() or ""
    for results, kind in re.findall(r" = (.*?) (all-[a-z]+)(?:-start)?\(", text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
            sizes = [int(size) for size in shape.split(",") if size]
            if _ROWS.value not in sizes or len(sizes) < 2:
                continue
            count = times if sizes[-1] == config.hidden_size else 1
            its = found.setdefault(kind, {"count": 0, "bytes": 0})
            its["count"] += count
            its["bytes"] += count * int(np.prod(sizes)) * BYTES[dtype]
    return found


def compare() -> Iterator[dict[str, Any]]:
    ways = [PLAIN, *_SIZES.value]
    drivers = {way: driver_of(way) for way in ways}
    runs = {way: functools.partial(generate, driver) for way, driver in drivers.items()}
    seconds = record.in_turns(runs, _ROUNDS.value)
    times = record.times_of(seconds, PLAIN)
    num_tokens = _ROWS.value * _TOKENS.value
    for way in ways:
        yield {
            "way": way,
            "sums": _SUMS.value,
            "model": f"{_LAYERS.value} layers of {_HIDDEN.value}",
            "rows": _ROWS.value,
            "tokens_per_s": record.spread([num_tokens / s for s in seconds[way]], 1),
            "times_plain": times[way],
            "decode_step": collectives(drivers[way]),
        }


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    jax.config.update("jax_num_cpu_devices", max(map(int, _SIZES.value)))
    with tempfile.TemporaryDirectory() as folder:
        disk_cache.keep_in(Path(folder))  # then the driver has the compiled program in its hands
        for line in compare():
            record.Results("parallel").put(line)


if __name__ == "__main__":
    app.run(main)
