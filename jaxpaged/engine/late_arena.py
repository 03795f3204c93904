"""Arena of structured outputs that an engine takes when a request first asks for one."""

import dataclasses
import threading
import time

from absl import logging

from jaxpaged.engine.device import MEMORY, Device
from jaxpaged.engine.setup import Setup
from jaxpaged.engine.start import Run


class LateArena:
    """Arena that is not there at the start, and the loop over a state that has it.

    The loop is compiled in the thread that first asks, while the engine goes on; the engine's thread takes it
    between two runs. An engine that nobody asks has neither.

    is_due: a request with a grammar has been queued. Set by the engine's thread.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._is_late = device.setup.config.most_arena_words > device.setup.config.arena_words
        self._made: tuple[Setup, Run] | None = None
        self._lock = threading.Lock()
        self.is_due = False

    def prepare(self) -> None:
        """Compile the loop, once, if the arena was not there at the start. For any thread."""
        with self._lock:
            if not self._is_late or self._made is not None:
                return
            began = time.perf_counter()
            setup = self._device.setup
            mib = setup.config.most_arena_words // 2**18
            config = dataclasses.replace(setup.config, structured_outputs_mib=mib)
            processors = setup.processors  # the door's own
            setup = dataclasses.replace(setup, config=config)
            vars(setup)["processors"] = processors
            self._made = setup, self._device.run_with(setup)
            logging.info(
                "compiled for structured outputs (%d MiB) in %.1f s", mib, time.perf_counter() - began
            )

    @property
    def must_open(self) -> bool:
        """Whether the engine's thread must call `open` before it gives a row to the requests that wait."""
        return self.is_due and self._is_late and self._device.resident == frozenset(MEMORY)

    def open(self) -> None:
        """Take the arena. For the engine's thread, between two runs."""
        self.prepare()
        assert self._made is not None
        self._device.take_arena(*self._made)
        self._is_late, self._made = False, None
