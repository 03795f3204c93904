"""New weights in the place of old ones: arrays of the same shapes, so no program is compiled for them."""

from collections.abc import Mapping
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
from jaxpaged.parallel.mesh import joined_by_shard, shards_here

DRAFT = "draft"  # name of a decoder's model that drafts
HOW = "load the model unquantised, or with quantization='int8', 'int4' or 'fp8', to update it"


def without_adapters(params: nnx.State) -> nnx.State:
    """Return the model's weights alone, as the loop takes them."""
    _, weights = nnx.split_state(params, AdapterParam, ...)
    return weights


def with_weights(params: nnx.State, weights: nnx.State) -> nnx.State:
    """Return parameters with these weights beside their adapters and a model that drafts."""
    adapters, draft, _ = nnx.split_state(params, AdapterParam, nnx.PathContains(DRAFT), ...)
    return nnx.merge_state(adapters, draft, weights)


def own_weights(params: nnx.State) -> nnx.State:
    """Return the model's weights without those of a model that drafts for it."""
    _, _, weights = nnx.split_state(params, AdapterParam, nnx.PathContains(DRAFT), ...)
    return weights


def check_updatable(setup: Setup, params: nnx.State) -> None:
    """Raise `InputError` for a model whose weights are quantised as its file has them."""
    kept = any(
        isinstance(its.get_value(), QuantisedWeight) for _, its in nnx.to_flat_state(own_weights(params))
    )
    if kept and on_load(setup.config.quantization) is None:
        raise InputError(f"weights that are quantised in the model's file must stay as they are: {HOW}")


def updated(setup: Setup, names: Names, given: Mapping[str, Any], params: nnx.State) -> nnx.State:
    """Return parameters with the arrays given by `changes.Given` in the place of former ones.

    What does not change is shared with `params`, which stay as they are. Shapes in place of arrays stand for
    weights that are not there: then all must be given. Raises `InputError` if pieces of a quantised weight
    are missing.
    """
    quantisation = on_load(setup.config.quantization)

    def changes(number: int) -> dict[Any, Any]:
        weights = ChangedWeights(setup.whole, names, given, setup.load_as(number), quantisation)
        flat = nnx.to_flat_state(nnx.state(Decoder(weights)))
        values = ((path, its.get_value()) for path, its in flat)
        return {path: value for path, value in values if isinstance(value, Change | StackChange)}

    mesh = setup.mesh
    numbers = [0] if mesh is None else shards_here(mesh)
    each = [changes(number) for number in numbers]
    made = []
    for path, variable in nnx.to_flat_state(params):
        old, new = variable.get_value(), None
        if path in each[0] and mesh is None:
            new = _on_device(each[0][path].into(old), old)
        elif path in each[0]:
            new = _on_mesh(setup, numbers, [its[path] for its in each], old)
        made.append((path, variable if new is None else variable.replace(new)))
    return nnx.from_flat_state(made)


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
        [its] = [shard.data for shard in array.addressable_shards if shard.device == device]
        return its

    columns = [list(mesh.devices[:, number]) for number in numbers]
    olds = [jax.tree.map(lambda x, d=column[0]: part(x, d), old) for column in columns]
    news = [change.into(its) for change, its in zip(changes, olds, strict=True)]
    if all(new is None for new in news):
        return None

    def on(replica: int, i: int) -> Any:
        device = columns[i][replica]
        if news[i] is None:
            return jax.tree.map(lambda x: part(x, device), old)
        return jax.tree.map(lambda x: jax.device_put(x, device), news[i])

    parts = [on(replica, i) for replica in range(mesh.devices.shape[0]) for i in range(len(numbers))]
    return jax.tree.map(lambda *its: joined_by_shard(mesh, its), *parts)


def adopted(params: nnx.State, weights: nnx.State) -> nnx.State:
    """Return parameters with the weights of a state like theirs, as `LLM.weights` gives it.

    JAX's arrays that have the same sharding are shared, not copied. Raises `InputError` for another tree,
    and for other shapes or dtypes.
    """
    own, given = own_weights(params), own_weights(weights)
    tree: Any = jax.tree.structure(own)
    if jax.tree.structure(given) != tree:
        raise InputError("weights must have the tree of LLM.weights, or names of the model's weights")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(own)]
    pairs = list(zip(paths, jax.tree.leaves(own), jax.tree.leaves(given), strict=True))
    for path, old, new in pairs:
        its, must = (getattr(new, "shape", None), getattr(new, "dtype", None)), (old.shape, old.dtype)
        if its != must:
            raise InputError(f"weights{path} has shape and dtype {its}, must have {must}")

    def put(old: Any, new: Any) -> Any:
        if isinstance(new, np.ndarray):  # a copy of its own: the caller may go on to change the array
            new = new.copy() if isinstance(old.sharding, NamedSharding) else placed(new)
        return jax.device_put(new, old.sharding)

    leaves = [put(old, new) for _, old, new in pairs]
    return with_weights(params, jax.tree.unflatten(tree, leaves))
