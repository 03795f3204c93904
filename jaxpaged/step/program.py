"""Programs over a mesh: how a function of one device's arrays is compiled for several devices.

Where an array lies stands beside the argument, as its annotation:

    `Static[T]`      no array: the program is compiled for the value
    `PerShard[T]`    each shard of the model has its own; all replicas have the same
    `PerReplica[T]`  each replica has its own; inside a replica, `specs_of` says which shard has what
    no annotation    the same on every device

The return annotation (`PerShard` or `PerReplica`) says in the same way where results lie.
"""

import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args

import jax
from jax.sharding import Mesh

from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.parallel.mesh import (
    BY_SHARD,
    ON_EACH,
    add_replica_axis,
    drop_replica_axis,
    num_replicas,
    on_each_shard,
    per_replica,
)


class Placement(enum.Enum):
    """Placements of an argument or a result of a program."""

    STATIC = enum.auto()
    PER_SHARD = enum.auto()
    PER_REPLICA = enum.auto()
    EVERYWHERE = enum.auto()


T = TypeVar("T")
Static = Annotated[T, Placement.STATIC]
PerShard = Annotated[T, Placement.PER_SHARD]
PerReplica = Annotated[T, Placement.PER_REPLICA]


class Program:
    """A compiled function. Called without `mesh` it runs on one device.

    With `mesh`, each shard of each replica runs it on its own arrays. With several replicas, the `PerReplica`
    arguments and results have one more axis, the first, that counts replicas.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        donate: str | None,
        results: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._donate, self._results = function, donate, results
        self._signature = inspect.signature(function)
        annotations = inspect.get_annotations(function)
        self._result_placement = _placement(annotations.pop("return"))
        self._placements = {name: _placement(annotation) for name, annotation in annotations.items()}
        self._jitted: dict[Mesh | None, Any] = {}

    def __call__(self, *args: Any, mesh: Mesh | None = None, **options: Any) -> Any:
        return self._jit(mesh)(*args, **options)

    def lower(self, *args: Any, mesh: Mesh | None = None, **options: Any) -> jax.stages.Lowered:
        """Lower the program for these arguments, of which shapes with shardings are enough."""
        return self._jit(mesh).lower(*args, **options)

    def trace(self, *args: Any, mesh: Mesh | None = None, **options: Any) -> jax.stages.Traced:
        """Trace the program for these arguments, of which shapes with shardings are enough."""
        return self._jit(mesh).trace(*args, **options)

    def num_compiled(self) -> int:
        """Return how often the program was compiled in this process: tests hold it."""
        return sum(jitted._cache_size() for jitted in self._jitted.values())

    def _jit(self, mesh: Mesh | None) -> Any:
        """Return the function under `jax.jit`, for one device or for a mesh; the same object every time."""
        if mesh not in self._jitted:
            function = self._function
            if mesh is not None:
                function = functools.wraps(function)(functools.partial(self._run, mesh))
            static = [name for name, placement in self._placements.items() if placement is Placement.STATIC]
            self._jitted[mesh] = jax.jit(function, static_argnames=static, donate_argnames=self._donate or ())
        return self._jitted[mesh]

    def _run(self, mesh: Mesh, /, *args: Any, **options: Any) -> Any:
        """Run the function on every device of a mesh, on the arrays that the device has."""
        given = self._signature.bind(*args, **options).arguments
        arrays = {name: x for name, x in given.items() if self._placements[name] is not Placement.STATIC}
        fixed = functools.partial(self._function, **{n: x for n, x in given.items() if n not in arrays})
        per_replica_names = {name for name in arrays if self._placements[name] is Placement.PER_REPLICA}
        has_axis = num_replicas(mesh) > 1

        def run_one(arrays: Mapping[str, Any], replica_of: Callable[[Any], Any]) -> Any:
            if has_axis:
                arrays = {
                    name: replica_of(x) if name in per_replica_names else x for name, x in arrays.items()
                }
            return fixed(**arrays)

        def run_shard(arrays: Mapping[str, Any]) -> Any:
            results = run_one(arrays, drop_replica_axis)
            return add_replica_axis(results) if adds_axis else results

        def first_replica(tree: Any) -> Any:
            return jax.tree.map(lambda x: x[0], tree)

        adds_axis = has_axis and self._result_placement is Placement.PER_REPLICA
        specs = {name: self._spec(name, x) for name, x in arrays.items()}
        if self._results is not None:
            result_specs = self._results(specs)
        else:
            result_specs = specs_of(jax.eval_shape(lambda arrays: run_one(arrays, first_replica), arrays))
        if adds_axis:
            result_specs = per_replica(mesh, result_specs)
        in_specs = {
            name: per_replica(mesh, spec) if name in per_replica_names else spec
            for name, spec in specs.items()
        }
        return on_each_shard(run_shard, mesh, (in_specs,), result_specs)(arrays)

    def _spec(self, name: str, array: Any) -> Any:
        return BY_SHARD if self._placements[name] is Placement.PER_SHARD else specs_of(array)


def program(
    *, donate: str | None = None, results: Callable[[dict[str, Any]], Any] | None = None
) -> Callable[[Callable[..., Any]], Program]:
    """Compile a function whose arguments and results are annotated with where they lie.

    donate: the name of an argument whose memory the results may take.
    results: returns the `PartitionSpec`s of the results inside one replica, from those of the arguments by
        name. Without it the function is traced once more to find them by `specs_of`: not possible where
        shards talk to each other.
    """
    return lambda function: Program(function, donate, results)


def specs_of(tree: Any) -> Any:
    """Return where a tree's arrays lie inside one replica: K and V by shard, the rest the same on each."""

    def spec(node: Any) -> Any:
        if isinstance(node, KVCache):
            return jax.tree.map(lambda _: BY_SHARD, node)
        return ON_EACH

    return jax.tree.map(spec, tree, is_leaf=lambda node: isinstance(node, KVCache))


def _placement(annotation: Any) -> Placement:
    marks = [mark for mark in get_args(annotation) if isinstance(mark, Placement)]
    return marks[0] if marks else Placement.EVERYWHERE
