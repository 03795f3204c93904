"""Cache of compiled constraints for one vocabulary: automata on disk, and else made by a worker."""

import importlib.metadata
import json
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from absl import logging

from jaxpaged import disk_cache
from jaxpaged.checks import shown
from jaxpaged.grammar import files, recursive
from jaxpaged.grammar.automaton import TokenAutomaton
from jaxpaged.grammar.nodes import GrammarError, Limits
from jaxpaged.grammar.recursive import Language
from jaxpaged.grammar.vocabulary import TokenBytes, token_bytes
from jaxpaged.grammar.worker import Worker
from jaxpaged.text.vocabulary import Vocabulary

SUFFIX = ".grammar"
MAX_FILES = 256


class Constraint(Protocol):
    """A constraint, as `StructuredOutputsParams` is one."""

    def key(self) -> str:
        """Return its fields as JSON text, the same for the same constraint."""


class GrammarCache:
    """Automata of constraints, and languages of recursive ones. Any thread may ask.

    One process compiles, one constraint after another. Automata are kept on disk alone: who asked keeps them
    in memory.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int], limits: Limits | None = None
    ) -> None:
        self._made_from = tokenizer, vocab_size, tuple(eos_ids)
        self._limits = limits or Limits()
        self._under_way: dict[str, Future[TokenAutomaton | Language]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._tokens: TokenBytes | None = None
        self._worker: Worker | None = None
        self._finalizer = weakref.finalize(self, _end, self._thread, self.__dict__)

    def get(self, constraint: Constraint) -> Future[TokenAutomaton | Language]:
        """Return the automaton to come of a constraint, or its language: one for all who ask before that.

        The future raises `GrammarError` for one that cannot be met, is too large or is not supported. Raises
        `GrammarError` when the cache is closed.
        """
        key = constraint.key()
        with self._lock:
            if not self._finalizer.alive:
                raise GrammarError("structured outputs cannot be compiled: the engine was closed")
            if (found := self._under_way.get(key)) is None:
                found = self._under_way[key] = self._thread.submit(self._make, key)
                found.add_done_callback(lambda _: self._under_way.pop(key, None))
        return found

    def close(self) -> None:
        """End the thread and the process. Nothing can be asked any more."""
        self._finalizer()

    def _make(self, key: str) -> TokenAutomaton | Language:
        if self._tokens is None:
            tokenizer, vocab_size, eos_ids = self._made_from
            self._tokens = token_bytes(Vocabulary(tokenizer), vocab_size, eos_ids)
        made_from: tuple[object, ...] = ("grammar", files.VERSION, key, self._tokens.digest, self._limits)
        if recursive.is_installed():  # on which JSON of any depth depends
            made_from = (*made_from, "llguidance", importlib.metadata.version("llguidance"))
        path = disk_cache.path_of(made_from, SUFFIX)
        if path is not None and (found := self._read(path)) is not None:
            return _told(found, key)
        if self._worker is None:
            self._worker = Worker(self._tokens, self._limits)
        made = self._worker.compile(json.loads(key))
        if isinstance(made, str):
            return Language(made, self._tokens)
        if path is not None:
            try:
                disk_cache.write_file(path, files.to_bytes(made))
                disk_cache.prune(path, MAX_FILES)
            except OSError as problem:
                logging.warning("a grammar could not be kept in %s: %s", path, problem)
        return _told(made, key)

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


def _told(automaton: TokenAutomaton, key: str) -> TokenAutomaton:
    """Return an automaton; log it if values inside values were cut, and nobody asked for that."""
    if automaton.levels and "max_depth" not in json.loads(key):
        logging.warning(
            "structured outputs: %s is followed to %d levels of values inside values, not to any depth: "
            "llguidance is not installed, or has not all of its keywords. max_depth says so on purpose",
            *(shown(key), automaton.levels),
        )
    return automaton


def _end(thread: ThreadPoolExecutor, attributes: dict[str, Any]) -> None:
    thread.shutdown(wait=True, cancel_futures=True)
    if (worker := attributes.get("_worker")) is not None:
        worker.close()
