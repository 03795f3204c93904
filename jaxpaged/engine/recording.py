"""Recorder: writes what an engine is asked as a trace for `jaxpaged lab`: times, lengths and shared prefixes.

Each request is a JSON line in Mooncake's format with the engine's `block_size`: `timestamp` in ms since the
recording began, `input_length`, `output_length`, and `hash_ids`, one for each block of the prompt. The ids
are hashes, under a key that is forgotten, of the prompt up to the block's end and of its salt. Equal ids mean
equal tokens, and nothing of them can be read from an id.
"""

import functools
import hashlib
import itertools
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import logging

from jaxpaged.checks import InputError, check
from jaxpaged.engine.handle import EngineDeadError, Handle, Item, Sink
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.texts import TextError

BEGINS = b'{"timestamp": '  # each line of a trace
ID_BYTES = 7  # so that ids fit into an int64


@dataclass
class _Asked:
    timestamp: int
    request: Request
    output_length: int = 0
    has_ended: bool = False


class Recorder:
    """Writes the requests of one engine down, in the order in which they came, each when it has ended."""

    def __init__(self, path: str | os.PathLike[str], block_size: int) -> None:
        """Open the file; a trace that was in it is gone. Raises `InputError` if it can't be written, or holds
        anything else.
        """
        self._path: Path | None = Path(path)  # None once it cannot be written any more
        try:
            if self._path.is_file():
                with self._path.open("rb") as file:
                    begin = file.read(len(BEGINS))
                check("record_trace", str(path), "a new file, or a trace", begin in (b"", BEGINS))
            self._path.write_text("", encoding="utf-8")
        except OSError as error:
            raise InputError(f"record_trace={str(path)!r} cannot be written: {error}") from error
        self._block_size = block_size
        self._key = secrets.token_bytes(16)
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}  # not yet written, by request id, in their order

    def record(
        self, requests: Sequence[Request], sink: "Sink | None", queue: Callable[[Sink], "list[Handle]"]
    ) -> "list[Handle]":
        """Let requests be queued, with a sink that also notes what becomes of them.

        An answer is a line; beam searches are left out, for their rows are not requests of somebody's.
        """
        with self._lock:
            handles = queue(functools.partial(self._note, sink))
            now = round(1000 * (time.monotonic() - self._began))
            for handle in handles:
                if handle.request.beams is None and self._path is not None:
                    self._asked[handle.request_id] = _Asked(now, handle.request)
        return handles

    def _note(self, sink: "Sink | None", item: Item) -> None:
        """Note what became of a request, then tell its sink: a recording that fails changes no answer."""
        with self._lock:
            if self._path is not None:
                try:
                    self._take(item)
                    self._write()
                except Exception:
                    logging.exception("the trace ends here")
                    self._path = None
                    self._asked = {}
        if sink is not None:
            sink(item)

    def _take(self, item: Item) -> None:
        if isinstance(item, EngineDeadError):  # what has not ended never will
            self._asked = {key: asked for key, asked in self._asked.items() if asked.has_ended}
        elif (asked := self._asked.get(item.request_id)) is not None:
            if isinstance(item, Delta):
                asked.output_length += len(item.token_ids)
            asked.has_ended |= isinstance(item, TextError) or bool(item.finish_reason)

    def _write(self) -> None:
        """Write the requests that have ended, up to the first that has not."""
        ended = [*itertools.takewhile(lambda item: item[1].has_ended, self._asked.items())]
        text = ""
        for request_id, asked in ended:
            del self._asked[request_id]
            line = {
                "timestamp": asked.timestamp,
                "input_length": len(asked.request.prompt_token_ids),
                "output_length": asked.output_length,
                "hash_ids": self._ids(asked.request),
                "block_size": self._block_size,
            }
            text += json.dumps(line) + "\n"
        if text and self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:  # a full disk must not stop anybody's answer
                logging.error("the trace ends here: %s cannot be written: %s", self._path, error)
                self._path = None

    def _ids(self, request: Request) -> list[int]:
        so_far = hashlib.blake2b(key=self._key, digest_size=ID_BYTES)
        so_far.update(np.int64(request.salt).tobytes())
        tokens = np.ascontiguousarray(request.prompt_token_ids, np.int32)
        ids = []
        for start in range(0, len(tokens), self._block_size):
            so_far.update(tokens[start : start + self._block_size].tobytes())
            ids.append(int.from_bytes(so_far.digest(), "little"))
        return ids
