"""The devices of a model, and arrays and functions over all of them."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.checks import check
from jaxpaged.models.shards import DATA, MODEL

# An array of shards is theirs one after the other, along its first axis; or the same on each device.
BY_SHARD, ON_EACH = PartitionSpec(MODEL), PartitionSpec()


def mesh_of(size: int, groups: int = 1, num_processes: int = 1) -> Mesh:
    """Groups of so many devices, of each process the first ones, alike. Raises `InputError` if there are
    fewer.
    """
    each = (
        [jax.local_devices(i) for i in range(num_processes)] if num_processes > 1 else [jax.local_devices()]
    )
    count = num_processes * min(len(its) for its in each)
    what = f"the {each[0][0].platform} devices that JAX has"
    if each[0][0].platform == "cpu":
        what += " (JAX_NUM_CPU_DEVICES in the environment says how many)"
    check("tensor_parallel_size", size, f"at most {count}, {what}", size <= count)
    most = count // size
    rule = f"at most {most}: a group has tensor_parallel_size={size} of {count}, {what}"
    check("data_parallel_size", groups, rule, groups <= most)
    devices = [device for its in each for device in its[: size * groups // num_processes]]
    return Mesh(np.array(devices).reshape(groups, size), (DATA, MODEL))


def num_replicas(mesh: Mesh | None) -> int:
    return 1 if mesh is None else mesh.shape[DATA]


def per_replica(mesh: Mesh | None, specs: Any) -> Any:
    """Where arrays lie that each group has of its own, from where a group's lie: with several groups they
    have one more axis, the first, for the groups.
    """
    if num_replicas(mesh) == 1:
        return specs
    return jax.tree.map(lambda spec: PartitionSpec(DATA, *spec), specs)


def drop_replica_axis(tree: Any) -> Any:
    """What a device has of such arrays, without their first axis."""
    return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)


def add_replica_axis(tree: Any) -> Any:
    """With it."""
    return jax.tree.map(lambda x: lax.expand_dims(x, (0,)), tree)


def on_each_shard(
    function: Callable[..., Any], mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any
) -> Callable[..., Any]:
    """The function as each shard computes it, of its own parts of the arrays: as one of the arrays."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def placed(mesh: Mesh, specs: Any, tree: Any) -> Any:
    """Shapes of one shard's arrays as those of all shards', and groups', with the places of the arrays."""

    def of(spec: PartitionSpec, like: Any) -> jax.ShapeDtypeStruct:
        groups, rest = ((mesh.shape[DATA],), spec[1:]) if DATA in spec else ((), tuple(spec))
        shape = like.shape if MODEL not in rest else (like.shape[0] * mesh.shape[MODEL], *like.shape[1:])
        return jax.ShapeDtypeStruct((*groups, *shape), like.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(of, specs, tree)


def assembled[Model: nnx.Module](mesh: Mesh, load: Callable[[int], Model]) -> Model:
    """The model whose arrays are those of its shards, which `load` loads by their numbers, one after the
    other, each where it will be: nothing is copied, and no device has more than its own at any time. Other
    groups' devices have theirs from the first group's, and other processes load theirs.
    """
    devices = mesh.devices  # [groups, shards]
    here = [i for i, device in enumerate(devices[0]) if device.process_index == jax.process_index()]

    def loaded(number: int) -> tuple[nnx.GraphDef, list[nnx.State]]:
        with jax.default_device(devices[0, number]):
            graphdef, state = nnx.split(load(number))
        return graphdef, [jax.device_put(state, device) for device in devices[:, number]]

    shards = [loaded(number) for number in here]
    states = [states[group] for group in range(devices.shape[0]) for _, states in shards]
    return nnx.merge(shards[0][0], jax.tree.map(lambda *parts: _joined(mesh, parts), *states))


def from_host(mesh: Mesh, spec: PartitionSpec, tree: Any) -> Any:
    """NumPy arrays of all devices, the same in each process: each device gets what is its own alone."""
    place = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, x.__getitem__), tree)


def repeated(mesh: Mesh, tree: Any) -> Any:
    """Arrays of shards that all have the same."""
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return jax.tree.map(lambda x: _joined(mesh, [jax.device_put(x, device) for device in devices]), tree)


def _joined(mesh: Mesh, parts: Iterable[jax.Array]) -> jax.Array:
    """From those of all devices of this process, a group's after the other."""
    arrays = list(parts)
    first, *rest = arrays[0].shape
    shape = (first * mesh.shape[MODEL], *rest)
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, BY_SHARD), arrays)
