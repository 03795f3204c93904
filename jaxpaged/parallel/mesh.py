"""The devices of a model, and arrays and functions over all of them."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpaged.checks import check
from jaxpaged.parallel.shards import DATA, MODEL

# An array of shards is theirs one after the other, along its first axis; or the same on each device.
BY_SHARD, ON_EACH = PartitionSpec(MODEL), PartitionSpec()


def mesh_of(size: int, num_processes: int = 1) -> Mesh:
    """The first so many devices of all processes, of each alike. Raises `InputError` if there are fewer."""
    each = [jax.local_devices(i) for i in range(num_processes)]
    devices = [device for its in each for device in its[: size // num_processes]]
    available = num_processes * min(len(its) for its in each)
    rule = f"at most {available}, the {each[0][0].platform} devices that JAX has"
    if each[0][0].platform == "cpu":
        rule += " (JAX_NUM_CPU_DEVICES in the environment says how many)"
    check("tensor_parallel_size", size, rule, size <= available)
    return Mesh(np.array(devices).reshape(1, size), (DATA, MODEL))


def on_each_shard(
    function: Callable[..., Any], mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any
) -> Callable[..., Any]:
    """The function as each shard computes it, of its own parts of the arrays: as one of the arrays."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def placed(mesh: Mesh, specs: Any, tree: Any) -> Any:
    """Shapes of one shard's arrays as those of all shards', with the places of the arrays."""

    def of(spec: PartitionSpec, like: Any) -> jax.ShapeDtypeStruct:
        first = like.shape[0] * mesh.shape[MODEL] if spec == BY_SHARD else None
        shape = like.shape if first is None else (first, *like.shape[1:])
        return jax.ShapeDtypeStruct(shape, like.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(of, specs, tree)


def assembled[Model: nnx.Module](mesh: Mesh, load: Callable[[int], Model]) -> Model:
    """The model whose arrays are those of its shares, which `load` loads by their numbers, one after the
    other, each where it will be: nothing is copied, and no device has more than its own at any time. Those of
    other processes are theirs to load.
    """
    devices = list(mesh.devices.reshape(-1))
    here = [number for number, device in enumerate(devices) if device.process_index == jax.process_index()]

    def loaded(number: int) -> tuple[nnx.GraphDef, nnx.State]:
        with jax.default_device(devices[number]):
            graphdef, state = nnx.split(load(number))
        return graphdef, jax.tree.map(lambda array: jax.device_put(array, devices[number]), state)

    shares = [loaded(number) for number in here]
    states = [state for _, state in shares]
    return nnx.merge(shares[0][0], jax.tree.map(lambda *parts: _joined(mesh, parts), *states))


def repeated(mesh: Mesh, tree: Any) -> Any:
    """Arrays of shards that all have the same."""
    devices = list(mesh.devices.reshape(-1))
    return jax.tree.map(lambda x: _joined(mesh, [jax.device_put(x, device) for device in devices]), tree)


def _joined(mesh: Mesh, parts: Iterable[jax.Array]) -> jax.Array:
    arrays = list(parts)
    first, *rest = arrays[0].shape
    shape = (first * mesh.size, *rest)
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, BY_SHARD), arrays)
