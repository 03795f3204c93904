"""Life cycle of an engine's memory: new weights in the place of old ones, sleep, and waking up."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from flax import nnx

from jaxpaged.checks import check
from jaxpaged.engine import updates
from jaxpaged.engine.device import KV_CACHE, MEMORY, WEIGHTS, Device
from jaxpaged.engine.host_rows import HostRows
from jaxpaged.engine.request import Delta
from jaxpaged.engine.services.service import Service
from jaxpaged.models.changes import Given


class Turns(Protocol):
    """Turns of a driver, as far as it lets others stop them."""

    @property
    def services(self) -> Iterable[Service]: ...

    def settle(self) -> list[Delta]:
        """Read the report of the run under way, so that the device has no work left."""

    def recall(self, rows: Sequence[int]) -> None:
        """Put the requests in these rows back into the queue, with what is known of their answers."""

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes. No run is under way."""


class Lifecycle:
    """The changes of weights and memory between two runs. For the engine's thread only.

    A request that is under way then is put back into the queue, with its tokens: it is computed anew when it
    goes on.
    """

    def __init__(self, device: Device, rows: HostRows, turns: Turns) -> None:
        self._device, self._rows, self._turns = device, rows, turns

    def clear_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while any request has a row."""
        self._turns.settle()
        holds_rows = any(service.num_held_rows for service in self._turns.services)
        if self._rows.has_any or holds_rows or KV_CACHE not in self._device.resident:
            return False
        for service in self._turns.services:
            service.forget()
        self._turns.forget_prefixes()
        return True

    def stand_down(self) -> list[Delta]:
        """Put all that has a row back into the queue, and forget all cached prefixes.

        Raises `InputError`, and changes nothing, while a beam search has rows.
        """
        searches = sum(entry.request.beams is not None for _, entry in self._rows.taken())
        check("rows of beam searches", searches, "0: end or abort them first", not searches)
        deltas, rows = self._turns.settle(), []
        for service in self._turns.services:
            service.settle()
        for row, entry in self._rows.taken():
            if entry.is_aborted:
                self._rows.leave(row)
                deltas.append(Delta.aborted(entry.request))
            else:
                rows.append(row)
        self._turns.recall(rows)
        self._turns.forget_prefixes()
        return deltas

    def restart(self) -> list[Delta]:
        """Forget all cached prefixes, and compute what runs anew: see `stand_down`."""
        return self._without_cache()

    def read_names(self, pairs: Any) -> Given:
        """Check an update by names; see `Given`. Any thread may ask. Raises `InputError`."""
        device = self._device
        check("weights", "an update", "for a model whose names are known", device.names is not None)
        assert device.names is not None
        updates.check_updatable(device.setup, device.params)
        return Given(device.setup.whole, device.names, pairs)

    def update_weights(self, weights: Given | nnx.State, version: int | None = None) -> list[Delta]:
        """Put new weights in the place of old ones, all or none. Raises `InputError`.

        version: the new `weight_version`, above the old one; None: the next.
        """
        device = self._device
        new_version = device.weight_version + 1 if version is None else version
        rule = f"above the version of the present weights, {device.weight_version}"
        check("version", new_version, rule, new_version > device.weight_version)
        if isinstance(weights, nnx.State):
            one_process = device.send_call is None
            check("num_processes", device.setup.config.num_processes, "1 for a pytree", one_process)
            adopted = updates.adopted(device.with_missing_draft() or device.params, weights)
            deltas = self._without_cache()
            device.take(adopted)
        else:
            if device.asleep is not None or weights.missing:
                device.require(WEIGHTS)
            update, params = device.read_update(weights), device.with_missing_draft()
            deltas = self._without_cache()
            if device.send_call is None:
                device.put_update(update, params)
            else:
                device.put_weights({name: np.asarray(array) for name, array in weights.items()})
        device.weight_version = new_version
        return deltas

    def sleep(self, level: int) -> list[Delta]:
        """Give back the cache's memory, and that of the weights: 1 keeps them in the host's, 2 nowhere."""
        if level == 0:
            return self._turns.settle()
        deltas = self._without_cache()
        self._device.release(level)
        return deltas

    def release_kv_cache(self) -> list[Delta]:
        """Give back the cache's memory alone. Raises `InputError` if any memory is away."""
        self._device.require(*MEMORY)
        deltas = self.stand_down()
        self._device.release(0)
        return deltas

    def wake_up(self, what: Sequence[str]) -> None:
        """Take memory again. Weights that were kept nowhere are read from the model's files."""
        resident = self._device.resident
        self._device.restore([name for name in MEMORY if name in what and name not in resident])

    def _without_cache(self) -> list[Delta]:
        """Give all rows back, as `stand_down` does, if there is a cache to lose."""
        return self.stand_down() if KV_CACHE in self._device.resident else []
