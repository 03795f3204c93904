"""Passing: the part of a driver that hands blocks to others and adopts theirs, for the engine's thread."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxpaged.config import EngineConfig
from jaxpaged.engine.door import Door
from jaxpaged.engine.driver_calls import CALLS
from jaxpaged.engine.events import Events
from jaxpaged.engine.residence import MEMORY, Residence
from jaxpaged.engine.stats import Stats
from jaxpaged.handover import exchange
from jaxpaged.handover.blocks import BlockFormat, Blocks
from jaxpaged.kv_events.tree import Label


class Passing(Residence):
    """The part of a driver that takes blocks out of its cache, and puts others' into it, between two runs."""

    config: EngineConfig
    door: Door
    step_config: Any
    stats: Stats
    _mesh: Mesh | None
    events: Events | None = None  # of the prefix cache; None: nobody is told

    @CALLS.shared
    def look(self) -> None:
        """Let the devices report once more what the prefix cache has."""
        if self.events is not None:
            self.events.look(self._state)

    @functools.cached_property
    def block_format(self) -> BlockFormat:
        """Format of this engine's blocks. The first time it reads all weights. Raises `InputError` if blocks
        cannot travel.
        """
        self.require(*MEMORY)
        its = self.door.model_config, self.setup.grouping, self.params, self._state.kv_cache
        return exchange.describe_format(self.config, *its)

    def export_blocks(self, prompt: np.ndarray, cache_salt: str | None) -> Blocks:
        """Copy the cached blocks of a prompt to the host's memory. Waits for the run under way."""
        block_format, chain = self.block_format, self.locate(prompt, cache_salt)
        arrays = exchange.on_host(self._state, chain, self._mesh)
        return Blocks(block_format, chain.token_ids, chain.present, cache_salt, arrays)

    def locate(self, prompt: np.ndarray, cache_salt: str | None) -> exchange.Chain:
        self.require(*MEMORY)
        its = self.door.salts.number(cache_salt), self.step_config.grouping.specs
        return exchange.locate(self._state, prompt, *its, self._mesh)

    def chunks(self, chain: exchange.Chain) -> list[exchange.Chunk]:
        """Return K and V of a chain that `locate` has just found, on the device."""
        return list(exchange.read_chunks(self._state, chain, self._mesh))

    def adopt_blocks(self, blocks: Blocks) -> int:
        """Cache another engine's blocks. Return how many are found: all, or 0. Raises `InputError`."""
        self.block_format.require(blocks)
        exchange.check_lines(blocks, self.step_config.grouping.specs)
        its = blocks.arrays, int(blocks.present.sum()), self._state.kv_cache
        return self.adopt(blocks, exchange.cut(*its, self._mesh))

    def adopt(self, blocks: Blocks, chunks: Iterator[exchange.Chunk]) -> int:
        """Cache blocks of this engine's format, whose K and V come in chunks."""
        self.require(*MEMORY)
        its = blocks.token_ids, blocks.present, self.door.salts.number(blocks.cache_salt)
        reservation = exchange.reserve(self._state, *its, self._mesh)
        if reservation is None:
            return 0
        for state in exchange.fill(self._state, reservation, chunks, self._mesh):
            self._state = state
        if self.events is not None:
            self.events.name_salt(its[2], Label(blocks.cache_salt))
            self.events.tell(self._state)
        return blocks.num_blocks
