"""Adapters in the host's memory: each is read once, by the thread that asks for it first."""

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    """An adapter that was read or given: a new object each time."""

    request: LoRARequest
    number: int  # rises from one to the next, from 1 on: what was computed with one is no other's
    arrays: Arrays
    known_as: frozenset[tuple[str, str]]  # names and paths by which it is asked for, former ones too
    is_given: bool = False  # no file has it: it must not be forgotten


class Adapters:
    """The adapters in the host's memory by their ids, for any thread.

    max_kept: how many are kept, the last ones used; None: all.
    nothing: arrays of an adapter that changes nothing.
    """

    def __init__(
        self,
        read: Callable[[LoRARequest], Arrays],
        max_kept: int | None = None,
        nothing: Arrays | None = None,
    ) -> None:
        self.nothing = nothing or {}
        self._read, self._most = read, max_kept
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
        return self._keep(request, self._read(request))

    def renew(self, request: LoRARequest, arrays: Any = None) -> None:
        """Put an adapter in the place of the one that has its id, if there is one, which its requests keep.

        arrays: a and b by role, as the engine has them, JAX's or NumPy's; None: they are read.

        Raises `InputError`, and changes nothing, if it is not for the model.
        """
        check("lora_request", request, "a LoRARequest", isinstance(request, LoRARequest))
        is_given = arrays is not None
        made = self._copied(arrays) if is_given else self._read(request)
        self._keep(request, made, anew=True, is_given=is_given)

    def _keep(
        self, request: LoRARequest, arrays: Arrays, *, anew: bool = False, is_given: bool = False
    ) -> Adapter:
        """Keep an adapter under its id: `anew`, or if there is none yet. Return the one that is there.

        It was read without the lock: others need not wait for the disk.
        """
        with self._lock:
            said = frozenset({_said(request)})
            if anew and (old := self._loaded.pop(request.lora_int_id, None)) is not None:
                said |= old.known_as
            made = Adapter(request, next(self._numbers), arrays, said, is_given)
            made = self._loaded.setdefault(request.lora_int_id, made)
            read = [number for number, adapter in self._loaded.items() if not adapter.is_given]
            for number in read[: max(len(self._loaded) - (self._most or len(self._loaded)), 0)]:
                del self._loaded[number]
            return made

    def _copied(self, arrays: Any) -> Arrays:
        """Return copies on the host. Raises `InputError` for roles, shapes or types of others."""
        is_mapping = isinstance(arrays, Mapping) and arrays.keys() == self.nothing.keys()
        if not is_mapping or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in arrays.values()):
            raise InputError(
                f"adapter must be a mapping of {', '.join(self.nothing)} to pairs of a and b, as "
                "Learner.adapter gives it"
            )
        for role, likes in self.nothing.items():
            for side, array, like in zip("ab", arrays[role], likes, strict=True):
                given = getattr(array, "shape", None), getattr(array, "dtype", None)
                if given != (like.shape, like.dtype):
                    raise InputError(
                        f"adapter: {side} of {role} has shape and dtype {given}, must have "
                        f"{(like.shape, like.dtype)}"
                    )
        return {role: (np.array(a), np.array(b)) for role, (a, b) in arrays.items()}

    def _known(self, request: LoRARequest) -> Adapter | None:
        with self._lock:
            known = self._loaded.get(request.lora_int_id)
            if known is None:
                return None
            self._loaded.move_to_end(request.lora_int_id)
        if _said(request) not in known.known_as:
            known_names = _said(known.request)
            raise InputError(
                f"lora_int_id={request.lora_int_id} must be another for {request.lora_name!r}: it is that of "
                f"{known_names[0]!r} from {known_names[1]!r}"
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
    config, mesh = setup.config, setup.mesh
    shards = setup.shards or (setup.shard(),)
    if not config.enable_lora:
        return None
    check("adapter_names", names, "those of the model's family, for enable_lora", names is not None)
    assert names is not None
    lora.make_room(model, names, config.max_loras, config.max_lora_rank)
    rank, dtype = config.max_lora_rank, model.dtype
    if mesh is not None:
        nnx.update(model, repeated(mesh, nnx.state(model, AdapterParam)))

    model_config = model.config

    def read(request: LoRARequest) -> Arrays:
        return _joined([lora.read(request, setup.whole, names, rank, dtype, shard) for shard in shards])

    nothing = lora.nothing(model_config, names, rank, dtype, shards[0])
    return Adapters(read, config.max_cpu_loras, _joined([nothing] * len(shards)))


def _joined(each: Sequence[Arrays]) -> Arrays:
    """Concatenate the arrays of all shards."""
    if len(each) == 1:
        return each[0]
    return {
        role: (
            np.concatenate([shard[role][0] for shard in each]),
            np.concatenate([shard[role][1] for shard in each]),
        )
        for role in each[0]
    }


def _said(request: LoRARequest) -> tuple[str, str]:
    """Return what tells adapters of one id apart."""
    return request.lora_name, str(request.lora_path)
