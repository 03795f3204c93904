"""Cost of a decode step beside the model: scheduling, blocks, sampling, bookkeeping.

    python -m benchmarks.step_overhead [--repeats 20] [--out FILE]      the sizes for this device
    python -m benchmarks.step_overhead --model smollm2                  and the share of a real step
    python -m benchmarks.step_overhead --max_model_len 2048 --max_model_len 131072     and what length costs
    python -m benchmarks.step_overhead --num_groups 1 --num_groups 6    and what groups of layers cost
    python -m benchmarks.step_overhead --structured_outputs_mib 0 --structured_outputs_mib 64     and an arena
    python -m benchmarks.step_overhead --smoke                          once, tiny

JSON lines on stdout. The engine's own `loop.run` with the model replaced by a constant: all rows decode, of
ragged lengths, so that in each step one row in sixteen fills a block and begins the next, which with prefix
caching is made findable. `us_per_step` are microseconds of a step, one run's time by its 32 steps; its
dispatch and waiting for the end are included, reading the answer is not. `graph` says whether the package's
XLA flags are set, which make the loop one CUDA graph on a GPU; to see XLA's own choice, run it under
XLA_FLAGS=--xla_gpu_enable_command_buffer=+FUSION.

With lengths given, 256 rows of each length run in turns instead. In the `phase` "decode" they do; in "admit"
one slot is left, and in each step a request is admitted that hits four blocks, has 32 tokens computed and
published, and is freed. `ratio` is the least time over that of the first length.

With numbers of groups given, the rows of this device's sizes decode in turns with so many groups of layers,
in a pool of twice as many blocks. The first group sees all tokens, the others a window of `WINDOW` tokens.
`ratio` is the least time over that of the first number.

With sizes of the arena of structured outputs given, the rows of this device's sizes decode in turns beside
each; no row has a constraint. `ratio` is the least time over that of the first size.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks import decode_loop, device, record
from jaxpaged.config import EngineConfig
from jaxpaged.engine import gpu_flags
from jaxpaged.engine.setup import Setup
from jaxpaged.memory import kv_cache
from jaxpaged.memory.cache_specs import FULL, CacheSpec, SlidingWindow
from jaxpaged.memory.grouping import MOST_GROUPS, Grouping
from jaxpaged.models import loading
from jaxpaged.models.constant import ConstantModel
from jaxpaged.models.load_as import LoadAs
from jaxpaged.step.config import MAX_STEPS
from jaxpaged.step.features import NO_FEATURES, Features
from jaxpaged.step.model import Model

_REPEATS = flags.DEFINE_integer("repeats", 20, f"Runs of {MAX_STEPS} steps.", lower_bound=1, upper_bound=26)
_MODEL = flags.DEFINE_string("model", None, "Also time a real model's steps: smollm2, or what LLM takes.")
_DTYPE = flags.DEFINE_string("dtype", "auto", "Of the real model.")
_LENGTHS = flags.DEFINE_multi_integer("max_model_len", [], "Tokens of a row; may be given several times.")
_GROUPS = flags.DEFINE_multi_integer(
    "num_groups", [], "Groups of layers; may be given several times.", lower_bound=1, upper_bound=MOST_GROUPS
)
_ARENAS = flags.DEFINE_multi_integer(
    "structured_outputs_mib", [], "MiB of the arena; may be given several times.", lower_bound=0
)
_GPU = flags.DEFINE_boolean("gpu", False, "Fail where JAX uses no GPU that our kernels serve.")
_SMOKE = flags.DEFINE_boolean("smoke", False, "Tiny sizes, two repeats.")
_OUT = flags.DEFINE_string("out", None, "Append the lines to this file as well.")

MAX_MODEL_LEN = 1024
SIZES = {"cpu": (64, 4096), "gpu": (256, 65536)}  # rows, blocks
LONG_ROWS, LONG_BLOCKS = 256, 32768  # where lengths are compared
WINDOW = 64  # tokens; in each step some rows give a block of each such group back
LIMIT_US = {"cpu": 1000, "gpu": 150}  # what the engine promises of these sizes
REAL_ROWS, REAL_BLOCKS = 16, 1040  # of the real model's step


def main(argv: list[str]) -> None:
    """Run as a module."""
    record.start(argv)
    gpu_flags.set_defaults()
    is_gpu = _GPU.value and not _SMOKE.value
    found = device.require_gpu() if is_gpu else {"device": jax.devices()[0].device_kind}
    results = record.Results("step_overhead", _OUT.value, graph=decode_loop.has_flags(), **found)
    platform = jax.devices()[0].platform
    repeats = 2 if _SMOKE.value else _REPEATS.value
    num_rows, num_blocks = (4, 320) if _SMOKE.value else SIZES[platform]
    if _LENGTHS.value:
        num_rows, num_blocks = (4, 320) if _SMOKE.value else (LONG_ROWS, LONG_BLOCKS)
        for line in measure_lengths(_LENGTHS.value, num_rows, num_blocks, repeats):
            results.put(line)
        return
    if _GROUPS.value:
        for line in measure_groups(_GROUPS.value, num_rows, 2 * num_blocks, repeats):
            results.put(line)
        return
    if _ARENAS.value:
        for line in measure_arenas(_ARENAS.value, num_rows, num_blocks, repeats):
            results.put(line)
        return
    for prefix_caching in (True,) if _SMOKE.value else (True, False):
        line = measure_constant(num_rows, num_blocks, prefix_caching, repeats)
        if not _SMOKE.value:
            limit = LIMIT_US[platform]
            line |= {"limit_us": limit, "within_limit": line["us_per_step"]["median"] <= limit}
        results.put(line)
    if _MODEL.value:
        overhead = measure_constant(REAL_ROWS, REAL_BLOCKS, True, repeats)
        real = measure_real(_MODEL.value, _DTYPE.value, repeats)
        share = overhead["us_per_step"]["median"] / real["us_per_step"]["median"]
        results.put(overhead)
        results.put(real | {"overhead_share": round(share, 4)})


def measure_constant(num_rows: int, num_blocks: int, prefix_caching: bool, repeats: int) -> dict[str, Any]:
    """Return the line of the constant model."""
    model = ConstantModel()
    cache = kv_cache.create(0, num_blocks, decode_loop.BLOCK_SIZE, 1, 1, model.dtype)
    us = _time(model, cache, num_rows, num_blocks, prefix_caching, "xla", repeats)
    return _line("constant", num_rows, num_blocks, prefix_caching, us)


def measure_lengths(
    lengths: list[int], num_rows: int, num_blocks: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Return the lines of the constant model with rows of several lengths, in both phases, run in turns."""
    for phase, num_requests in (("decode", 0), ("admit", min(MAX_STEPS, num_rows))):
        loops = {}
        for length in lengths:
            loops[length] = decode_loop.create(
                ConstantModel(),
                kv_cache.create(0, num_blocks, decode_loop.BLOCK_SIZE, 1, 1, ConstantModel.dtype),
                num_blocks=num_blocks,
                seq_lens=[64 + row % decode_loop.BLOCK_SIZE for row in range(num_rows - bool(num_requests))],
                max_model_len=length,
                prefix_caching=True,
                attention="xla",
                free_slots=int(bool(num_requests)),
            )
        us: dict[int, list[float]] = {length: [] for length in lengths}
        for _ in range(2 + repeats):  # the first compiles
            for length, loop in loops.items():
                if num_requests:
                    loop.submit(num_requests)
                    jax.block_until_ready(loop.state.rows.order)
                us[length].append(loop.seconds_per_step(num_requests=num_requests) * 1e6)
        for length in lengths:
            line = _line("constant", num_rows, num_blocks, True, us[length][2:])
            ratio = min(us[length][2:]) / min(us[lengths[0]][2:])
            yield line | {"phase": phase, "max_model_len": length, "ratio": round(ratio, 3)}


