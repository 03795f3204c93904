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

# Specs of global arrays: the shards' arrays one after the other along the first axis; or on each device the
# same.
BY_SHARD, ON_EACH = PartitionSpec(MODEL), PartitionSpec()


def mesh_of(size: int, replicas: int = 1, num_processes: int = 1) -> Mesh:
    """Make a mesh of `replicas` replicas with `size` devices each, the same number from each process.

    Raises `InputError` if there are fewer devices.
    """
    each = (
        [jax.local_devices(i) for i in range(num_processes)] if num_processes > 1 else [jax.local_devices()]
    )
    count = num_processes * min(len(of_process) for of_process in each)
    what = f"the {each[0][0].platform} devices that JAX has"
    if each[0][0].platform == "cpu":
        what += " (JAX_NUM_CPU_DEVICES in the environment says how many)"
    check("tensor_parallel_size", size, f"at most {count}, {what}", size <= count)
    max_replicas = count // size
    rule = f"at most {max_replicas}: a replica has tensor_parallel_size={size} of {count}, {what}"
    check("data_parallel_size", replicas, rule, replicas <= max_replicas)
    devices = [device for of_process in each for device in of_process[: size * replicas // num_processes]]
    return Mesh(np.array(devices).reshape(replicas, size), (DATA, MODEL))


def num_replicas(mesh: Mesh | None) -> int:
    """Return how many replicas of the model a mesh has; 1 without a mesh."""
    return 1 if mesh is None else mesh.shape[DATA]


def per_replica(mesh: Mesh | None, specs: Any) -> Any:
    """Return the specs of arrays that each replica has of its own, from their specs inside one replica.

    With several replicas the arrays have one more axis, the first, that counts replicas.
    """
    if num_replicas(mesh) == 1:
        return specs
    return jax.tree.map(lambda spec: PartitionSpec(DATA, *spec), specs)


def drop_replica_axis(tree: Any) -> Any:
    """Drop the first axis, of size 1 on a device, from arrays that each replica has of its own."""
    return jax.tree.map(lambda x: lax.squeeze(x, (0,)), tree)


def add_replica_axis(tree: Any) -> Any:
    """Add a first axis of size 1 to arrays that each replica has of its own."""
    return jax.tree.map(lambda x: lax.expand_dims(x, (0,)), tree)


def on_each_shard(
    function: Callable[..., Any], mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any
) -> Callable[..., Any]:
    """Return the function of global arrays that runs `function` on every device, on the device's part of
    them.
    """
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def placed(mesh: Mesh, specs: Any, tree: Any) -> Any:
    """Return the shapes and shardings of global arrays, from the shapes of one shard's arrays and their
    specs.
    """

    def of(spec: PartitionSpec, like: Any) -> jax.ShapeDtypeStruct:
        leading, rest = ((mesh.shape[DATA],), spec[1:]) if DATA in spec else ((), tuple(spec))
        shape = like.shape if MODEL not in rest else (like.shape[0] * mesh.shape[MODEL], *like.shape[1:])
        return jax.ShapeDtypeStruct((*leading, *shape), like.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(of, specs, tree)


def shards_here(mesh: Mesh) -> list[int]:
    """Return the numbers of the shards that this process has, in order."""
    firsts = mesh.devices[0]  # of replica 0
    return [i for i, device in enumerate(firsts) if device.process_index == jax.process_index()]


def assembled[Model: nnx.Module](mesh: Mesh, load: Callable[[int], Model]) -> Model:
    """Return the model whose arrays are sharded, loading one shard after the other.

    load: loads the shard of a number. Its arrays go to the shard's devices at once: nothing is copied later,
    and no device ever has more than its own. The other replicas' devices get theirs from the first replica's;
    other processes load theirs.
    """
    devices = mesh.devices  # [replicas, shards]

    def loaded(number: int) -> tuple[nnx.GraphDef, list[nnx.State]]:
        """Load one shard and put its arrays on its device in every replica."""
        with jax.default_device(devices[0, number]):
            graphdef, state = nnx.split(load(number))
        return graphdef, [jax.device_put(state, device) for device in devices[:, number]]

    shards = [loaded(number) for number in shards_here(mesh)]
    states = [states[replica] for replica in range(devices.shape[0]) for _, states in shards]
    return nnx.merge(shards[0][0], jax.tree.map(lambda *parts: joined_by_shard(mesh, parts), *states))


def from_host(mesh: Mesh, spec: PartitionSpec, tree: Any) -> Any:
    """Put NumPy arrays, which all processes have alike, on the devices: each device gets its part alone."""
    place = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, place, x.__getitem__), tree)


def repeated(mesh: Mesh, tree: Any) -> Any:
    """Return global arrays of which every shard has the same values."""
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return jax.tree.map(
        lambda x: joined_by_shard(mesh, [jax.device_put(x, device) for device in devices]), tree
    )


def joined_by_shard(mesh: Mesh, parts: Iterable[jax.Array]) -> jax.Array:
    """Join the arrays of this process's devices into one global array, in the order of the replicas."""
    arrays = list(parts)
    first, *rest = arrays[0].shape
    shape = (first * mesh.shape[MODEL], *rest)
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, BY_SHARD), arrays)
