"""The start of an engine: model, state, the loop compiled for it, and how many blocks fit beside them."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jaxpaged.engine import capacity, gpu_flags, machine, programs
from jaxpaged.engine.programs import Program
from jaxpaged.engine.setup import Setup
from jaxpaged.memory import kv_cache, sizing
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.memory.sizing import Budget, CacheSize
from jaxpaged.models.decoder import Decoder, abstract
from jaxpaged.models.layer_form import form_of
from jaxpaged.models.load_as import LoadAs
from jaxpaged.parallel.mesh import BY_SHARD, assembled, from_host, num_replicas, per_replica, placed
from jaxpaged.step import loop
from jaxpaged.step.config import StepConfig
from jaxpaged.step.program import specs_of
from jaxpaged.step.report import Report
from jaxpaged.step.state import EngineState, HostPool
from jaxpaged.step.step import no_prompt_scores
from pallas_kernels import native

# `loop.run` for one model and config.
type Run = Callable[[nnx.State, EngineState, np.ndarray, np.bool_], tuple[EngineState, Report]]
# Describes a model with shapes for arrays, where its weights are not all kept in one dtype.
type Shapes = Callable[[LoadAs], Decoder]


def load[Model: nnx.Module](setup: Setup, load_model: Callable[[LoadAs], Model]) -> Model:
    """Load a model onto the devices of a setup; its arrays are those of all devices."""
    if setup.mesh is None:
        return load_model(setup.load_as())
    return assembled(setup.mesh, lambda number: load_model(setup.load_as(number)))


def abstract_model(setup: Setup, shapes: Shapes | None) -> Decoder:
    """Describe the model that one device has, with shapes for arrays."""
    return abstract(setup.whole, setup.load_as()) if shapes is None else shapes(setup.load_as())


def cache_size(setup: Setup, shapes: Shapes | None = None) -> CacheSize:
    """Return how many blocks the cache gets on this machine.

    On a GPU the loop is compiled to know it. Memory for adapters is not counted.
    """
    setup = dataclasses.replace(setup, config=dataclasses.replace(setup.config, enable_lora=False))
    setup.check()
    known = known_size(setup, shapes)
    return fitted(setup, abstract_model(setup, shapes))[0] if known is None else known


def known_size(setup: Setup, shapes: Shapes | None = None) -> CacheSize | None:
    """Return the cache's size where it is known before anything is loaded: not on a GPU, unless it is given.

    Raises `InputError` if not even one sequence of one block would fit; on a GPU, if that is so beside the
    weights alone.
    """
    stats = machine.memory_stats()
    if setup.config.num_blocks is not None or stats is None:
        return capacity.cache_size(setup)
    of_weights = capacity.weight_bytes(setup)
    if shapes is not None or setup.shards:
        of_weights = _num_bytes(nnx.state(abstract_model(setup, shapes)))
    memory = machine.gpu_budget(setup.config, stats).less(("of weights", of_weights))
    per_block = capacity.bytes_per_block(setup)
    if memory.left < 2 * per_block + capacity.further_bytes(setup, 2):
        raise sizing.no_room(per_block, memory)
    return None


def fitted(setup: Setup, model: Decoder) -> tuple[CacheSize, Run]:
    """Find how many blocks a GPU has memory for beside the loop compiled for them; return also that loop.

    The memory is what is free now, so the model should be loaded. If it has shapes for arrays, its weights
    are counted. Nothing has to be run: the state is measured by its shapes, and XLA knows what the program
    takes. That hardly depends on the number of blocks, so the first program, compiled for a guess, is most
    often the last. Raises `InputError` if not even one sequence of one block would fit.
    """
    config = setup.config
    graphdef, params = nnx.split(model)
    bytes_to_load = 0
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
        bytes_to_load = _num_bytes(params)
        params = _placed(setup.mesh, jax.tree.map(lambda _: BY_SHARD, params), params)
    per_block = capacity.bytes_per_block(setup)
    memory = machine.gpu_budget(config, machine.memory_stats() or {}).less(("of weights", bytes_to_load))
    if config.gpu_memory_utilization > gpu_flags.memory_share():
        logging.warning("the cache gets what is left of %s", memory.what)
    made: dict[int, tuple[Budget, Run]] = {}
    fit_into = functools.partial(
        sizing.most_that_fit, further_bytes=functools.partial(capacity.further_bytes, setup)
    )

    def fit_beside(num_blocks: int) -> int:
        state = state_shapes(setup, model, num_blocks)
        source = Source(setup, graphdef, params, state, by_host=config.loop == "host")
        program = source.kept() or source.compiled()
        of_cache = num_blocks * per_block + capacity.further_bytes(setup, num_blocks)
        of_state = _num_bytes(dataclasses.replace(state, host=None)) - of_cache
        if state.host is not None:
            of_state += _num_bytes(state.host.tables)
        # Two results exist at a time: that of the current run, and that of the last one, which is being read.
        of_loop = program.temporary_bytes + 2 * program.result_bytes
        left = memory.less(("of state", of_state), ("of the compiled loop", of_loop))
        made[num_blocks] = left, source.run(program)
        logging.info("beside the loop compiled for %d blocks: %s", num_blocks, left)
        return fit_into(left.left, per_block)

    most = min(sizing.MOST_BLOCKS, sizing.most_blocks(setup.num_places, config.block_size))
    reckoned = capacity.budget(setup, bytes_to_load).left
    guess = max(fit_into(reckoned, per_block + capacity.state_bytes(setup)[1]), 2)
    num_blocks = sizing.fitted(guess, most, fit_beside)
    if num_blocks < 2:
        raise sizing.no_room(per_block, min((left for left, _ in made.values()), key=lambda left: left.left))
    left, run = made[num_blocks]
    why = sizing.CAPPED if num_blocks == sizing.coarse(most) else sizing.FITTED
    size = CacheSize(num_blocks, per_block, config.block_size, why, left)
    return capacity.with_further(setup, size), run


def run_of(
    setup: Setup,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    state: EngineState,
    *,
    by_host: bool,
) -> Run | None:
    """Return the loop over such a state, with each step launched by the host if `by_host`.

    None means that no program is kept on disk: then `loop.run` compiles one when it is called, and JAX keeps
    it. With several processes there always is a program: none may wait in a collective while others compile.
    """
    source = Source(setup, graphdef, params, state, by_host=by_host)
    program = source.kept()
    if program is None and not by_host and setup.config.num_processes == 1:
        return None
    program = program or source.compiled()
    machine.keep_freed(program.temporary_bytes)
    return source.run(program)


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of a compiled loop: the arguments of `loop.run`, or of its step if the host launches each."""

    setup: Setup
    graphdef: nnx.GraphDef
    params: nnx.State  # of this and of the state shapes with shardings are enough
    state: EngineState
    _: dataclasses.KW_ONLY
    by_host: bool

    @functools.cached_property
    def step_config(self) -> StepConfig:
        # Behind the axis of replicas, if there is one.
        num_blocks, *more_blocks = (queue.place.shape[-1] for queue in self.state.tables.pool.queues)
        return self.setup.step_config(num_blocks, more_blocks)

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """Arguments of the program."""
        numbers = loop.limits(0), np.bool_(False)
        if not self.by_host:
            return self.params, self.state, *numbers
        before = functools.partial(loop.before_run, config=self.step_config, mesh=self.setup.mesh)
        more, _ = jax.eval_shape(before, self.state, *numbers)
        return self.params, (self.state, *more), *numbers

    @property
    def options(self) -> dict[str, str] | None:
        return gpu_flags.STEP_OPTIONS if self.by_host else None

    def lower(self) -> jax.stages.Lowered:
        fixed: dict[str, Any] = {"config": self.step_config, "mesh": self.setup.mesh}
        if not self.by_host:
            return loop.run.lower(self.graphdef, *self.arrays, **fixed)
        one_of_several = num_replicas(self.setup.mesh) > 1
        return loop.run_step.lower(self.graphdef, *self.arrays, **fixed, one_of_several=one_of_several)

    def kept(self) -> Program | None:
        """Return the program, kept on disk from now on; None where programs are not kept."""
        # A program of several processes knows which of them it is in.
        config = self.setup.config
        if config.num_processes > 1 or not config.keep_programs:
            return None
        # What was handed in is what runs: a program is not found by the name of its parts alone.
        if self.setup.code_digest is None:
            return None
        state = self.state
        if num_replicas(self.setup.mesh) > 1:  # of one replica: only the report's structure matters
            state = jax.eval_shape(lambda state: jax.tree.map(lambda x: x[0], state), state)
        prompt_scores = no_prompt_scores(self.step_config, state.rows)
        report = jax.eval_shape(loop.report, state, prompt_scores, state.rows.order)
        what = "run by host" if self.by_host else "run"
        model_config = dataclasses.replace(self.setup.model_config, eos_token_ids=())  # rows have theirs
        dtype = self.setup.dtype
        return programs.kept(
            self.lower,
            made_from=(
                *(what, model_config, dtype, native.why_not(dtype), self.step_config),
                self.setup.code_digest,
                self.setup.draft and dataclasses.replace(self.setup.draft, eos_token_ids=()),
                *(config.tensor_parallel_size, config.tensor_parallel_sums),
                *(config.data_parallel_size, form_of(dtype, config.loop_over_layers)),
            ),
            arrays=self.arrays,
            result=(self.arrays[1], np.bool_(False)) if self.by_host else (self.state, report),
            options=self.options,
            may_call_back=self.setup.has_outsiders,
        )

    def compiled(self) -> Program:
        return programs.compiled(self.lower, self.options)

    def run(self, program: Program) -> Run:
        """Return the loop as a function that runs this program."""
        if not self.by_host:
            return program
        return functools.partial(loop.run_by_host, program, config=self.step_config, mesh=self.setup.mesh)


