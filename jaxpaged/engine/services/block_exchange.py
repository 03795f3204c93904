"""Exchange of blocks with other engines: between two runs the cache gives copies of its blocks, and adopts
others'.
"""

from collections.abc import Iterator

import numpy as np

from jaxpaged.engine.device import MEMORY, Device
from jaxpaged.engine.door import Salts
from jaxpaged.engine.services.events import Events
from jaxpaged.handover import exchange
from jaxpaged.handover.blocks import BlockFormat, Blocks
from jaxpaged.kv_events.tree import Label


class BlockExchange:
    """The blocks of an engine's cache, for other engines. For the engine's thread only."""

    def __init__(self, device: Device, salts: Salts, events: Events | None) -> None:
        self._device, self._salts, self._events = device, salts, events
        self._specs = device.step_config.grouping.specs
        self._format: tuple[int, BlockFormat] | None = None  # of the weights of an update's number

    @property
    def block_format(self) -> BlockFormat:
        """Format of this engine's blocks. The first time after an update it reads all weights. Raises
        `InputError` if blocks cannot travel.
        """
        if self._format is not None and self._format[0] == self._device.num_updates:
            return self._format[1]
        self._device.require(*MEMORY)
        setup = self._device.setup
        described = exchange.describe_format(
            setup.config,
            setup.model_config,
            setup.grouping,
            self._device.params,
            self._device.state.kv_cache,
        )
        self._format = self._device.num_updates, described
        return described

    def export_blocks(self, prompt: np.ndarray, cache_salt: str | None) -> Blocks:
        """Copy the cached blocks of a prompt to the host's memory. Waits for the run under way."""
        block_format, chain = self.block_format, self.locate(prompt, cache_salt)
        arrays = exchange.on_host(self._device.state, chain, self._device.mesh)
        return Blocks(block_format, chain.token_ids, chain.present, cache_salt, arrays, chain.classes)

    def locate(self, prompt: np.ndarray, cache_salt: str | None) -> exchange.Chain:
        """Find the cached blocks of a prompt. Waits for the run under way."""
        self._device.require(*MEMORY)
        salt = self._salts.number(cache_salt)
        return exchange.locate(self._device.state, prompt, salt, self._specs, self._device.mesh)

    def chunks(self, chain: exchange.Chain) -> list[exchange.Chunk]:
        """Return K and V of a chain that `locate` has just found, on the device."""
        return list(exchange.read_chunks(self._device.state, chain, self._device.mesh))

    def adopt_blocks(self, blocks: Blocks) -> int:
        """Cache another engine's blocks. Return how many are found: all, or 0. Raises `InputError`."""
        self.block_format.require(blocks)
        exchange.check_lines(blocks, self._specs)
        state = self._device.state
        counts = [len(ids) for ids in exchange.by_class(blocks.present, blocks.present, state.tables.classes)]
        chunks = exchange.cut(blocks.arrays, counts, state.kv_cache, self._device.mesh)
        return self.adopt(blocks, chunks)

    def adopt(self, blocks: Blocks, chunks: Iterator[exchange.Chunk]) -> int:
        """Cache blocks of this engine's format, whose K and V come in chunks."""
        self._device.require(*MEMORY)
        salt = self._salts.number(blocks.cache_salt)
        reservation = exchange.reserve(
            self._device.state, blocks.token_ids, blocks.present, salt, self._device.mesh
        )
        if reservation is None:
            return 0
        self._device.adopt(reservation, chunks)
        if self._events is not None:
            self._events.name_salt(salt, Label(blocks.cache_salt))
            self._events.tell(self._device.state)
        return blocks.num_blocks