def measure_groups(
    numbers: list[int], num_rows: int, num_blocks: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Return the lines of the constant model with several numbers of groups, run in turns."""
    options = {number: {"grouping": grouping(number)} for number in numbers}
    return _in_turns("num_groups", options, num_rows, num_blocks, repeats)


def measure_arenas(
    sizes: list[int], num_rows: int, num_blocks: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Return the lines of the constant model beside arenas of several sizes in MiB, run in turns."""
    arenas = {size: Features.on(grammars=size * 2**18) if size else NO_FEATURES for size in sizes}
    options = {size: {"features": features} for size, features in arenas.items()}
    return _in_turns("structured_outputs_mib", options, num_rows, num_blocks, repeats)


def _in_turns(
    name: str, options: Mapping[int, Mapping[str, Any]], num_rows: int, num_blocks: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Return the lines of the constant model with the options of each value of `name`, run in turns."""
    loops = {
        value: decode_loop.create(
            ConstantModel(),
            kv_cache.create(0, num_blocks, decode_loop.BLOCK_SIZE, 1, 1, ConstantModel.dtype),
            num_blocks=num_blocks,
            seq_lens=[64 + row % decode_loop.BLOCK_SIZE for row in range(num_rows)],
            max_model_len=MAX_MODEL_LEN,
            prefix_caching=True,
            attention="xla",
            **more,
        )
        for value, more in options.items()
    }
    us: dict[int, list[float]] = {value: [] for value in options}
    for _ in range(2 + repeats):  # the first compiles
        for value, loop in loops.items():
            us[value].append(loop.seconds_per_step() * 1e6)
    least = {value: min(times[2:]) for value, times in us.items()}
    for value, times in us.items():
        line = _line("constant", num_rows, num_blocks, True, times[2:])
        yield line | {name: value, "ratio": round(least[value] / least[next(iter(us))], 3)}


def grouping(num_groups: int) -> Grouping:
    """Return groups of one layer: the first sees all tokens, the others a window."""
    specs: list[CacheSpec] = [FULL, *[SlidingWindow(WINDOW)] * (num_groups - 1)]
    return Grouping(tuple(specs), tuple((layer,) for layer in range(num_groups))).of_step


def measure_real(name: str, dtype_name: Any, repeats: int) -> dict[str, Any]:
    """Return the line of a real model, as the engine would run it with prefix caching."""
    checkpoint = loading.open_checkpoint(name)
    config = EngineConfig(dtype=dtype_name)
    c = checkpoint.config
    setup = Setup(config, c)
    dtype, attention = setup.dtype, setup.attention
    model = checkpoint.model(LoadAs(dtype))
    cache = kv_cache.create(
        c.num_layers, REAL_BLOCKS, decode_loop.BLOCK_SIZE, c.num_kv_heads, c.head_dim, dtype
    )
    us = _time(model, cache, REAL_ROWS, REAL_BLOCKS, True, attention, min(repeats, 5))
    return _line(name, REAL_ROWS, REAL_BLOCKS, True, us) | {
        "dtype": str(jnp.dtype(dtype)),
        "attention": attention,
    }


def _time(
    model: Model,
    cache: kv_cache.KVCache,
    num_rows: int,
    num_blocks: int,
    prefix_caching: bool,
    attention: Any,
    repeats: int,
) -> list[float]:
    loop = decode_loop.create(
        model,
        cache,
        num_blocks=num_blocks,
        seq_lens=[64 + row % decode_loop.BLOCK_SIZE for row in range(num_rows)],
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=prefix_caching,
        attention=attention,
    )
    for _ in range(2):  # the first compiles
        loop.seconds_per_step()
    return [loop.seconds_per_step() * 1e6 for _ in range(repeats)]


def _line(name: str, num_rows: int, num_blocks: int, prefix_caching: bool, us: list[float]) -> dict[str, Any]:
    return {
        "model": name,
        "num_rows": num_rows,
        "num_blocks": num_blocks,
        "prefix_caching": prefix_caching,
        "us_per_step": record.spread(us, digits=1),
    }


if __name__ == "__main__":
    app.run(main)
