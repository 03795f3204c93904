"""Compile the serving loop of real sizes for GPUs, without one: what they tell each other, what each holds.

    python -m benchmarks.compile_parallel [NAME ...]    one JSON line per case, or for these alone

What it needs, `cuda_compiler` says. For eight H200s; of Llama 3.1 8B for one, and for one of every other card
of `targets.CARDS`. Weights are shapes alone. The engine sizes its cache as it does on GPUs, by the compiled
loop: as many blocks as fit beside weights, state and loop in 90% of the card's memory. All numbers are XLA's
own of the compiled program, and of one device; collectives are counted in its text. `seconds` and
`processor_seconds` are those of tracing and compiling.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import re
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from absl import app, flags

from benchmarks import cuda_compiler, record
from benchmarks.llama import LLAMA_3_SCALING, llama_config
from jaxpaged.config import EngineConfig, Quantization
from jaxpaged.engine.gpu_flags import FLAGS
from jaxpaged.models.config import ModelConfig
from pallas_kernels.gpu.targets import CARDS, Card

_HERE = flags.DEFINE_bool("here", False, "Compile in this process, which has cuda_compiler's environment.")

H200 = next(card for card in CARDS if card.name.startswith("H200"))
SHARE = 0.9  # of a card's memory for the engine: `EngineConfig.gpu_memory_utilization`
KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation of `loop.run`, for a Llama."""

    model: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_devices: int = 8
    quantization: Quantization | None = None  # on load
    max_num_seqs: int = 256
    max_model_len: int = 131072
    vocab_size: int = 128256
    loops: bool = False  # `EngineConfig.loop_over_layers`
    graphs: str = FLAGS["xla_gpu_enable_command_buffer"]  # of what XLA makes CUDA graphs
    card: Card = H200

    def __str__(self) -> str:
        name = f"{self.model} {self.quantization or 'bfloat16'} {self.num_layers} layers"
        name += " in a loop" * self.loops
        name += f" on {self.card.name}" * (self.card != H200)
        return name if self.graphs in FLAGS.values() else f"{name} {self.graphs}"

    def model_config(self) -> ModelConfig:
        return llama_config(
            self.num_layers, self.hidden_size, self.intermediate_size, num_q_heads=self.num_q_heads,
            num_kv_heads=8, head_dim=128, theta=5e5, scaling=LLAMA_3_SCALING, norm_eps=1e-6,
            vocab_size=self.vocab_size, max_model_len=self.max_model_len,
        )  # fmt: skip

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            dtype="bfloat16",
            quantization=self.quantization,
            max_num_seqs=self.max_num_seqs,
            tensor_parallel_size=self.num_devices,
            gpu_memory_utilization=SHARE,
            attention="mosaic_gpu",
            loop_over_layers=self.loops or None,
        )


LLAMA_8B = Case("llama-3.1-8b", 32, 4096, 14336, 32, num_devices=1)
SHORT = 8192  # tokens of a sequence where the card may have 24 GB
SMALL = Case("small", 2, 1024, 2048, 8, max_num_seqs=8, max_model_len=512, vocab_size=4096)


def cases() -> list[Case]:
    return [
        SMALL,
        dataclasses.replace(SMALL, graphs=f"{SMALL.graphs},+COLLECTIVES"),
        *(dataclasses.replace(LLAMA_8B, num_layers=layers) for layers in (2, 32)),
        *(dataclasses.replace(LLAMA_8B, num_layers=layers, loops=True) for layers in (2, 16, 32)),
        *(dataclasses.replace(LLAMA_8B, max_model_len=SHORT, card=card) for card in CARDS if card != H200),
        Case("llama-3.1-70b", 80, 8192, 28672, 64),
        Case("llama-3.1-405b", 126, 16384, 53248, 128, quantization="fp8"),
    ]


@dataclasses.dataclass(frozen=True)
class Report:
    """Properties of a compiled case; all bytes are those of one device."""

    case: str
    collectives: dict[str, int]  # by kind and result: how many are in the program's text
    weight_bytes: int
    num_blocks: int
    cache_bytes: int
    cached_tokens: int  # that the cache has room for
    argument_bytes: int
    alias_bytes: int  # arguments that become results in place
    temp_bytes: int
    total_bytes: int  # arguments, temporaries, and results that are not in place
    fits: bool  # in the card's memory
    outermost: tuple[str, ...]  # the thunks that are in no other: what a run launches
    seconds: float
    processor_seconds: float  # of the compiler's processes, too


def main(argv: list[str]) -> None:
    """Run as a module."""
    report_of = _report_here if _HERE.value else run
    reports = map(report_of, argv[1:] or map(str, cases()))
    context = record.context("benchmarks.compile_parallel")
    cuda_compiler.print_lines(dataclasses.asdict(report) | context for report in reports)


