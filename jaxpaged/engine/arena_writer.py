"""Writer of the device's arena: automata, and the masks of grammars that the host follows."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxpaged.engine.by_host import MASK_LINES, Line, mask_arrays
from jaxpaged.engine.driver_calls import CALLS
from jaxpaged.step import loop
from jaxpaged.step.state import EngineState


class ArenaWriter:
    """The part of a driver that writes into the arena. For the engine's thread only."""

    rows: Any
    door: Any
    _rooms: Any
    _replicas: Any
    _mesh: Any
    _state: EngineState
    _abort_rows: Any

    @CALLS.shared
    def write_automaton(self, blocks: np.ndarray, first: int, count: int) -> None:
        place, mesh = (np.int32(first), np.int32(count)), self._mesh
        arena = loop.write_automaton(self._state.arena, blocks, *place, mesh=mesh)
        self._state = dataclasses.replace(self._state, arena=arena)

    def write_masks(self) -> None:
        """Write the next masks of rows that rest behind a token that was read, and of new rows.

        An answer whose grammar cannot be followed ends.
        """
        due, lost = self.rows.masks_due(self._rooms.first_word)
        for lines in itertools.batched(due, MASK_LINES):
            self.send_masks(lines)
        self._abort_rows(lost)

    def send_masks(self, lines: Sequence[Line]) -> None:
        vocab_size = self.door.model_config.vocab_size
        masks, firsts, rows = mask_arrays(lines, len(self.rows), vocab_size)
        self.write_mask_lines(masks, firsts, self._replicas.with_rows(rows))

    @CALLS.shared
    def write_mask_lines(self, masks: np.ndarray, firsts: np.ndarray, rows: np.ndarray) -> None:
        its = self._state.rows
        assert its.grammars is not None
        places = self._state.arena, its.grammars.state
        arena, state = loop.write_masks(places, masks, firsts, rows, mesh=self._mesh)
        its = dataclasses.replace(its, grammars=dataclasses.replace(its.grammars, state=state))
        self._state = dataclasses.replace(self._state, arena=arena, rows=its)
