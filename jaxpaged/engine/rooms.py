"""Rooms on the device for what requests bring with them: adapters and grammars."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.engine.adapters import Adapter, OnDevice
from jaxpaged.engine.arena import Arena, Grammar
from jaxpaged.engine.request import Request
from jaxpaged.engine.request_queue import Queued
from jaxpaged.models.lora import Arrays

# Blocks of an automaton written in one dispatch.
WRITTEN_BLOCKS = 64


@dataclasses.dataclass
class InUse:
    """The adapters and the grammars of requests that have rows."""

    adapters: set[Adapter | None]
    grammars: set[Grammar | None]

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "InUse":
        """Return those of some requests."""
        made = cls(set(), set())
        for request in requests:
            made.add(request)
        return made

    def add(self, request: Request) -> None:
        """Add those of one request more."""
        self.adapters.add(request.adapter)
        self.grammars.add(request.grammar)


class Rooms:
    """The device's adapter slots and its arena of automata. For one thread.

    put_adapter: writes an adapter's arrays into the slot of a number.
    write_automaton: writes blocks of words into the arena, from a word on, as many as the last number says.
    """

    def __init__(
        self,
        config: EngineConfig,
        put_adapter: Callable[[Arrays, int], None],
        write_automaton: Callable[[np.ndarray, int, int], None],
    ) -> None:
        self._config = config
        self._adapters, self._arena = OnDevice(config.max_loras), Arena(config.arena_words)
        self._put_adapter, self._write_automaton = put_adapter, write_automaton

    def has_room(self, request: Request, in_use: InUse) -> bool:
        """Check whether `put` would find room."""
        adapter, grammar = request.adapter, request.grammar
        has_slot = adapter is None or self._adapters.has_room(adapter, in_use.adapters)
        return has_slot and (grammar is None or self._arena.has_room(grammar, in_use.grammars))

    def put(self, request: Request, in_use: InUse) -> bool:
        """Load a request's adapter and grammar to the device if they are not there.

        Returns False if those in use leave no room.
        """
        if (adapter := request.adapter) is not None:
            number, is_new = self._adapters.find(adapter, in_use.adapters)
            if number is None:
                return False
            if is_new:
                self._put_adapter(adapter.arrays, number)
        if (grammar := request.grammar) is not None:
            first, is_new = self._arena.find(grammar, in_use.grammars)
            if first is None:
                return False
            if is_new:
                for blocks, count in grammar.chunks(WRITTEN_BLOCKS):
                    self._write_automaton(blocks, first, count)
                    first += blocks.size
        return True

    def first_word(self, request: Request) -> int:
        """Return the word of the arena at which a request's grammar begins, which has a place there."""
        assert request.grammar is not None
        return self._arena.first_word(request.grammar, request.index)

    def row_values(self, queued: Queued) -> dict[str, Any]:
        """Return what `Rows` holds of a request's adapter and grammar, which must have room."""
        request, values = queued.request, dict[str, Any]()
        if self._config.enable_lora:
            values["lora"] = self._adapters.number_of(request.adapter)
        if self._config.arena_words:
            # The beams of a search rest together, from the beginning on.
            rests = request.is_followed and request.beams is not None
            opens = None if rests else request.grammar_opens
            of_answer = queued.answer, opens, request.index
            values["grammars"] = self._arena.row_values(request.grammar, *of_answer)
        return values
