"""Compile the serving loop for an H200, without one: does it copy the cache, and is it one CUDA graph?

    python -m benchmarks.compile_loop            one JSON line per case
    python -m benchmarks.compile_loop NAME...    of these cases alone, compiled in this process, for the tests

What it needs, `cuda_compiler` says. The model has two layers, or as many as the name says; memory is XLA's
own analysis of the compiled program, and the thunks (what the runtime does, in order) are those that XLA
dumps. A program that is one CUDA graph is one thunk, a command buffer, which holds all others.
"""

import dataclasses
import time
from typing import Any
from unittest import mock

from absl import app

from benchmarks import cuda_compiler
from benchmarks.llama import llama_config
from jaxpaged.engine.gpu_flags import FLAGS
from jaxpaged.models.load_as import LoadAs

CONTAINERS = ("kCommandBuffer", "kWhile", "kConditional")  # of other thunks
BLOCK_SIZE = 16
MAX_MODEL_LEN = 512
ADAPTER_RANK = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One compilation of `loop.run`."""

    attention: str  # of decode steps; "constant" for a model without layers
    head_dim: int = 64
    num_blocks: int = 512
    num_host_blocks: int = 0  # 0: preemption by recompute
    max_num_seqs: int = 8
    num_tiles: int = 2
    num_adapters: int = 0  # that the model has room for
    quantization: str | None = None  # of the weights, on load
    num_layers: int = 2
    loops: bool = False  # over layers: `EngineConfig.loop_over_layers`
    flags: bool = True  # whether the package's XLA flags are set
    capability: str = "9.0"  # of the GPU

    def __str__(self) -> str:
        words = [
            self.attention,
            f"d{self.head_dim}",
            f"{self.max_num_seqs} rows",
            f"{self.num_blocks} blocks",
        ]
        words += [f"{self.num_host_blocks} on the host"] * bool(self.num_host_blocks)
        words += [f"{self.num_adapters} adapters"] * bool(self.num_adapters)
        words += [self.quantization] if self.quantization else []
        words += [f"{self.num_layers} layers"] * (self.num_layers != Case.num_layers)
        words += ["in a loop"] * self.loops
        words += ["default flags"] * (not self.flags)
        words += [f"capability {self.capability}"] * (self.capability != Case.capability)
        return " ".join(words)


def cases() -> list[Case]:
    found = [
        Case(attention, head_dim, num_blocks, num_host_blocks)
        for attention, head_dim in (("mosaic_gpu", 64), ("mosaic_gpu", 128), ("xla", 64), ("xla", 128))
        for num_blocks, num_host_blocks in ((512, 0), (1024, 0), (512, 256), (1024, 512))
    ]
    found += [Case("mosaic_gpu", 128, num_adapters=4), Case("mosaic_gpu", 128, quantization="int4")]
    found += [Case("mosaic_gpu", 128, 256 * layers, num_layers=layers, loops=True) for layers in (2, 4)]
    found += [Case("mosaic_gpu", 128, quantization=name, loops=True) for name in ("int4", "fp8")]
    found.append(Case("mosaic_gpu", 128, num_adapters=4, loops=True))
    found.append(Case("constant", flags=False))
    found.append(Case("constant", num_blocks=65536, max_num_seqs=256, num_tiles=16))
    found += [Case("mosaic_gpu", 128, capability=c) for c in ("8.0", "8.9", "10.0", "12.0")]
    return found


@dataclasses.dataclass(frozen=True)
class Report:
    """Properties of a compiled case. Bytes are the device's unless the name says the host's."""

    case: str
    state_bytes: int  # of the arrays of the engine's state
    state_host_bytes: int
    alias_bytes: int  # arguments that become results in place
    alias_host_bytes: int
    temp_bytes: int
    temp_host_bytes: int
    thunks: dict[str, int]  # how many of each kind, at any depth
    outermost: tuple[str, ...]  # the thunks that are in no other
    layer_nodes: int  # of a decode step, as `count_nodes` has them; 0 without a kernel of ours
    step_nodes: int
    adapted_layer_nodes: int  # of a decode step in which some row has an adapter; 0 without room for any
    seconds: float


def main(argv: list[str]) -> None:
    """Run as a module."""
    names = argv[1:]
    reports = map(_report_here, names) if names else run([str(case) for case in cases()])
    cuda_compiler.print_lines(map(dataclasses.asdict, reports))


def run(names: list[str]) -> list[Report]:
    """Compile the cases of these names, each set of flags and target in a process of its own, and report."""
    by_name = {str(case): case for case in cases()}
    found = []
    kinds = {name: (by_name[name].flags, by_name[name].capability) for name in names}
    for kind in dict.fromkeys(kinds.values()):
        some, flags = [name for name in names if kinds[name] == kind], kind[0]
        ours = [f"--{name}={value}" for name, value in FLAGS.items()] if flags else []
        with cuda_compiler.dumping("jit_run") as dump:
            found += cuda_compiler.run("benchmarks.compile_loop", some, " ".join([*ours, dump]))
    return [Report(**line | {"outermost": tuple(line["outermost"])}) for line in found]


def _report_here(name: str) -> Report:
    case = cuda_compiler.named(cases(), name)
    start = time.perf_counter()
    state, compiled = compile_for_h200(case)
    memory = compiled.memory_analysis()
    thunks = cuda_compiler.dumped_thunks()
    kinds = sorted({kind for _, kind in thunks})
    layer_nodes, step_nodes = count_nodes(thunks, case)
    adapted_layer_nodes = count_nodes(thunks, case, passes_behind=1)[0] if case.num_adapters else 0
    host_bytes = cuda_compiler.num_bytes(state.host and state.host.kv_cache)
    return Report(
        case=name,
        state_bytes=cuda_compiler.num_bytes(state) - host_bytes,
        state_host_bytes=host_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        alias_host_bytes=memory.host_alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        temp_host_bytes=memory.host_temp_size_in_bytes,
        thunks={kind: sum(k == kind for _, k in thunks) for kind in kinds},
        outermost=cuda_compiler.outermost(thunks),
        layer_nodes=layer_nodes,
        step_nodes=step_nodes,
        adapted_layer_nodes=adapted_layer_nodes,
        seconds=round(time.perf_counter() - start, 1),
    )


def count_nodes(
    thunks: list[tuple[int, str]], case: Case | None = None, passes_behind: int = 0
) -> tuple[int, int]:
    """Count the kernels and copies of a decode layer, and those of every step beside its layers.

    A layer's are those from one kernel of ours to the same of the next layer, in the last sequence that has
    such for each, or that of so many before it: the branch that decodes. A step's are those that lie in the
    loop itself and in the branches around those layers: what lies in other branches, and in loops within, is
    not counted. Where layers are in a loop, a layer's nodes are those of its body and its condition.
    """
    case = case or Case("mosaic_gpu")
    least = 2 if case.loops else case.num_layers  # attention and a product, or a call of each layer
    body = 4 + next(depth for depth, kind in thunks if kind == "kWhile")
    rest = sum(depth == body and kind not in CONTAINERS for depth, kind in thunks)
    calls = [i for i, (_, kind) in enumerate(thunks) if kind == "kCustomCall"]
    passes = []
    while calls:
        sequence = _sequence(thunks, calls[-1])
        if len(its := [i for i in calls if i in sequence]) >= least:
            passes.append((sequence, its))
        calls = [i for i in calls if i < sequence[0]]
    if not passes:
        return 0, rest
    sequence, calls = passes[passes_behind]
    if case.loops:
        of_layer = sum(thunks[i][1] not in CONTAINERS for i in sequence)
    else:
        of_layer = calls[-1] - calls[-1 - len(calls) // case.num_layers]
        rest += len(sequence) - case.num_layers * of_layer
    while thunks[outside := sequence[0] - 1][0] > body:
        sequence = _sequence(thunks, outside)
        rest += sum(thunks[i][1] not in CONTAINERS for i in sequence)
    return of_layer, rest


def _sequence(thunks: list[tuple[int, str]], one: int) -> list[int]:
    """Return the indices of the thunks in this one's branch, or in another branch of that condition."""
    depth, begin, end = thunks[one][0], one, one
    while thunks[begin - 1][0] >= depth:
        begin -= 1
    while end < len(thunks) and thunks[end][0] >= depth:
        end += 1
    return [i for i in range(begin, end) if thunks[i][0] == depth]


