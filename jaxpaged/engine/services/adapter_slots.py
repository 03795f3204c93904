"""Adapter slots of the device: a fixed number, and which adapter has which.

A request gets a row when its adapter has a slot, which it keeps while any request with that adapter has a
row.
"""

import itertools
from collections.abc import Collection
from typing import Any

from jaxpaged.engine.adapters import Adapter
from jaxpaged.engine.device import Device
from jaxpaged.engine.request import Request
from jaxpaged.engine.request_queue import Queued
from jaxpaged.engine.services.service import InUse, Service
from jaxpaged.models.lora import Arrays
from jaxpaged.step.feature_values import ADAPTERS


class AdapterSlots(Service):
    """Slots that requests' adapters are loaded into: the longest unused one, if the adapter has none.

    nothing: arrays of an adapter that changes nothing.
    """

    def __init__(self, device: Device, num_slots: int, nothing: Arrays) -> None:
        self._device, self._nothing = device, nothing
        self._adapters: list[Adapter | None] = [None] * num_slots
        self._last_used = [0] * num_slots
        self._clock = itertools.count(1)

    def warm_up(self) -> None:
        self._device.put_adapter(self._nothing, 1)

    def has_room(self, request: Request, in_use: InUse) -> bool:
        adapter = request.adapter
        if adapter is None or adapter in self._adapters:
            return True
        return any(other not in in_use.adapters for other in self._adapters)

    def make_room(self, request: Request, in_use: InUse) -> bool:
        if request.adapter is None:
            return True
        slot = self._slot_for(request.adapter, in_use.adapters)
        if slot is None:
            return False
        is_new = self._adapters[slot] is not request.adapter
        self._adapters[slot], self._last_used[slot] = request.adapter, next(self._clock)
        if is_new:
            self._device.put_adapter(request.adapter.arrays, 1 + slot)
        return True

    def _slot_for(self, adapter: Adapter, in_use: Collection[Adapter | None]) -> int | None:
        """Return an adapter's slot, or the longest unused one that is not in use; None if there is none."""
        if adapter in self._adapters:
            return self._adapters.index(adapter)
        free = [slot for slot, other in enumerate(self._adapters) if other not in in_use]
        return min(free, key=lambda slot: self._last_used[slot]) if free else None

    def row_values(self, queued: Queued) -> dict[str, Any]:
        """Return the number of the request's slot, from 1 on; 0 for none."""
        adapter = queued.request.adapter
        return {ADAPTERS: 0 if adapter is None else 1 + self._adapters.index(adapter)}
