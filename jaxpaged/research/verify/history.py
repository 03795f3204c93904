"""A history: the verbs that two allocators were driven through side by side, and a file of it.

It is JSON: what the two were made with, and a list of [verb, arguments]. `jaxpaged verify allocator --replay`
repeats one.
"""

import json
import os
import pathlib
import tempfile
from typing import Any

MAX_SEQS = 4
MAX_BLOCKS = 5  # blocks of a row
NUM_BLOCKS = 11  # too few for four full rows
MAX_EVICTED = 4  # ids named in one call


# What a history may ask for, by the names of the methods that do it.
VERBS = (
    "admit", "append", "can_allocate", "commit", "evict", "fork", "free", "free_host", "free_twice", "reset",
    "reset_cache", "swap_in", "swap_out", "touch", "truncate", "window",
)  # fmt: skip


class Disagreement(AssertionError):
    """The two sides differ. The message names the verb and what differs."""


class Unusable(Disagreement):
    """The allocator cannot be made, or lacks a method, so that no history can begin."""


class History:
    """History of calls that is being made, and recorded call by call. A subclass says in `step` what a verb
    is, on both sides.
    """

    oracle: Any  # an oracle of `generations`
    block_size: int
    collide = False

    def __init__(self, made_with: dict[str, Any], name: str, save: bool) -> None:
        """Start a history. With `save` it is written to a file when it fails."""
        self.made_with, self.name, self.save_failures = made_with, name, save
        self.history: list[tuple[str, list[Any]]] = []

    def run(self, verb: str, *args: Any) -> bool:
        """Do one verb, and compare. Returns: whether it was done (False: both refused)."""
        self.history.append((verb, list(args)))
        try:
            return self.step(verb, *args)
        except Exception as error:
            if self.save_failures:
                error.add_note(f"after {verb}{tuple(args)}; jaxpaged verify allocator --replay {self.save()}")
            raise

    def step(self, verb: str, *args: Any) -> bool:
        raise NotImplementedError

    def is_defined(self, verb: str, *args: Any) -> bool:
        """Return whether the generation's allocator can be asked for a verb now."""
        if verb in ("free", "free_host", "swap_out", "swap_in") and len(set(args[0])) < len(args[0]):
            return False
        on_host = self.oracle.on_host
        if verb == "append":  # a row of the host's is nobody's on the device
            return not any(num for row, num in enumerate(args[0]) if row in on_host)
        if verb == "fork":
            windowed = set() if self.oracle.forks_windowed else set(self.oracle.windowed())
            return not (on_host & set(args[1]) or windowed & set(args[0]))
        if verb == "swap_out":
            return self.oracle.swaps_windowed or not set(args[0]) & set(self.oracle.windowed())
        return verb != "admit" or args[0] not in on_host

    def has(self, verb: str) -> bool:
        """Return whether the allocator has a verb."""
        raise NotImplementedError

    @property
    def keeps_content(self) -> bool:
        """Whether there is a prefix cache."""
        raise NotImplementedError

    def shown(self) -> str:
        """Return the tables as readable text."""
        raise NotImplementedError

    def save(self, folder: pathlib.Path | None = None) -> pathlib.Path:
        """Write the history to a file that was not there before, and return its path.

        folder: where; without it $JAXPAGED_TRACES, or the folder of temporary files.
        """
        folder = folder or pathlib.Path(os.environ.get("JAXPAGED_TRACES", tempfile.gettempdir()))
        folder.mkdir(parents=True, exist_ok=True)
        # A new name, opened only if nothing has it: others may write into the folder, too.
        with tempfile.NamedTemporaryFile(
            "w", prefix=f"history-{self.name}-", suffix=".json", dir=folder, delete=False
        ) as file:
            json.dump({"made_with": self.made_with, "history": self.history}, file)
        return pathlib.Path(file.name)