def create_state(setup: Setup, model: Decoder, num_blocks: int) -> EngineState:
    """Create a state without requests, with a pool in the host's memory if requests are swapped to it."""

    def create(num_blocks: int, *, prefix_caching: bool) -> EngineState:
        made = _created(setup, model, num_blocks, prefix_caching=prefix_caching, mesh=setup.mesh)
        return dataclasses.replace(made, kv_cache=_with_given(made.kv_cache, setup))

    return _with_host(setup, num_blocks, create, lambda cache: jax.device_put(cache, jax.memory.Space.Host))


def state_shapes(setup: Setup, model: Decoder, num_blocks: int) -> EngineState:
    """Return what `create_state` does with shapes for arrays, each with the sharding of its array."""

    def create(num_blocks: int, *, prefix_caching: bool) -> EngineState:
        made = functools.partial(_created, setup, model, num_blocks)
        shapes = jax.eval_shape(functools.partial(made, prefix_caching=prefix_caching))
        return _placed(setup.mesh, per_replica(setup.mesh, specs_of(shapes)), shapes)

    def to_host(cache: KVCache) -> KVCache:
        kind = jax.device_put(np.int32(0), jax.memory.Space.Host).sharding

        def of(like: Any) -> jax.ShapeDtypeStruct:
            named = isinstance(like.sharding, NamedSharding)
            sharding = like.sharding.with_memory_kind(kind.memory_kind) if named else kind
            return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)

        return jax.tree.map(of, cache)

    return _with_host(setup, num_blocks, create, to_host)


