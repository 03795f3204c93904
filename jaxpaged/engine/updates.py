"""New weights in the place of old ones: arrays of the same shapes, so no program is compiled for them."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxpaged.checks import InputError
from jaxpaged.engine.setup import Setup
from jaxpaged.models.change import Change, StackChange
from jaxpaged.models.changes import ChangedWeights
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.host_arrays import placed
from jaxpaged.models.layers import AdapterParam
from jaxpaged.models.names import Names
from jaxpaged.models.quantised.codes import QuantisedWeight
from jaxpaged.models.quantised.on_load import on_load
from jaxpaged.models.weights import check_numbers
from jaxpaged.parallel.mesh import joined_by_shard, shards_here

DRAFT = "draft"  # name of a decoder's model that drafts
HOW = "load the model unquantised, or with quantization='int8', 'int4' or 'fp8', to update it"


type Path = tuple[str | int, ...]
type Pairs = Iterator[tuple[Path, nnx.Variable]]


def pairs(state: Mapping[Any, Any], path: Path = ()) -> Pairs:
    """Yield the variables of a state with their paths.

    Flax's own functions for this leave cycles of references to them, so that arrays stay until Python looks
    for such cycles.
    """
    for key, value in state.items():
        if isinstance(value, nnx.Variable):
            yield (*path, key), value
        else:
            yield from pairs(value, (*path, key))


def _state_of(variables: Iterable[tuple[Path, nnx.Variable]]) -> nnx.State:
    tree: dict[Any, Any] = {}
    for (*folders, last), variable in variables:
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = variable
    return nnx.State(tree)


def without_adapters(params: nnx.State) -> nnx.State:
    """Return the model's weights alone, as the loop takes them."""
    return _state_of(pair for pair in pairs(params) if not isinstance(pair[1], AdapterParam))


def with_weights(params: nnx.State, weights: nnx.State) -> nnx.State:
    """Return parameters with these weights beside their adapters and a model that drafts."""
    kept = (pair for pair in pairs(params) if isinstance(pair[1], AdapterParam) or DRAFT in pair[0])
    return _state_of([*kept, *pairs(weights)])


def own_weights(params: nnx.State) -> nnx.State:
    """Return the model's weights without those of a model that drafts for it."""
    return _state_of(pair for pair in pairs(params) if _is_own(*pair))


def with_draft(params: nnx.State, load: Callable[[], nnx.State]) -> nnx.State:
    """Return parameters in which the weights of a model that drafts are arrays, loaded if they are away.

    No update brings them: its names are those of the served model.
    """
    draft = [variable.get_value() for path, variable in pairs(params) if DRAFT in path]
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(draft)):
        return params
    kept = (pair for pair in pairs(params) if DRAFT not in pair[0])
    return _state_of([*kept, *(((DRAFT, *path), variable) for path, variable in pairs(load()))])


def _is_own(path: Path, variable: nnx.Variable) -> bool:
    return not isinstance(variable, AdapterParam) and DRAFT not in path


def check_updatable(setup: Setup, params: nnx.State) -> None:
    """Raise `InputError` for a model whose weights are quantised as its file has them."""
    kept = any(
        isinstance(weight.get_value(), QuantisedWeight)
        for path, weight in pairs(params)
        if _is_own(path, weight)
    )
    if kept and on_load(setup.config.quantization) is None:
        raise InputError(f"weights that are quantised in the model's file must stay as they are: {HOW}")


