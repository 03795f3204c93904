"""Departures: blocks of prompts, and perhaps answers, on their way from the device into tiers."""

import collections
import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from absl import logging

from jaxpaged.contracts.block_stores import BlockKey, StoredBlock
from jaxpaged.engine.device import Device
from jaxpaged.handover import staging
from jaxpaged.tiers import groups
from jaxpaged.tiers.tiers import Tiers

MOST_UNDER_WAY = 8  # pieces that lie twice on the device until they are copied


@dataclasses.dataclass(frozen=True)
class Piece:
    """Blocks of a chain that leave together, the last first."""

    line: staging.Line
    places: Sequence[int]  # in the chain
    keys: Sequence[BlockKey]  # of these


@dataclasses.dataclass(frozen=True)
class Keep:
    """Order to keep the blocks of a chain for so many seconds."""

    keys: Sequence[BlockKey]
    seconds: float


class Departures:
    """The blocks that leave an engine's device. For its thread; copies have a thread of their own.

    A piece is read between two runs, by a program for which nobody waits, and copied while the next one runs.
    Blocks that have left the cache meanwhile, or that cannot be copied, are lost hits.
    """

    def __init__(self, tiers: Tiers, device: Device) -> None:
        self._tiers, self._device, self._specs = tiers, device, device.step_config.grouping.specs
        self._size = staging.piece_size(device.state, len(self._specs))
        self._waiting: collections.deque[Piece | Keep] = collections.deque()
        self._under_way: collections.deque[Future[None]] = collections.deque()
        self._leaving: set[BlockKey] = set()
        self._thread = ThreadPoolExecutor(1, "jaxpaged-departures")
        self._begin(Piece(staging.Line.of(device.state, np.zeros(0, np.int32), 0), (), ()))  # compiles
        self.finish()

    @property
    def has_any(self) -> bool:
        """Whether blocks are on their way."""
        return bool(self._waiting or self._under_way)

    def add(self, tokens: np.ndarray, salt: int, keys: Sequence[BlockKey]) -> None:
        """Let blocks of a sequence leave which the tiers lack: those of its first tokens with these keys."""
        state = self._device.state
        read = groups.blocks_read(self._specs, len(keys), state.tables.block_size)
        new = [i for i in range(len(keys) - 1, -1, -1) if self._is_new(keys[i], read[:, i])]
        if not new:
            return
        line = staging.Line.of(state, tokens[: len(keys) * state.tables.block_size], salt)
        self._leaving.update(keys[i] for i in new)
        count = self._size // len(self._specs)
        for first in range(0, len(new), count):
            places = new[first : first + count]
            self._waiting.append(Piece(line, places, [keys[i] for i in places]))
        self.begin()

    def keep(self, keys: Sequence[BlockKey], seconds: float) -> None:
        """Keep the blocks of a chain in the tiers, when those have come that were added before."""
        self._waiting.append(Keep(keys, seconds))

    def begin(self) -> None:
        """Read as many pieces on the device as have room. Waits for nothing."""
        while self._under_way and self._under_way[0].done():
            self._end(self._under_way.popleft())
        while self._waiting and len(self._under_way) < MOST_UNDER_WAY:
            self._begin(self._waiting.popleft())

    def finish(self) -> None:
        """Wait until all has been copied."""
        while self._under_way or self._waiting:
            self.begin()
            self.wait()

    def wait(self) -> None:
        """Wait until what was begun first has been copied."""
        if self._under_way:
            self._end(self._under_way.popleft())

    def close(self) -> None:
        """Copy what is under way, and nothing more."""
        self._waiting.clear()
        self._thread.shutdown()

    def _is_new(self, key: BlockKey, is_read: np.ndarray) -> bool:
        """Tell whether the tiers lack a block, or groups of it that a prompt which ends here reads."""
        if key in self._leaving:
            return False
        if len(is_read) == 1:
            return not self._tiers.has(key)
        stored = self._tiers.get(key)
        return (
            not self._tiers.has(key) if stored is None else bool(np.any(is_read & ~np.array(stored.present)))
        )

    def _begin(self, piece: Piece | Keep) -> None:
        if isinstance(piece, Keep):
            self._under_way.append(self._thread.submit(self._tiers.keep, piece.keys, piece.seconds))
            return
        pairs = [(group, i) for i in piece.places for group in range(len(self._specs))]
        state = self._device.state
        places = staging.places_of(state, pairs, self._size)
        leaving = staging.leaving(state, piece.line, places, self._specs, self._device.mesh)
        self._under_way.append(self._thread.submit(self._put, piece, leaving))

    def _put(self, piece: Piece, leaving: staging.Leaving) -> None:
        """Copy a piece and put its blocks into the tiers; in the thread for that."""
        is_there, arrays = leaving.on_host(self._device.mesh)
        num_groups = len(self._specs)
        for at, key in enumerate(piece.keys):
            present = is_there[at * num_groups : (at + 1) * num_groups]
            if present[0] and not self._has_all(key, present):
                ids = at * num_groups + np.flatnonzero(present)
                block = StoredBlock(tuple(present.tolist()), {n: x[ids] for n, x in arrays.items()})
                self._tiers.put(key, block)
            self._leaving.discard(key)

    def _has_all(self, key: BlockKey, present: np.ndarray) -> bool:
        """Tell whether host memory has a block with at least these groups' K and V, of several."""
        stored = self._tiers.get(key) if len(present) > 1 else None
        return stored is not None and bool(np.all(~present | np.array(stored.present)))

    def _end(self, done: Future[None]) -> None:
        try:
            done.result()
        except Exception:  # a store of somebody's, or no memory: hits are lost
            logging.exception("blocks cannot be kept in tiers")
            self._leaving.clear()
