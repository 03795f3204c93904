"""What an engine starts with: its state, the loop compiled for it, and how many blocks fit beside both."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jaxpaged.config import EngineConfig
from jaxpaged.engine import gpu_flags, machine, programs
from jaxpaged.engine.programs import Program
from jaxpaged.memory import eviction, sizing
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.memory.sizing import Budget, CacheSize
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.decoder import Decoder, abstract
from jaxpaged.models.layer_form import form_of
from jaxpaged.parallel.mesh import BY_SHARD, assembled, from_host, num_replicas, per_replica, placed
from jaxpaged.parallel.shards import Shards
from jaxpaged.parallel.shares import Share
from jaxpaged.step import loop
from jaxpaged.step.config import StepConfig
from jaxpaged.step.program import specs_of
from jaxpaged.step.report import Report
from jaxpaged.step.state import EngineState, HostPool
from jaxpaged.step.step import no_prompt_scores
from pallas_kernels import layouts, native

# `loop.run` of one model and config.
type Run = Callable[[nnx.State, EngineState, np.ndarray, np.bool_], tuple[EngineState, Report]]


# A model with shapes for arrays, where its weights are kept in another way than all in one dtype.
type Shapes = Callable[..., Decoder]


class Split(NamedTuple):
    """A model as one device has it: all of it, or its share."""

    config: ModelConfig
    load_model: Callable[[jnp.dtype], Decoder]  # its arrays those of all devices
    shapes: Shapes | None
    shares: tuple[Share, ...]  # of all devices, if there are several


def description(config: EngineConfig, model_config: ModelConfig) -> dict[str, str]:
    """What all processes of an engine must have in common."""
    fields = {field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config)}
    del fields["process_id"], fields["distributed_init"]  # by which each may come its own way
    return {**fields, "model": hashlib.sha256(repr(model_config).encode()).hexdigest()[:12]}


def split(
    config: EngineConfig, model_config: ModelConfig, load_model: Callable[..., Decoder], shapes: Shapes | None
) -> Split:
    """The model as one device has it. What is given to load and to describe it gets a `share`, if there are
    several. Raises `InputError` if it cannot be split into so many.
    """
    machine.refuse_other_heads(config, model_config)
    machine.refuse_loop(config, model_config)
    mesh = machine.mesh(config)
    if mesh is None:
        return Split(model_config, load_model, shapes, ())
    size = config.tensor_parallel_size
    if size == 1:
        return Split(model_config, lambda dtype: assembled(mesh, lambda _: load_model(dtype)), shapes, ())
    shards = Shards(size, config.tensor_parallel_sums)
    shares = tuple(Share(model_config, shards, number) for number in range(size))

    def load(dtype: jnp.dtype) -> Decoder:
        return assembled(mesh, lambda number: load_model(dtype, share=shares[number]))

    whole = functools.partial(abstract, model_config, loop_over_layers=config.loop_over_layers)
    shapes = functools.partial(shapes or whole, share=shares[0])
    return Split(shares[0].config, load, shapes, shares)


def cache_size(config: EngineConfig, model_config: ModelConfig, shapes: Shapes | None = None) -> CacheSize:
    """How many blocks the cache gets on this machine; on a GPU the loop is compiled to know it, without room
    for adapters.
    """
    config = dataclasses.replace(config, enable_lora=False)
    model_config, _, shapes, _ = split(config, model_config, abstract, shapes)
    known = known_size(config, model_config, shapes)
    if known is not None:
        return known
    dtype = machine.resolve_dtype(config)
    shapes = shapes or functools.partial(abstract, model_config, loop_over_layers=config.loop_over_layers)
    return fitted(config, model_config, shapes(dtype))[0]


def known_size(
    config: EngineConfig, model_config: ModelConfig, shapes: Shapes | None = None
) -> CacheSize | None:
    """The cache's size, where it is known before anything is loaded: not on a GPU, unless it is given.

    Raises `InputError` if not even one sequence of one block would fit; on a GPU if that is so beside the
    weights alone.
    """
    stats = machine.memory_stats()
    if config.num_blocks is not None or stats is None:
        return machine.cache_size(config, model_config)
    of_weights = machine.weight_bytes(config, model_config)
    if shapes is not None:
        of_weights = _num_bytes(nnx.state(shapes(machine.resolve_dtype(config))))
    memory = machine.gpu_budget(config, stats).less(("of weights", of_weights))
    per_block = machine.bytes_per_block(config, model_config)
    if memory.left < 2 * per_block:
        raise sizing.no_room(per_block, memory)
    return None


def fitted(config: EngineConfig, model_config: ModelConfig, model: Decoder) -> tuple[CacheSize, Run]:
    """How many blocks a GPU has room for beside the loop compiled for them, and that loop.

    The memory is what is free now, so the model should be loaded; of one with shapes for arrays the weights
    are counted beside. Nothing has to be run: the state is measured by its shapes, and XLA knows what the
    program takes. That hardly depends on the number of blocks, so most often the first program, made for a
    guess, is the last. Raises `InputError` if not even one sequence of one block would fit.
    """
    graphdef, params = nnx.split(model)
    bytes_to_load = 0
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        bytes_to_load = _num_bytes(params)
        params = _placed(config, jax.tree.map(lambda _: BY_SHARD, params), params)
    per_block = machine.bytes_per_block(config, model_config)
    memory = machine.gpu_budget(config, machine.memory_stats() or {}).less(("of weights", bytes_to_load))
    if config.gpu_memory_utilization > gpu_flags.memory_share():
        logging.warning("the cache gets what is left of %s", memory.what)
    made: dict[int, tuple[Budget, Run]] = {}

    def fit_beside(num_blocks: int) -> int:
        state = state_shapes(config, model_config, model, num_blocks)
        source = Source(config, model_config, graphdef, params, state, by_host=config.loop == "host")
        program = source.kept() or source.compiled()
        of_state = _num_bytes(dataclasses.replace(state, host=None)) - num_blocks * per_block
        if state.host is not None:
            of_state += _num_bytes(state.host.tables)
        # Of results two are there at a time: that of a run, and that of the one before, which is being read.
        of_loop = program.temporary_bytes + 2 * program.result_bytes
        left = memory.less(("of state", of_state), ("of the compiled loop", of_loop))
        made[num_blocks] = left, source.run(program)
        logging.info("beside the loop compiled for %d blocks: %s", num_blocks, left)
        return left.left // per_block

    most = min(sizing.MOST_BLOCKS, sizing.most_blocks(model_config.num_layers, config.block_size))
    reckoned = machine.budget(config, model_config, bytes_to_load).left
    guess = max(reckoned // (per_block + machine.state_bytes(config, model_config)[1]), 2)
    num_blocks = sizing.fitted(guess, most, fit_beside)
    if num_blocks < 2:
        raise sizing.no_room(per_block, min((left for left, _ in made.values()), key=lambda left: left.left))
    left, run = made[num_blocks]
    why = sizing.CAPPED if num_blocks == sizing.coarse(most) else sizing.FITTED
    return CacheSize(num_blocks, per_block, config.block_size, why, left), run


def run_of(
    config: EngineConfig,
    model_config: ModelConfig,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    state: EngineState,
    *,
    by_host: bool,
) -> Run | None:
    """The loop over such a state, turned by the host or not.

    None where no program is kept on disk: then `loop.run` has its own, with JAX's ways of keeping it. Of
    several processes each has one before any runs it: none may wait in a collective while others compile.
    """
    source = Source(config, model_config, graphdef, params, state, by_host=by_host)
    program = source.kept()
    if program is None and not by_host and config.num_processes == 1:
        return None
    program = program or source.compiled()
    machine.keep_freed(program.temporary_bytes)
    return source.run(program)


@dataclasses.dataclass(frozen=True)
class Source:
    """What a loop is compiled from: `loop.run`, or, if the host turns it, its step."""

    config: EngineConfig
    model_config: ModelConfig
    graphdef: nnx.GraphDef
    params: nnx.State  # of this and of the state shapes with shardings are enough
    state: EngineState
    _: dataclasses.KW_ONLY
    by_host: bool

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        return machine.mesh(self.config)

    @functools.cached_property
    def step_config(self) -> StepConfig:
        num_blocks = self.state.tables.pool.free_queue.place.shape[-1]  # behind that of groups, if there is
        return machine.step_config(self.config, self.model_config, num_blocks)

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """What the program is called with."""
        numbers = loop.limits(0), np.bool_(False)
        if not self.by_host:
            return self.params, self.state, *numbers
        before = functools.partial(loop.before_run, config=self.step_config, mesh=self.mesh)
        more, _ = jax.eval_shape(before, self.state, *numbers)
        return self.params, (self.state, *more), *numbers

    @property
    def options(self) -> dict[str, str] | None:
        return gpu_flags.STEP_OPTIONS if self.by_host else None

    def lower(self) -> jax.stages.Lowered:
        fixed: dict[str, Any] = {"config": self.step_config, "mesh": self.mesh}
        if not self.by_host:
            return loop.run.lower(self.graphdef, *self.arrays, **fixed)
        one_of_several = num_replicas(self.mesh) > 1
        return loop.run_step.lower(self.graphdef, *self.arrays, **fixed, one_of_several=one_of_several)

    def kept(self) -> Program | None:
        """The program, kept on disk from now on; None where none is."""
        # A program of several processes knows which of them it is in.
        if not layouts.is_ours(self.state.kv_cache.layout) or self.config.num_processes > 1:
            return None
        if not self.config.keep_programs:
            return None
        told = no_prompt_scores(self.step_config, self.config.num_rows)
        state = self.state
        if num_replicas(self.mesh) > 1:  # of one: it is the report's structure that counts
            state = jax.eval_shape(lambda state: jax.tree.map(lambda x: x[0], state), state)
        report = jax.eval_shape(loop.report, state, told, state.rows.order)
        what = "run by host" if self.by_host else "run"
        model_config = dataclasses.replace(self.model_config, eos_token_ids=())  # rows have theirs
        dtype = machine.resolve_dtype(self.config)
        return programs.kept(
            self.lower,
            made_from=(
                *(what, model_config, dtype, native.why_not(dtype), self.step_config),
                *(self.config.tensor_parallel_size, self.config.tensor_parallel_sums),
                *(self.config.data_parallel_size, form_of(dtype, self.config.loop_over_layers)),
            ),
            arrays=self.arrays,
            result=(self.arrays[1], np.bool_(False)) if self.by_host else (self.state, report),
            options=self.options,
        )

    def compiled(self) -> Program:
        return programs.compiled(self.lower, self.options)

    def run(self, program: Program) -> Run:
        """The loop by its program."""
        if not self.by_host:
            return program
        return functools.partial(loop.run_by_host, program, config=self.step_config, mesh=self.mesh)


def create_state(
    config: EngineConfig, model_config: ModelConfig, model: Decoder, num_blocks: int
) -> EngineState:
    """A state without requests, with a pool in the host's memory if requests are swapped to it."""

    def create(num_blocks: int, *, prefix_caching: bool) -> EngineState:
        mesh = machine.mesh(config)
        made = _created(config, model_config, model, num_blocks, prefix_caching=prefix_caching, mesh=mesh)
        return dataclasses.replace(made, kv_cache=_with_given(made.kv_cache, config, mesh))

    return _with_host(config, num_blocks, create, lambda cache: jax.device_put(cache, jax.memory.Space.Host))


