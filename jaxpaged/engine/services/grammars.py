"""Grammars on the device: which has room in the arena, and the next masks of those that the host follows."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged.engine.arena import Arena
from jaxpaged.engine.by_host import MASK_LINES, Line, mask_arrays
from jaxpaged.engine.device import Device
from jaxpaged.engine.host_rows import HostRows
from jaxpaged.engine.replicas import Replicas
from jaxpaged.engine.request import Request
from jaxpaged.engine.request_queue import Queued
from jaxpaged.engine.services.service import InUse, Service
from jaxpaged.step.automata import BLOCK_WORDS
from jaxpaged.step.feature_values import GRAMMARS

# Blocks of an automaton written in one dispatch.
WRITTEN_BLOCKS = 64


class DeviceGrammars(Service):
    """The device's arena of automata and masks. A grammar keeps its room while it is in use."""

    def __init__(self, device: Device, rows: HostRows, replicas: Replicas) -> None:
        self._device, self._rows, self._replicas = device, rows, replicas
        self._vocab_size = device.setup.model_config.vocab_size
        self._arena = Arena(device.setup.config.arena_words)

    @property
    def must_read_first(self) -> bool:
        """Whether rows rest until the host has read their tokens."""
        return self._rows.has_followed

    @property
    def waits_for_run(self) -> bool:
        return self._rows.has_followed

    def warm_up(self) -> None:
        self._device.write_automaton(np.zeros((WRITTEN_BLOCKS, BLOCK_WORDS), np.uint32), 0, 0)
        self._write_masks([])

    def has_room(self, request: Request, in_use: InUse) -> bool:
        return request.grammar is None or self._arena.has_room(request.grammar, in_use.grammars)

    def make_room(self, request: Request, in_use: InUse) -> bool:
        grammar = request.grammar
        if grammar is None:
            return True
        first, is_new = self._arena.find(grammar, in_use.grammars)
        if first is None:
            return False
        if is_new:
            for blocks, count in grammar.chunks(WRITTEN_BLOCKS):
                self._device.write_automaton(blocks, first, count)
                first += blocks.size
        return True

    def row_values(self, queued: Queued) -> dict[str, Any]:
        """Return where the request's grammar begins, and its state behind what is known of the answer."""
        request = queued.request
        # The beams of a search rest together, from the beginning on.
        rests = request.is_followed and request.beams is not None
        opens = None if rests else request.grammar_opens
        return {
            GRAMMARS: self._arena.row_values(
                request.grammar, answer=queued.answer, opens=opens, index=request.index
            )
        }

    def before_run(self) -> None:
        """Write the next masks of rows that rest behind a token that was read, and of new rows.

        An answer whose grammar cannot be followed ends.
        """
        due, lost = self._rows.masks_due(self._first_word)
        for lines in itertools.batched(due, MASK_LINES):
            self._write_masks(lines)
        if lost:
            self._device.abort(self._rows.device_ids_of(lost))

    def _first_word(self, request: Request) -> int:
        """Return the word of the arena at which a request's grammar begins, which has room there."""
        assert request.grammar is not None
        return self._arena.first_word(request.grammar, request.index)

    def _write_masks(self, lines: Sequence[Line]) -> None:
        masks, firsts, rows = mask_arrays(lines, len(self._rows), self._vocab_size)
        self._device.write_masks(masks, firsts, self._replicas.with_rows(rows))