class Update:
    """An update by names, checked as far as it can be before anything changes."""

    def __init__(self, setup: Setup, names: Names, given: Mapping[str, Any]) -> None:
        """Take the arrays given by `changes.Given`.

        Raises `InputError` if pieces of a quantised weight are missing, and for numbers that are not finite,
        where a shard or a quantisation is made of them.
        """
        quantisation = on_load(setup.config.quantization)
        if quantisation is not None or setup.mesh is not None:
            for name, array in given.items():
                check_numbers(name, np.asarray(array))

        def changes(number: int) -> dict[Any, Any]:
            weights = ChangedWeights(setup.whole, names, given, setup.load_as(number), quantisation)
            values = ((path, weight.get_value()) for path, weight in pairs(nnx.state(Decoder(weights))))
            return {path: value for path, value in values if isinstance(value, Change | StackChange)}

        self._setup = setup
        self._numbers = [0] if setup.mesh is None else shards_here(setup.mesh)
        self._each = [changes(number) for number in self._numbers]

    def into(self, params: nnx.State) -> nnx.State:
        """Put the update into parameters, which are the caller's own, and return them. What does not change
        is shared. Of what is all new, each old array that nobody else holds is gone before its successor is
        made.

        Shapes in place of arrays stand for weights that are not there: then all must be given.
        """
        has_looked = False
        for path, variable in pairs(params):
            if path not in self._each[0]:
                continue
            changes = [part[path] for part in self._each]
            old = variable.get_value()
            if all(change.is_whole for change in changes):
                arrays = [
                    weakref.ref(array) for array in jax.tree.leaves(old) if isinstance(array, jax.Array)
                ]
                old = jax.tree.map(shape_of, old)
                variable.set_value(old)
                gc.collect(0)  # lets JAX give back the memory of NumPy's arrays that it has taken over
                if not has_looked and any(array() is not None for array in arrays):
                    gc.collect()  # others hold them, or cycles of references
                    has_looked = True
            new = self._changed(changes, old)
            del old
            if new is not None:
                variable.set_value(new)
        return params

    def _changed(self, changes: list[Any], old: Any) -> Any:
        if self._setup.mesh is None:
            return _on_device(changes[0].into(old), old)
        return _on_mesh(self._setup, self._numbers, changes, old)


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Return what stands for an array that is not there."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _on_device(new: Any, old: Any) -> Any:
    """Put the arrays of a weight where the old ones are; None: they stay."""
    if new is None:
        return None
    return jax.tree.map(lambda array, like: jax.device_put(array, like.sharding), new, old)


def _on_mesh(setup: Setup, numbers: list[int], changes: list[Any], old: Any) -> Any:
    """Return the global arrays after the changes of all shards of this process; None: they stay."""
    mesh = setup.mesh
    assert mesh is not None
    size = setup.config.tensor_parallel_size

    def part(array: Any, device: Any) -> Any:
        if isinstance(array, jax.ShapeDtypeStruct):
            one = jax.sharding.SingleDeviceSharding(device)
            shape = array.shape[0] // size, *array.shape[1:]
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=one)
        [piece] = [shard.data for shard in array.addressable_shards if shard.device == device]
        return piece

    columns = [list(mesh.devices[:, number]) for number in numbers]
    olds = [jax.tree.map(lambda x, d=column[0]: part(x, d), old) for column in columns]
    news = [change.into(of_device) for change, of_device in zip(changes, olds, strict=True)]
    if all(new is None for new in news):
        return None

    def on(replica: int, i: int) -> Any:
        device = columns[i][replica]
        if news[i] is None:
            return jax.tree.map(lambda x: part(x, device), old)
        return jax.tree.map(lambda x: jax.device_put(x, device), news[i])

    parts = [on(replica, i) for replica in range(mesh.devices.shape[0]) for i in range(len(numbers))]
    return jax.tree.map(lambda *pieces: joined_by_shard(mesh, pieces), *parts)


def adopted(params: nnx.State, weights: nnx.State) -> nnx.State:
    """Return parameters with the weights of a state like theirs, as `LLM.weights` gives it.

    JAX's arrays that have the same sharding are shared, not copied. Raises `InputError` for another tree,
    and for other shapes or dtypes.
    """
    held, given = own_weights(params), own_weights(weights)
    tree: Any = jax.tree.structure(held)
    if jax.tree.structure(given) != tree:
        raise InputError("weights must have the tree of LLM.weights, or names of the model's weights")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(held)]
    pairs = list(zip(paths, jax.tree.leaves(held), jax.tree.leaves(given), strict=True))
    for path, old, new in pairs:
        offered, must = (getattr(new, "shape", None), getattr(new, "dtype", None)), (old.shape, old.dtype)
        if offered != must:
            raise InputError(f"weights{path} has shape and dtype {offered}, must have {must}")

    def put(old: Any, new: Any) -> Any:
        if isinstance(new, np.ndarray):  # a copy of its own: the caller may go on to change the array
            new = new.copy() if isinstance(old.sharding, NamedSharding) else placed(new)
        return jax.device_put(new, old.sharding)

    leaves = [put(old, new) for _, old, new in pairs]
    return with_weights(params, jax.tree.unflatten(tree, leaves))