def state_shapes(
    config: EngineConfig, model_config: ModelConfig, model: Decoder, num_blocks: int
) -> EngineState:
    """The same with shapes for arrays, each with the place where the array would be."""

    def create(num_blocks: int, *, prefix_caching: bool) -> EngineState:
        made = functools.partial(_created, config, model_config, model, num_blocks)
        shapes = jax.eval_shape(functools.partial(made, prefix_caching=prefix_caching))
        specs = per_replica(machine.mesh(config), specs_of(shapes))
        return _placed(config, specs, shapes)

    def to_host(cache: KVCache) -> KVCache:
        kind = jax.device_put(np.int32(0), jax.memory.Space.Host).sharding

        def of(like: Any) -> jax.ShapeDtypeStruct:
            named = isinstance(like.sharding, NamedSharding)
            sharding = like.sharding.with_memory_kind(kind.memory_kind) if named else kind
            return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

        return jax.tree.map(of, cache)

    return _with_host(config, num_blocks, create, to_host)


def _with_host(
    config: EngineConfig,
    num_blocks: int,
    create: Callable[..., EngineState],
    to_host: Callable[[KVCache], KVCache],
) -> EngineState:
    created = create(num_blocks, prefix_caching=config.enable_prefix_caching)
    if config.preemption_mode != "swap":
        return created
    swapped = create(config.num_host_blocks, prefix_caching=False)
    return dataclasses.replace(created, host=HostPool(swapped.tables, to_host(swapped.kv_cache)))


