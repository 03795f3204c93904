"""Cache of compiled constraints for one vocabulary: in memory, on disk, and else made by a worker."""

import collections
import json
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from absl import logging

from jaxpaged import disk_cache
from jaxpaged.grammar import files
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.nodes import Limits
from jaxpaged.grammar.vocabulary import TokenBytes, token_bytes
from jaxpaged.grammar.worker import Worker
from jaxpaged.text.vocabulary import Vocabulary

SUFFIX = ".grammar"
MAX_FILES = 256
MAX_BYTES = 256 * 2**20  # of automata in memory that are done


class Constraint(Protocol):
    """A constraint, as `StructuredOutputsParams` is one."""

    def key(self) -> str:
        """Return its fields as JSON text, the same for the same constraint."""


class GrammarCache:
    """Automata of constraints. Any thread may ask; one process compiles, one constraint after another."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limits: Limits | None = None
    ) -> None:
        self._made_from = tokenizer, vocab_size, tuple(eos_ids)
        self._limits = limits or Limits()
        self._known: collections.OrderedDict[str, Future[TokenAutomaton]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._tokens: TokenBytes | None = None
        self._worker: Worker | None = None
        self._finalizer = weakref.finalize(self, _end, self._thread, self.__dict__)

    def get(self, constraint: Constraint) -> Future[TokenAutomaton]:
        """Return the automaton to come of a constraint: the same object while it is in memory.

        The future raises `GrammarError` for one that cannot be met, is too large or is not supported.
        """
        key = constraint.key()
        with self._lock:
            if (known := self._known.get(key)) is None:
                known = self._known[key] = self._thread.submit(self._make, key)
            self._known.move_to_end(key)
            self._forget()
        return known

    def close(self) -> None:
        """End the thread and the process. Nothing can be asked any more."""
        self._finalizer()

    def _forget(self) -> None:
        """Forget what failed, and what was used longest ago, until the rest is not too large."""
        total = 0
        for key, known in reversed(list(self._known.items())):
            if not known.done():
                continue
            if known.cancelled() or known.exception() is not None:
                del self._known[key]
                continue
            total += known.result().nbytes
            if total > MAX_BYTES and key != next(reversed(self._known)):
                del self._known[key]

    def _make(self, key: str) -> TokenAutomaton:
        if self._tokens is None:
            tokenizer, vocab_size, eos_ids = self._made_from
            self._tokens = token_bytes(Vocabulary(tokenizer), vocab_size, eos_ids)
        made_from = ("grammar", files.VERSION, key, self._tokens.digest, self._limits)
        path = disk_cache.path_of(made_from, SUFFIX)
        if path is not None and (found := self._read(path)) is not None:
            return found
        if self._worker is None:
            self._worker = Worker(self._tokens, self._limits)
        made = self._worker.compile(json.loads(key))
        if path is not None:
            try:
                disk_cache.write_file(path, files.to_bytes(made))
                disk_cache.prune(path, MAX_FILES)
            except OSError as problem:
                logging.warning("a grammar could not be kept in %s: %s", path, problem)
        return made

    def _read(self, path: Any) -> TokenAutomaton | None:
        assert self._tokens is not None
        try:
            if not disk_cache.is_own(path.parent) or not disk_cache.is_own(path):
                return None
            content = path.read_bytes()
        except OSError:
            return None
        found = files.from_bytes(content, len(self._tokens.raw), self._limits)
        if found is None:
            logging.warning("%s is not used: it is torn, or not a grammar of ours", path)
        else:
            path.touch()
        return found


def _end(thread: ThreadPoolExecutor, attributes: dict[str, Any]) -> None:
    thread.shutdown(wait=True, cancel_futures=True)
    if (worker := attributes.get("_worker")) is not None:
        worker.close()