def run(name: str) -> Report:
    """Compile the case of this name in a process of its own, and report."""
    graphs = cuda_compiler.named(cases(), name).graphs
    with cuda_compiler.dumping("jit_run") as dump:
        xla_flags = f"--xla_gpu_enable_command_buffer={graphs} {dump}"
        [line] = cuda_compiler.run("benchmarks.compile_parallel", ["--here", name], xla_flags)
    said = {field.name: line[field.name] for field in dataclasses.fields(Report)}
    return Report(**said | {"outermost": tuple(line["outermost"])})


def _report_here(name: str) -> Report:
    case = cuda_compiler.named(cases(), name)
    start, processor_start = time.perf_counter(), _processor_seconds()
    weight_bytes, size, compiled = compile_for_gpus(case)
    seconds, processor_seconds = time.perf_counter() - start, _processor_seconds() - processor_start
    memory = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes + new
    thunks = cuda_compiler.dumped_thunks()
    return Report(
        case=name,
        collectives=collectives(compiled.as_text() or ""),
        weight_bytes=weight_bytes,
        num_blocks=size.num_blocks,
        cache_bytes=size.num_blocks * size.bytes_per_block,
        cached_tokens=(size.num_blocks - 1) * size.block_size,
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        total_bytes=total,
        fits=total <= case.card.memory_bytes,
        outermost=cuda_compiler.outermost(thunks),
        seconds=round(seconds, 1),
        processor_seconds=round(processor_seconds, 1),
    )


def _processor_seconds() -> float:
    return sum(os.times()[:4])


def collectives(text: str) -> dict[str, int]:
    """Count the collectives in a program's text by kind and result; a pair of start and done counts once."""
    found: collections.Counter[str] = collections.Counter()
    for results, kind, start in re.findall(rf" = (.*?) ({KINDS})(-start)?\(", text):
        shapes = re.findall(r"\w+\[[\d,]*\]", results)
        if start:  # what it takes is named before what it gives
            shapes = shapes[len(shapes) // 2 :]
        found[" ".join([kind, *shapes])] += 1
    return dict(sorted(found.items()))


def compile_for_gpus(case: Case) -> tuple[int, Any, Any]:
    """Return the bytes of a device's weights, the cache's size, and `loop.run` compiled for it.

    Needs the environment of `cuda_compiler.run`.
    """
    from flax import nnx

    from jaxpaged.engine import start
    from jaxpaged.engine.setup import Setup
    from jaxpaged.models import decoder
    from jaxpaged.models.families.llama import NAMES
    from jaxpaged.models.quantised.on_load import OnLoad

    config, model_config = case.engine_config(), case.model_config()
    quantisation = None if case.quantization is None else OnLoad(case.quantization)
    shapes_of = functools.partial(decoder.abstract, model_config, names=NAMES, quantisation=quantisation)
    with _on_gpus(case.card, case.num_devices):
        setup = Setup(config, model_config)
        setup.check()
        model = start.abstract_model(setup, shapes_of)
        size, program = start.fitted(setup, model)
    return cuda_compiler.num_bytes(nnx.state(model)), size, program.call  # type: ignore[attr-defined]


@contextlib.contextmanager
def _on_gpus(card: Card, num_devices: int) -> Iterator[None]:
    """Answer the engine's questions about its devices as so many of a card would, with nothing else on
    them.
    """
    import jax
    import numpy as np
    from jax.experimental.mosaic.gpu import utils
    from jax.sharding import Mesh

    from jaxpaged.engine import gpu_flags, machine, setup
    from jaxpaged.models.shards import DATA, MODEL
    from pallas_kernels.ops import choice

    devices = np.array(cuda_compiler.topology(num_devices, card.capability).devices)
    mesh = Mesh(devices.reshape(1, num_devices), (DATA, MODEL)) if num_devices > 1 else None
    memory = {"bytes_limit": int(SHARE * card.memory_bytes)}
    answers = (
        (jax, "default_backend", "gpu"),
        (jax, "local_devices", list(devices)),
        (choice, "default_implementation", "mosaic_gpu"),
        (utils, "_infer_arch", tuple(map(int, card.capability.split(".")))),
        (setup, "mesh_of", mesh),
        (machine, "memory_stats", memory),
        (gpu_flags, "memory_share", SHARE),
    )
    with contextlib.ExitStack() as stack:
        for where, name, answer in answers:
            stack.enter_context(mock.patch.object(where, name, return_value=answer))
        yield


if __name__ == "__main__":
    app.run(main)