def _created(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Decoder,
    num_blocks: int,
    *,
    prefix_caching: bool,
    mesh: Mesh | None = None,
) -> EngineState:
    kv_layout = machine.layout(config, model_config)
    return loop.create(
        jax.eval_shape(lambda: model.create_cache(num_blocks, config.block_size, kv_layout)),
        num_rows=config.num_rows,
        max_model_len=machine.max_model_len(config, model_config),
        vocab_size=model_config.vocab_size,
        prefix_caching=prefix_caching,
        policy=eviction.named(config.eviction_policy),
        lora=config.enable_lora,
        mesh=mesh,
    )


def _with_given(cache: KVCache, config: EngineConfig, mesh: Mesh | None) -> KVCache:
    """With what its layout is given for each head, on the devices that have these heads."""
    if mesh is None:
        return cache
    size, sizes = config.tensor_parallel_size, (cache.num_layers, cache.num_kv_heads)
    each = [cache.layout.given(cache.num_kv_heads, device, size) for device in range(size)]

    def put(name: str, old: jax.Array) -> jax.Array:
        of_shards = np.concatenate([np.broadcast_to(its[name], sizes) for its in each])
        assert isinstance(old.sharding, NamedSharding)
        given: jax.Array = from_host(mesh, old.sharding.spec, np.broadcast_to(of_shards, old.shape))
        return given

    return dataclasses.replace(
        cache, shared=cache.shared | {name: put(name, cache.shared[name]) for name in each[0]}
    )


def _placed(config: EngineConfig, specs: Any, tree: Any) -> Any:
    """Shapes with the places of their arrays: the one device, or the mesh, by these specs."""
    mesh = machine.mesh(config)
    if mesh is not None:
        return placed(mesh, specs, tree)
    device = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def _num_bytes(tree: Any) -> int:
    """On one device."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        return math.prod(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))

    return sum(size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