def compile_for_h200(case: Case) -> tuple[Any, Any]:
    """Return the state's shapes, and `loop.run` compiled for them, in `cuda_compiler.run`'s environment."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.experimental.mosaic.gpu import utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxpaged.memory import kv_cache
    from jaxpaged.memory.block_table import BlockTables
    from jaxpaged.memory.kv_cache import KVCache
    from jaxpaged.models import decoder, lora
    from jaxpaged.models.constant import VOCAB_SIZE, ConstantModel
    from jaxpaged.models.families.llama import NAMES
    from jaxpaged.models.quantised.on_load import OnLoad
    from jaxpaged.step import loop
    from jaxpaged.step.config import StepConfig
    from jaxpaged.step.features import NO_FEATURES, Features
    from jaxpaged.step.state import EngineState, HostPool, create_state, create_tables
    from pallas_kernels.ops import choice

    mesh = Mesh(np.array(cuda_compiler.topology(1, case.capability).devices), ("x",))
    on_device = NamedSharding(mesh, PartitionSpec())
    # A device that is not there has no host memory to name; an abstract one takes our word.
    on_host = NamedSharding(mesh.abstract_mesh, PartitionSpec(), memory_kind="pinned_host")

    config = llama_config(
        case.num_layers, 256, 512, num_q_heads=8, num_kv_heads=2, head_dim=case.head_dim,
        vocab_size=512, max_model_len=MAX_MODEL_LEN, tie_word_embeddings=True,
    )  # fmt: skip
    dtype = jnp.dtype(jnp.bfloat16)

    def tables(num_blocks: int, *, cached: bool) -> BlockTables:
        max_blocks_per_seq = MAX_MODEL_LEN // BLOCK_SIZE
        return create_tables(
            num_blocks, 2 * case.max_num_seqs, max_blocks_per_seq, BLOCK_SIZE, prefix_caching=cached
        )

    def arrays(num_blocks: int) -> KVCache:
        if case.attention == "constant":
            return kv_cache.create(0, num_blocks, BLOCK_SIZE, 1, 1, dtype)
        c = config
        return kv_cache.create(c.num_layers, num_blocks, BLOCK_SIZE, c.num_kv_heads, c.head_dim, dtype)

    def empty_state() -> EngineState:
        host = None
        if case.num_host_blocks:
            host = HostPool(tables(case.num_host_blocks, cached=False), arrays(case.num_host_blocks))
        vocab_size = VOCAB_SIZE if case.attention == "constant" else config.vocab_size
        device = tables(case.num_blocks, cached=True)
        pool, has_room = arrays(case.num_blocks), case.num_adapters > 0
        return create_state(
            device,
            pool,
            MAX_MODEL_LEN,
            vocab_size,
            host,
            on=Features.on(adapters=None) if has_room else NO_FEATURES,
        )

    def create_model() -> nnx.Module:
        if case.attention == "constant":
            return ConstantModel()
        quantisation = None if case.quantization is None else OnLoad(case.quantization)
        with mock.patch.object(choice, "default_implementation", return_value="mosaic_gpu"):
            loops = case.loops or None
            model = decoder.abstract(config, LoadAs(dtype, loop_over_layers=loops), NAMES, quantisation)
        if case.num_adapters:
            lora.make_room(model, NAMES, case.num_adapters, ADAPTER_RANK)
        return model

    def place(tree: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    state = place(jax.eval_shape(empty_state), on_device)
    if state.host is not None:
        host = dataclasses.replace(state.host, kv_cache=place(state.host.kv_cache, on_host))
        state = dataclasses.replace(state, host=host)
    graphdef, params = nnx.split(nnx.eval_shape(create_model))
    attention: Any = "xla" if case.attention == "constant" else case.attention
    step_config = StepConfig(
        max_num_seqs=case.max_num_seqs,
        num_tiles=case.num_tiles,
        tiles_per_pass=case.num_tiles,
        attention=attention,
        watermark_blocks=case.num_blocks // 100,
    )
    # A device that is not there has no capability that Mosaic could read.
    arch = mock.patch.object(utils, "_infer_arch", return_value=tuple(map(int, case.capability.split("."))))
    with arch, jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = loop.run.trace(
            graphdef,
            place(params, on_device),
            state,
            place(jnp.zeros(2, jnp.int32), on_device),
            place(jnp.bool_(False), on_device),
            config=step_config,
        )
        lowered = traced.lower(lowering_platforms=("cuda",))
    return state, lowered.compile()


if __name__ == "__main__":
    app.run(main)
