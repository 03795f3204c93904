"""Adapters in the host's memory, and which of them have room on the device.

An adapter is read once, by the thread that asks for it first. On the device there is room for a fixed number;
a request gets a row when its adapter is there, and while any request with that adapter has a row it stays.
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
    """One that was read: an object of its own each time."""

    request: LoRARequest
    number: int  # rises from one to the next, from 1 on: what was computed with one is no other's
    arrays: Arrays


class Adapters:
    """Those in the host's memory by their ids, at most so many; None: no limit. For any thread.

    `nothing` are the arrays of one that changes nothing.
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
        """The adapter, read if it has to be. Raises `InputError` if it is not for the model, or its id is
        another's.
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
        """Whether it is here, and nothing has to be read."""
        return request.lora_int_id in self._loaded

    def remove(self, lora_int_id: int) -> bool:
        """Forget one; False if there is none. Requests that came before keep what they have."""
        with self._lock:
            return self._loaded.pop(lora_int_id, None) is not None

    def ids(self) -> set[int]:
        with self._lock:
            return {*self._loaded}


def beside(model: Decoder, names: Names | None, setup: Setup) -> Adapters | None:
    """Make room for adapters beside a model's weights, and know how they are read; None where there are none.

    `names`: what adapters call the weights. Under tensor parallelism, shards' arrays are joined along the
    first axis.
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
    """Those of all shards, one after the other."""
    return {
        role: (np.concatenate([its[role][0] for its in each]), np.concatenate([its[role][1] for its in each]))
        for role in each[0]
    }


class OnDevice:
    """Which adapter has which room, of so many; for one thread."""

    def __init__(self, num_rooms: int) -> None:
        self._rooms: list[Adapter | None] = [None] * num_rooms
        self._last_used = [0] * num_rooms
        self._clock = itertools.count(1)

    def number_of(self, adapter: Adapter | None) -> int:
        """Its number there, from 1 on; 0 of None. It must be there."""
        return 0 if adapter is None else 1 + self._rooms.index(adapter)

    def has_room(self, adapter: Adapter, in_use: Collection[Adapter | None]) -> bool:
        """Whether `find` would give it a number."""
        return adapter in self._rooms or any(its not in in_use for its in self._rooms)

    def find(self, adapter: Adapter, in_use: Collection[Adapter | None]) -> tuple[int | None, bool]:
        """Give an adapter room, if it has none: the longest unused, of those that are not in use.

        Its number, None if there is no room; and whether it has to be written there.
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