def _with_host(
    setup: Setup,
    num_blocks: int,
    create: Callable[..., EngineState],
    to_host: Callable[[KVCache], KVCache],
) -> EngineState:
    config = setup.config
    created = create(num_blocks, prefix_caching=config.enable_prefix_caching)
    if config.preemption_mode != "swap":
        return created
    swapped = create(config.num_host_blocks, prefix_caching=False)
    return dataclasses.replace(created, host=HostPool(swapped.tables, to_host(swapped.kv_cache)))


def _created(
    setup: Setup,
    model: Decoder,
    num_blocks: int,
    *,
    prefix_caching: bool,
    mesh: Mesh | None = None,
) -> EngineState:
    config, more_blocks = setup.config, capacity.more_blocks(setup, num_blocks)

    def cache() -> KVCache:
        made = num_blocks, config.block_size, setup.layout
        own = model.create_cache(*made, setup.grouping.width, setup.cache_heads, *more_blocks)
        return own if model.draft is None else kv_cache.joined(own, model.draft.create_cache(*made))

    return loop.create(
        jax.eval_shape(cache),
        num_rows=config.num_rows,
        max_model_len=setup.max_model_len,
        vocab_size=setup.model_config.vocab_size,
        prefix_caching=prefix_caching,
        num_groups=setup.grouping.num_groups,
        first_blocks=setup.grouping.first_blocks(config.block_size),
        classes=setup.grouping.classes,
        more_blocks=more_blocks,
        policy=setup.policy,
        on=setup.features,
        mesh=mesh,
    )


def _with_given(cache: KVCache, setup: Setup) -> KVCache:
    """Fill in the arrays that a layout is given for each head, on the devices that have these heads."""
    mesh = setup.mesh
    if mesh is None:
        return cache
    size, sizes = setup.config.tensor_parallel_size, (cache.num_layers, cache.num_kv_heads)
    each = [cache.layout.given(cache.num_kv_heads, device, size) for device in range(size)]

    def put(name: str, old: jax.Array) -> jax.Array:
        of_shards = np.concatenate([np.broadcast_to(its[name], sizes) for its in each])
        assert isinstance(old.sharding, NamedSharding)
        given: jax.Array = from_host(mesh, old.sharding.spec, np.broadcast_to(of_shards, old.shape))
        return given

    return dataclasses.replace(
        cache, shared=cache.shared | {name: put(name, cache.shared[name]) for name in each[0]}
    )


def _placed(mesh: Mesh | None, specs: Any, tree: Any) -> Any:
    """Return shapes with the shardings of their arrays: the one device, or the mesh with these specs."""
    if mesh is not None:
        return placed(mesh, specs, tree)
    device = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def _num_bytes(tree: Any) -> int:
    """Return the bytes that a tree of arrays or shapes takes on one device."""

    def size(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        return math.prod(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))

    return sum(size(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
