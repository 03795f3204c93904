"""Adapters in the host's memory, and the adapter slots of the device.

An adapter is read once, by the thread that asks for it first. The device has a fixed number of adapter slots.
A request gets a row when its adapter has a slot, which it keeps while any request with that adapter has a
row.
"""

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Collection, Sequence

import numpy as np
from flax import nnx

from jaxpaged.checks import InputError, check
from jaxpaged.engine.setup import Setup
from jaxpaged.lora import LoRARequest
from jaxpaged.models import lora
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.layers import AdapterParam
from jaxpaged.models.lora import Arrays
from jaxpaged.models.names import Names
from jaxpaged.parallel.mesh import repeated


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that was read: a new object each time."""

    request: LoRARequest
    number: int  # rises from one to the next, from 1 on: what was computed with one is no other's
    arrays: Arrays


class Adapters:
    """The adapters in the host's memory by their ids, for any thread.

    most: how many are kept, the last ones used; None: all.
    nothing: arrays of an adapter that changes nothing.
    """

    def __init__(
        self, read: Callable[[LoRARequest], Arrays], most: int | None = None, nothing: Arrays | None = None
    ) -> None:
        self.nothing = nothing or {}
        self._read, self._most = read, most
        self._loaded: collections.OrderedDict[int, Adapter] = collections.OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def get(self, request: LoRARequest) -> Adapter:
        """Return an adapter, read if it has to be.

        Raises `InputError` if it is not for the model, or if its id belongs to another adapter.
        """
        check("lora_request", request, "None or a LoRARequest", isinstance(request, LoRARequest))
        if (known := self._known(request)) is not None:
            return known
        arrays = self._read(request)  # without the lock: others need not wait for the disk
        with self._lock:
            made = Adapter(request, next(self._numbers), arrays)
            made = self._loaded.setdefault(request.lora_int_id, made)
            while self._most is not None and len(self._loaded) > self._most:
                self._loaded.popitem(last=False)
            return made

    def _known(self, request: LoRARequest) -> Adapter | None:
        with self._lock:
            known = self._loaded.get(request.lora_int_id)
            if known is None:
                return None
            self._loaded.move_to_end(request.lora_int_id)
        its = known.request.lora_name, known.request.lora_path
        if its != (request.lora_name, request.lora_path):
            raise InputError(
                f"lora_int_id={request.lora_int_id} must be another for {request.lora_name!r}: it is that of "
                f"{its[0]!r} from {its[1]!r}"
            )
        return known

    def has(self, request: LoRARequest) -> bool:
        """Check whether an adapter is here, so that nothing has to be read."""
        return request.lora_int_id in self._loaded

    def remove(self, lora_int_id: int) -> bool:
        """Forget one; False if there is none. Requests that came before keep what they have."""
        with self._lock:
            return self._loaded.pop(lora_int_id, None) is not None

    def ids(self) -> set[int]:
        with self._lock:
            return {*self._loaded}


def beside(model: Decoder, names: Names | None, setup: Setup) -> Adapters | None:
    """Make room for adapters beside a model's weights, and return what reads them; None without
    `enable_lora`.

    `names` are the names of the weights in an adapter's files. Under tensor parallelism arrays have those of
    all shards along their first axis.
    """
    config, mesh, shards = setup.config, setup.mesh, setup.shards
    if not config.enable_lora:
        return None
    check("adapter_names", names, "those of the model's family, for enable_lora", names is not None)
    assert names is not None
    lora.make_room(model, names, config.max_loras, config.max_lora_rank)
    more = names, config.max_lora_rank, model.dtype
    if mesh is not None:
        nnx.update(model, repeated(mesh, nnx.state(model, AdapterParam)))

    model_config = model.config

    def read(request: LoRARequest) -> Arrays:
        if not shards:
            return lora.read(request, model_config, *more)
        return _joined([lora.read(request, shard.whole, *more, shard) for shard in shards])

    nothing = lora.nothing(model_config, *more)
    return Adapters(read, config.max_cpu_loras, _joined([nothing] * len(shards)) if shards else nothing)


def _joined(each: Sequence[Arrays]) -> Arrays:
    """Concatenate the arrays of all shards."""
    return {
        role: (np.concatenate([its[role][0] for its in each]), np.concatenate([its[role][1] for its in each]))
        for role in each[0]
    }


class OnDevice:
    """The adapter slots of the device, and which adapter has which. For one thread."""

    def __init__(self, num_rooms: int) -> None:
        self._rooms: list[Adapter | None] = [None] * num_rooms
        self._last_used = [0] * num_rooms
        self._clock = itertools.count(1)

    def number_of(self, adapter: Adapter | None) -> int:
        """Return the number of an adapter's slot, from 1 on; 0 for None. The adapter must have a slot."""
        return 0 if adapter is None else 1 + self._rooms.index(adapter)

    def has_room(self, adapter: Adapter, in_use: Collection[Adapter | None]) -> bool:
        """Check whether `find` would give the adapter a slot."""
        return adapter in self._rooms or any(its not in in_use for its in self._rooms)

    def find(self, adapter: Adapter, in_use: Collection[Adapter | None]) -> tuple[int | None, bool]:
        """Give an adapter a slot if it has none: the longest unused one that is not in use.

        Returns: the slot's number, None if there is none; and whether the adapter has to be written there.
        """
        if adapter in self._rooms:
            place, is_new = self._rooms.index(adapter), False
        else:
            free = [i for i, its in enumerate(self._rooms) if its not in in_use]
            if not free:
                return None, False
            place, is_new = min(free, key=lambda i: self._last_used[i]), True
        self._rooms[place], self._last_used[place] = adapter, next(self._clock)
        return 1 + place, is_new
