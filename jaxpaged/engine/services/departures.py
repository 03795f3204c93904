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
    pairs: Sequence[Sequence[staging.Pair]]  # the groups' blocks at each place of the chain
    keys: Sequence[BlockKey]  # of these places

    @property
    def blocks(self) -> list[staging.Pair]:
        """All blocks, in the order in which they leave."""
        return [pair for together in self.pairs for pair in together]


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
        self._sizes = staging.PieceSizes.of(device.state)
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
        pairs = self._pairs(new, len(keys))
        for piece in self._sizes.cut(pairs):
            self._waiting.append(Piece(line, [pairs[n] for n in piece], [keys[new[n]] for n in piece]))
        self.begin()

    def _pairs(self, places: Sequence[int], num_blocks: int) -> list[list[staging.Pair]]:
        """Return the groups' blocks at places of a chain that are worth keeping, if they are there.

        Those of further size classes are large: they are kept where a prompt that ends with the chain reads
        them next, or one that is a block shorter, because a token must be left to compute.
        """
        block_size = self._device.state.tables.block_size
        is_worth = groups.blocks_read(self._specs, num_blocks, block_size)
        is_worth[:, :-1] |= groups.blocks_read(self._specs, num_blocks - 1, block_size)
        is_worth[[group for group, size_class in enumerate(self._sizes.classes) if size_class == 0]] = True
        return [[(int(group), i) for group in np.flatnonzero(is_worth[:, i])] for i in places]

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
        state = self._device.state
        places = self._sizes.places(piece.blocks)
        leaving = staging.leaving(state, piece.line, places, self._specs, self._device.mesh)
        self._under_way.append(self._thread.submit(self._put, piece, leaving))

    def _put(self, piece: Piece, leaving: staging.Leaving) -> None:
        """Copy a piece and put its blocks into the tiers; in the thread for that."""
        is_there, arrays = leaving.on_host(self._device.mesh)
        classes, class_of = self._sizes.classes, self._device.state.kv_cache.class_of
        place_of = {  # of the blocks that were there, in the arrays of their size class
            pair: place
            for pairs, flags in zip(self._sizes.by_class(piece.blocks), is_there, strict=True)
            for place, (pair, is_here) in enumerate(zip(pairs, flags, strict=False))
            if is_here
        }
        for together, key in zip(piece.pairs, piece.keys, strict=True):
            here = [pair for pair in together if pair in place_of]
            present = np.zeros(len(classes), bool)
            present[[group for group, _ in here]] = True
            if present[0] and not self._has_all(key, present):
                of_block = {
                    name: x[[place_of[pair] for pair in here if classes[pair[0]] == class_of(name)]]
                    for name, x in arrays.items()
                }
                self._tiers.put(key, StoredBlock(tuple(present.tolist()), of_block))
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
